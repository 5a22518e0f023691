"""vLLM's KV events as changes of the resident set in our keys.

`EventTranslator` is the meaning of the events and does no I/O. `EventStream` brings them from the engine's process, in
order and without holes, or repairs what was lost. Neither ever asks the engine for anything but its own pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from shared.errors import EngineError, ProtocolError
from shared.types import BlockKey, CacheScheme
from worker.engines.base import BlockChange, OnBlocks
from worker.engines.vllm_keys import chain_keys

logger = logging.getLogger(__name__)

_MEDIUM = "GPU"
"""vLLM's name for the engine's own pool, on CPU builds too."""
_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBE_TIMEOUT_S = 5.0
_REPLAY_TIMEOUT_S = 2.0
"""The publisher looks at its replay socket every 0.1 s when idle; past this the hole is repaired from the pool."""
# Field order of the array encoding (vLLM before 0.26); the map encoding has the same names.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What the engine's pool holds, and how many event batches had been published by then."""

    num_published: int
    hash_to_key: dict[Hashable, BlockKey]


def decode_batch(payload: bytes) -> list[dict[str, Any]]:
    """The events of one published batch as maps with their name under `type`; both encodings of vLLM.

    Raises:
        ProtocolError: the bytes are no batch of KV events.
    """
    try:
        batch = msgpack.unpackb(payload, raw=False, strict_map_key=False)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event if isinstance(event, dict) else _from_array(event) for event in events]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a batch of KV events: {error!r}") from error


def _from_array(event: Sequence[Any]) -> dict[str, Any]:
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS[name], values, strict=False))}


@dataclass(slots=True)
class _Resident:
    """One engine hash: our key, None where there is none, and how many physical copies hold it."""

    key: BlockKey | None
    num_copies: int = 1


class EventTranslator:
    """The resident set as the events tell it.

    Counts copies of each hash, since stock vLLM reports each of two equal blocks as stored and as removed.
    """

    def __init__(self, scheme: CacheScheme) -> None:
        self._scheme = scheme
        self._residents: dict[Hashable, _Resident] = {}
        self.num_left_out = 0
        """Blocks without a key: multimodal, prompt embeddings, or after a block that is not known."""
        self.refusal: str | None = None
        """Why this engine's cache cannot be described by our keys; None while it can."""

    @property
    def keys(self) -> set[BlockKey]:
        """Our keys of all resident blocks. Linear; does not modify."""
        return {resident.key for resident in self._residents.values() if resident.key is not None}

    def apply(self, events: Iterable[dict[str, Any]]) -> BlockChange:
        """Take one batch into account and return its net effect. Modifies.

        Raises:
            ProtocolError: an event lacks what its kind must have; those before it are taken into account.
        """
        change = _NetChange()
        for event in events:
            if self.refusal is not None:
                break
            try:
                self._apply(event, change)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ProtocolError(f"malformed {event.get('type')} event: {error!r}") from error
        if self.refusal is not None:
            self._residents.clear()
            return BlockChange(is_reset=True)
        return change.result()

    def replace(self, snapshot: PoolSnapshot) -> BlockChange:
        """Take the pool's own account instead of the events'; returns what that changes. Modifies."""
        before = self.keys
        self._residents = {block_hash: _Resident(key) for block_hash, key in snapshot.hash_to_key.items()}
        after = self.keys
        return BlockChange(stored=tuple(after - before), removed=tuple(before - after))

    def refuse(self, reason: str) -> BlockChange:
        """Describe nothing from now on. Modifies."""
        self.refusal = reason
        return self.clear()

    def clear(self) -> BlockChange:
        """Forget everything. Modifies."""
        self._residents.clear()
        return BlockChange(is_reset=True)

    def _apply(self, event: dict[str, Any], change: _NetChange) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._residents.clear()
            change.reset()
        elif kind not in _FIELDS or event.get("medium") not in (_MEDIUM, None):
            return
        elif kind == "BlockStored":
            self._check_scheme(event)
            if self.refusal is None:
                self._store(event, change)
        else:
            for block_hash in event["block_hashes"]:
                self._remove(block_hash, change)

    def _check_scheme(self, event: dict[str, Any]) -> None:
        block_size_tokens = self._scheme.block_size_tokens
        if event["block_size"] != block_size_tokens:
            self.refusal = f"engine's blocks have {event['block_size']} tokens, announced were {block_size_tokens}"
        elif event.get("group_idx") not in (0, None) or event.get("kv_cache_spec_kind") not in ("full_attention", None):
            self.refusal = (
                "the model's cache is not one group of full attention "
                f"(group {event.get('group_idx')}, {event.get('kv_cache_spec_kind')})"
            )

    def _store(self, event: dict[str, Any], change: _NetChange) -> None:
        parent_hash = event["parent_block_hash"]
        parent = self._residents.get(parent_hash)
        keys = chain_keys(
            self._scheme,
            parent.key if parent else None,
            is_first=parent_hash is None,
            token_ids=event["token_ids"],
            extra_keys=event.get("extra_keys"),
            adapter=event.get("lora_name"),
        )
        for block_hash, key in zip(event["block_hashes"], keys, strict=True):
            resident = self._residents.get(block_hash)
            if resident is not None:
                resident.num_copies += 1
                continue
            self._residents[block_hash] = _Resident(key)
            if key is None:
                self.num_left_out += 1
            else:
                change.store(key)

    def _remove(self, block_hash: Hashable, change: _NetChange) -> None:
        resident = self._residents.get(block_hash)
        if resident is None:
            return
        resident.num_copies -= 1
        if resident.num_copies == 0:
            del self._residents[block_hash]
            if resident.key is not None:
                change.remove(resident.key)


class _NetChange:
    """Sums stores and removals so that a key is named once at most."""

    def __init__(self) -> None:
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._is_reset = False

    def store(self, key: BlockKey) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def remove(self, key: BlockKey) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def reset(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._is_reset = True

    def result(self) -> BlockChange:
        return BlockChange(tuple(self._stored), tuple(self._removed), self._is_reset)


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
                    await (self._replay() if is_quiet else self._receive(*await _next_batch(subscriber)))
        except Exception as error:
            logger.exception("KV events: following them failed")
            self.refuse(f"following the engine's events failed: {type(error).__name__}: {error}")
        finally:
            # Open and unread it would gather all that the engine goes on to publish.
            subscriber.close(linger=0)

    async def _receive(self, seq: int, payload: bytes) -> None:
        """Handle one batch from the subscription; what a replay or a snapshot already brought is dropped."""
        if seq > self._next_seq:
            self.num_replays += 1
            logger.warning("KV events: batches %d to %d are missing, asking for them", self._next_seq, seq - 1)
            await self._replay()
        if seq > self._next_seq and self.is_cache_aware:
            await self._rebuild("the replay buffer does not reach back far enough")
            self._next_seq = max(self._next_seq, seq)
        if seq == self._next_seq:
            await self._take(payload)

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
                logger.warning("KV events: no answer to a replay request within %.1f s", _REPLAY_TIMEOUT_S)

    async def _rebuild(self, cause: str) -> None:
        self.num_rebuilds += 1
        if self._fetch_snapshot is not None:
            logger.warning("KV events: rebuilding the resident set from the pool: %s", cause)
            try:
                await self._take_snapshot(self._fetch_snapshot)
            except EngineError as error:
                logger.warning("KV events: cannot ask the pool: %s", error)
            else:
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
