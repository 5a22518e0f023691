"""Brings vLLM's KV events from the engine's process, in order and without holes, or repairs what was lost.

Owns how far the events have come. Never asks the engine for anything but its own pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from shared.errors import EngineError, ProtocolError
from shared.types import BlockKey, CacheScheme
from worker.engines.base import BlockChange, OnBlocks
from worker.engines.vllm_events import EventTranslator, PoolSnapshot, decode_batch

logger = logging.getLogger(__name__)

_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBE_TIMEOUT_S = 5.0
_REPLAY_TIMEOUT_S = 2.0
"""The publisher looks at its replay socket every 0.1 s when idle; past this the hole is repaired from the pool."""


async def _next_batch(subscriber: zmq.asyncio.Socket) -> tuple[int, bytes]:
    """Sequence number and payload."""
    *_, seq, payload = await subscriber.recv_multipart()
    return int.from_bytes(seq, "big"), payload


FetchSnapshot = Callable[[], Awaitable[PoolSnapshot]]


class EventStream:
    """Follows one engine's event sockets and tells the owner of every change, in order.

    A hole in the sequence is filled from the publisher's replay buffer, and where that does not reach, from the pool
    (`fetch_snapshot`). Without a way to ask the pool, as on stock vLLM, everything is forgotten: blocks that are there
    and not known cost time, never correctness.
    """

    def __init__(
        self,
        scheme: CacheScheme,
        endpoint: str,
        replay_endpoint: str,
        on_blocks: OnBlocks,
        fetch_snapshot: FetchSnapshot | None,
        *,
        quiet_s: float = 5.0,
    ) -> None:
        self._model = scheme.model
        self._translator = EventTranslator(scheme)
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._on_blocks = on_blocks
        self._fetch_snapshot = fetch_snapshot
        self._quiet_s = quiet_s
        self._next_seq = 0
        self._num_arrived = 0
        """Batches that the subscription has brought, or that are known never to come by it."""
        self._num_known = 0
        """Batches that were known to be published when it was last quiet."""
        self._lock = asyncio.Lock()
        self._context: zmq.asyncio.Context | None = None
        self._subscriber: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_replays = 0
        self.num_rebuilds = 0

    @property
    def is_cache_aware(self) -> bool:
        """Whether the engine's cache can be described by our keys, and is."""
        return self._translator.refusal is None

    @property
    def num_left_out(self) -> int:
        """Resident blocks that were stored without a key; see `EventTranslator`."""
        return self._translator.num_left_out

    async def start(self) -> None:
        """Subscribe to a publisher that is bound by now."""
        self._context = zmq.asyncio.Context()
        subscriber = self._subscriber = self._context.socket(zmq.SUB)
        subscriber.set_hwm(0)
        subscriber.subscribe(b"")
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        subscriber.connect(self._endpoint)
        try:
            async with asyncio.timeout(_SUBSCRIBE_TIMEOUT_S):
                await monitor.recv_multipart()
        except TimeoutError:
            logger.warning("KV events: no subscription within %.1f s, going on without", _SUBSCRIBE_TIMEOUT_S)
        subscriber.disable_monitor()
        monitor.close(linger=0)
        self._task = asyncio.create_task(self._follow(subscriber), name="kv-events")

    async def close(self) -> None:
        """Stop following. What is under way is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._subscriber is not None:
            self._subscriber.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def resident(self) -> set[BlockKey]:
        """The keys that the pool holds now; `on_blocks` has been told all that leads there.

        Raises:
            EngineError: the pool does not answer.
        """
        async with self._lock:
            if self.is_cache_aware:
                if self._fetch_snapshot is not None:
                    await self._take_snapshot(self._fetch_snapshot)
                else:
                    await self._replay()
            return self._translator.keys

    def forget(self) -> None:
        """The pool was emptied: say so now, although the engine's own event comes with its next step only."""
        if self.is_cache_aware:
            self._tell(self._translator.clear())

    def refuse(self, reason: str) -> None:
        """Say that nothing is resident, and nothing ever after. Loud once."""
        if self.is_cache_aware:
            self._give_up(self._translator.refuse(reason))

    def _give_up(self, change: BlockChange) -> None:
        logger.error("model %s is not cache-aware: %s", self._model, self._translator.refusal)
        self._tell(change)

    async def _follow(self, subscriber: zmq.asyncio.Socket) -> None:
        try:
            while self.is_cache_aware:
                is_quiet = not await subscriber.poll(self._quiet_s * 1000)
                async with self._lock:
                    # A lost last batch shows no hole: in a quiet time ask whether there is more than has come.
                    await (self._look_for_more() if is_quiet else self._receive(*await _next_batch(subscriber)))
        except Exception as error:
            logger.exception("KV events: following them failed")
            self.refuse(f"following the engine's events failed: {type(error).__name__}: {error}")
        finally:
            # Open and unread it would gather all that the engine goes on to publish.
            subscriber.close(linger=0)

    async def _look_for_more(self) -> None:
        """Ask in a quiet time, and tell of what has not come by itself since the last one."""
        if self._num_arrived < self._num_known:
            self._tell_of_loss(self._num_known)
        await self._replay()
        self._num_known = self._next_seq

    async def _receive(self, seq: int, payload: bytes) -> None:
        """Handle one batch from the subscription; what a replay or a snapshot already brought is dropped."""
        if seq > self._next_seq:
            self.num_replays += 1
            await self._replay()
        if seq > self._next_seq and self.is_cache_aware:
            await self._rebuild(f"batches {self._next_seq} to {seq - 1} are lost, and past replaying")
            self._next_seq = max(self._next_seq, seq)
        elif seq > self._num_arrived and self.is_cache_aware:
            self._tell_of_loss(seq)
        self._num_arrived = max(self._num_arrived, seq + 1)
        if seq == self._next_seq:
            await self._take(payload)

    def _tell_of_loss(self, num_published: int) -> None:
        lost = self._num_arrived, num_published - 1
        logger.warning("KV events: batches %d to %d were lost on their way and are made up for", *lost)
        self._num_arrived = num_published

    async def _take(self, payload: bytes) -> None:
        self._next_seq += 1
        if not self.is_cache_aware:
            return
        try:
            change = self._translator.apply(decode_batch(payload))
        except ProtocolError as error:
            # Events before the faulty one have changed what nobody has been told. What is told must be what is known
            # before anything waits, since waiting may end in a cancellation.
            self._tell(self._translator.clear())
            await self._rebuild(str(error))
            return
        if self._translator.refusal is not None:
            self._give_up(change)
        else:
            self._tell(change)

    async def _replay(self) -> None:
        """Ask the publisher for what it has from `_next_seq` on, and take what follows without a hole."""
        assert self._context is not None
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            try:
                async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                    await dealer.send_multipart([b"", self._next_seq.to_bytes(8, "big")])
                    while True:
                        *_, seq, payload = await dealer.recv_multipart()
                        if seq == _END_SEQ:
                            return
                        if int.from_bytes(seq, "big") == self._next_seq:
                            await self._take(payload)
            except TimeoutError:
                # In a quiet time nothing is missing for all that is known; otherwise a rebuilding tells.
                logger.info("KV events: no answer to a replay request within %.1f s", _REPLAY_TIMEOUT_S)

    async def _rebuild(self, cause: str) -> None:
        self.num_rebuilds += 1
        if self._fetch_snapshot is not None:
            try:
                await self._take_snapshot(self._fetch_snapshot)
            except EngineError as error:
                cause = f"{cause}; the pool cannot be asked: {error}"
            else:
                logger.warning("KV events: the resident set is the pool's own account now: %s", cause)
                return
        logger.warning("KV events: forgetting the resident set: %s", cause)
        if self._translator.keys:
            self._tell(self._translator.clear())

    async def _take_snapshot(self, fetch_snapshot: FetchSnapshot) -> None:
        """Batches before the snapshot are contained in it; `_receive` drops them if they are still to come."""
        snapshot = await fetch_snapshot()
        self._next_seq = max(self._next_seq, snapshot.num_published)
        self._tell(self._translator.replace(snapshot))

    def _tell(self, change: BlockChange) -> None:
        if change.stored or change.removed or change.is_reset:
            self._on_blocks(change)
