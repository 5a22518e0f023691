"""Follows the KV events of a server that somebody else runs: in order, without holes, and of one life of it.

Owns how far the events have come. What cannot be known for sure is forgotten: it costs time, never correctness.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from xxhash import xxh3_128_digest
from zmq.utils.monitor import parse_monitor_message

from shared.errors import EngineError, ProtocolError
from shared.types import BlockKey
from worker.engines.attached_options import AttachedOptions
from worker.engines.base import OnBlocks
from worker.engines.vllm_events import EventTranslator, decode_batch

logger = logging.getLogger(__name__)

_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_REPLAY_TIMEOUT_S = 2.0
"""Longest wait for the next batch. The publisher looks at its replay socket every 0.1 s when idle, and after each batch
otherwise."""
_NUM_BETWEEN_PAUSES = 16
"""Replayed batches after which others on this loop have their turn: one of a long prompt takes about 0.1 ms."""
_NUM_STRAGGLERS = 64
"""Batches by which one may come later than a later one: none on one connection, some behind a relay."""
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
"""A peer that is cut off without a word shows as disconnected after this."""


class AttachedEvents:
    """The resident set of one attached engine, as its events tell it.

    Batches are counted from 0 in each life of a publisher, and none comes twice. So a number that has come before, or a
    last batch that the publisher knows nothing of, is another life, which `on_other_life` is told once.

    A hole is filled from the replay socket; where that does not reach, or where there is none, everything known is
    forgotten. The same goes for what was stored before we came: blocks after a block that is not known have no key.
    """

    def __init__(self, options: AttachedOptions, on_blocks: OnBlocks, on_other_life: Callable[[str], None]) -> None:
        server, scheme = options.server, options.scheme
        assert server.events is not None
        self._name = server.worker
        self._endpoint = server.events
        self._replay_endpoint = server.replay
        self._topic = server.topic
        self._timeout_s = options.events_timeout_s
        self._quiet_s = options.quiet_s
        self._on_blocks = on_blocks
        self._on_other_life = on_other_life
        self._translator = EventTranslator(scheme)
        self._next_seq: int | None = None
        """None before the first batch, whatever its number is."""
        self._last_digest = b""
        """Of the batch before `_next_seq`."""
        self._ahead: dict[int, bytes] = {}
        """Digests of batches that a replay has brought and the subscription has not yet, by number."""
        self._is_other_life = False
        self._lock = asyncio.Lock()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.num_replays = 0
        """Holes that a replay has filled, or was asked to."""
        self.num_forgotten = 0
        """Times that everything known was forgotten."""

    @property
    def is_cache_aware(self) -> bool:
        """Whether our keys can describe the engine's cache."""
        return self._translator.refusal is None

    async def start(self) -> None:
        """Subscribe, and take in what the publisher still has. Raises `EngineError` where nobody publishes."""
        self._context = zmq.asyncio.Context()
        subscriber = self._context.socket(zmq.SUB)
        subscriber.set_hwm(0)
        subscriber.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        subscriber.setsockopt(zmq.IPV6, 1)
        subscriber.subscribe(self._topic.encode())
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        subscriber.connect(self._endpoint)
        try:
            async with asyncio.timeout(self._timeout_s):
                await monitor.recv_multipart()
        except TimeoutError:
            raise EngineError(f"events={self._endpoint}: nobody publishes there") from None
        async with self._lock:
            await self._catch_up()
        self._tasks = [
            asyncio.create_task(self._follow(subscriber), name=f"kv-events-{self._name}"),
            asyncio.create_task(self._watch(monitor), name=f"kv-events-watch-{self._name}"),
        ]

    async def close(self) -> None:
        """Stop following. What is under way is dropped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def resident(self) -> set[BlockKey]:
        """The keys that the engine holds now, as far as its events tell; `on_blocks` has been told all that leads
        there.
        """
        async with self._lock:
            await self._catch_up()
            return self._translator.keys

    def forget(self) -> None:
        """The pool was emptied: say so now, although the engine's own event comes with its next step only."""
        self._tell_cleared()

    def refuse(self, reason: str) -> None:
        """Say that nothing is resident, and nothing ever after. Loud once."""
        if self.is_cache_aware:
            self._translator.refuse(reason)
            self._give_up()

    # Following.

    async def _follow(self, subscriber: zmq.asyncio.Socket) -> None:
        try:
            while self.is_cache_aware and not self._is_other_life:
                is_quiet = not await subscriber.poll(self._quiet_s * 1000)
                async with self._lock:
                    if is_quiet:
                        # A lost last batch shows no hole, and a life that ended in quiet no number twice.
                        await self._catch_up()
                    else:
                        await self._receive(await subscriber.recv_multipart())
        except Exception as error:
            logger.exception("%s: following its KV events failed", self._name)
            self.refuse(f"following its events failed: {type(error).__name__}: {error}")
        finally:
            # Open and unread it would gather all that the engine goes on to publish.
            subscriber.close(linger=0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Between two connections anything may have happened: find out, or forget."""
        is_connected = True
        while True:
            try:
                async with asyncio.timeout(None if is_connected else self._timeout_s):
                    message = parse_monitor_message(await monitor.recv_multipart())
            except TimeoutError:
                async with self._lock:
                    self._forget(f"its publisher is away for over {self._timeout_s:g} s")
                is_connected = True  # nothing is left to lose
                continue
            is_connected = message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            async with self._lock:
                if is_connected:
                    await self._catch_up()
                elif self._replay_endpoint is None:
                    self._forget("the connection to its publisher broke, and nothing tells what was missed")

    async def _receive(self, frames: list[bytes]) -> None:
        """One batch of the subscription; what a replay already brought is dropped."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            logger.warning("%s: a message that is no batch of KV events is passed over", self._name)
            return
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if self._next_seq is not None and seq > self._next_seq:
            self.num_replays += 1
            await self._catch_up()
        if self._next_seq is None or seq >= self._next_seq:
            self._take(seq, payload)
        elif self._ahead.pop(seq, None) != xxh3_128_digest(payload):
            self._note_other_life(f"it publishes batch {seq} again, after batch {self._next_seq - 1}")
        for number in [number for number in self._ahead if number < seq - _NUM_STRAGGLERS]:
            del self._ahead[number]

    async def _catch_up(self) -> None:
        """Ask the publisher for its last known batch and all after it, and make sure that it is the same publisher."""
        if self._replay_endpoint is None or self._context is None or self._is_other_life:
            return
        is_known = not self._next_seq
        num_frames = 0
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(self._replay_endpoint)
            try:
                async with asyncio.timeout(_REPLAY_TIMEOUT_S) as patience:
                    await dealer.send_multipart([b"", max(0, (self._next_seq or 0) - 1).to_bytes(8, "big")])
                    while True:
                        frames = await dealer.recv_multipart()
                        patience.reschedule(asyncio.get_running_loop().time() + _REPLAY_TIMEOUT_S)
                        num_frames += 1
                        if num_frames % _NUM_BETWEEN_PAUSES == 0:
                            await asyncio.sleep(0)  # what is here already is received without waiting
                        if len(frames) < 2 or len(frames[-2]) != 8:
                            raise ProtocolError("a reply that is no batch")
                        if frames[-2] == _END_SEQ:
                            break
                        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
                        if self._next_seq is not None and seq < self._next_seq:
                            is_known |= seq == self._next_seq - 1 and xxh3_128_digest(payload) == self._last_digest
                            continue
                        if not is_known and seq == self._next_seq:
                            break
                        is_known = True  # or it is a hole, which `_take` finds
                        self._take(seq, payload)
                        self._ahead[seq] = xxh3_128_digest(payload)
            except TimeoutError:
                # In a quiet time nothing is missing for all that is known; a hole is found by the next batch.
                logger.info("%s: no answer to a replay request within %.1f s", self._name, _REPLAY_TIMEOUT_S)
                return
            except ProtocolError as error:
                logger.warning("%s: its replay socket answers with %s", self._name, error)
                return
        if self._next_seq is None:
            self._next_seq = 0  # the last batch is never dropped, so that none was published yet
        elif not is_known:
            self._note_other_life(f"its publisher does not know batch {self._next_seq - 1} any more")

    def _take(self, seq: int, payload: bytes) -> None:
        """The next batch, or the first after a hole that nothing fills."""
        if not self.is_cache_aware:
            return
        if seq != (self._next_seq or 0):
            first = self._next_seq or 0
            self._forget(f"batches {first} to {seq - 1} are lost, and past replaying")
        self._next_seq, self._last_digest = seq + 1, xxh3_128_digest(payload)
        try:
            change = self._translator.apply(decode_batch(payload))
        except ProtocolError as error:
            self._forget(str(error))
            return
        if self._translator.refusal is not None:
            self._give_up()
        elif change.stored or change.removed or change.is_reset:
            self._on_blocks(change)

    # Forgetting.

    def _forget(self, cause: str) -> None:
        if self._tell_cleared():
            self.num_forgotten += 1
            logger.warning("%s: what it holds is forgotten: %s", self._name, cause)
        else:
            logger.info("%s: %s", self._name, cause)

    def _tell_cleared(self) -> bool:
        """Whether anything was known."""
        is_any = bool(self._translator.keys)
        change = self._translator.clear()
        if is_any:
            self._on_blocks(change)
        return is_any

    def _give_up(self) -> None:
        logger.error("%s is not cache-aware, only hints count: %s", self._name, self._translator.refusal)
        self._on_blocks(self._translator.clear())

    def _note_other_life(self, evidence: str) -> None:
        if not self._is_other_life:
            self._is_other_life = True
            self._tell_cleared()
            self._on_other_life(f"another process publishes its events: {evidence}")
