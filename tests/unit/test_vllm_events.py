"""The event decoder and translator on payloads of both encodings, and the stream on real sockets without an engine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shared.errors import ProtocolError
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.engines.base import BlockChange

pytest.importorskip("zmq")

import zmq
import zmq.asyncio

from worker.engines.vllm_events import EventTranslator, PoolSnapshot, decode_batch
from worker.engines.vllm_stream import EventStream

SCHEME = CacheScheme("m", 4)
# A batch as vLLM 0.32 published it for a prompt of two blocks of 4 and one evicted block; ids and hashes shortened.
RECORDED_MAPS = msgpack.packb(
    [
        1764438000.25,
        [
            {
                "type": "BlockStored",
                "block_hashes": [11, 12],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["tenant"], None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
)
# The same as arrays, as vLLM before 0.26 publishes.
RECORDED_ARRAYS = msgpack.packb(
    [
        1764438000.25,
        [
            [
                "BlockStored",
                [11, 12],
                None,
                [1, 2, 3, 4, 5, 6, 7, 8],
                4,
                None,
                "GPU",
                None,
                [["tenant"], None],
                0,
                "full_attention",
            ],
            ["BlockRemoved", [12], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        0,
    ]
)


def keys(token_ids: Sequence[int], *, salt: str = "", adapter: str = "") -> tuple[BlockKey, ...]:
    return tuple(block_keys(pack_tokens(token_ids), 4, root_key(SCHEME, salt=salt, adapter=adapter)))


def stored(hashes: list[Any], token_ids: Sequence[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class TestDecoder:
    def test_both_encodings_say_the_same(self):
        assert decode_batch(RECORDED_ARRAYS) == decode_batch(RECORDED_MAPS)

    def test_a_batch_may_be_a_map_too(self):
        assert decode_batch(msgpack.packb({"ts": 1.0, "events": [CLEARED]})) == [CLEARED]

    def test_hashes_may_be_raw_bytes(self):
        (event,) = decode_batch(msgpack.packb([0.0, [stored([b"\xff" * 32], range(4))]]))
        assert event["block_hashes"] == [b"\xff" * 32]

    @pytest.mark.parametrize(
        "payload", [b"", b"\xc1", msgpack.packb(7), msgpack.packb([0.0]), msgpack.packb([0.0, [["Unheard"]]])]
    )
    def test_other_bytes_are_refused(self, payload: bytes):
        with pytest.raises(ProtocolError):
            decode_batch(payload)


class TestTranslator:
    @pytest.fixture
    def translator(self) -> EventTranslator:
        return EventTranslator(SCHEME)

    def test_a_chain_gets_the_keys_that_a_router_computes(self, translator: EventTranslator):
        first = translator.apply([stored([1, 2], range(8))])
        second = translator.apply([stored([3], range(8, 12), parent=2)])
        assert first == BlockChange(stored=keys(range(12))[:2])
        assert second == BlockChange(stored=keys(range(12))[2:])
        assert translator.keys == set(keys(range(12)))

    def test_salt_and_adapter_enter_the_first_key(self, translator: EventTranslator):
        change = translator.apply([stored([1, 2], range(8), extra_keys=[["a", "s"], ["a"]], lora_name="a", lora_id=1)])
        assert change.stored == keys(range(8), salt="s", adapter="a")
        change = translator.apply([stored([3, 4], range(8), extra_keys=[["s"], None])])
        assert change.stored == keys(range(8), salt="s")

    def test_multimodal_blocks_and_their_descendants_are_left_out_and_counted(self, translator: EventTranslator):
        change = translator.apply(
            [
                stored([1, 2, 3], range(12), extra_keys=[None, [["image-hash", 2]], None]),
                stored([4], range(12, 16), parent=3),
                removed(4, 3, 2),
            ]
        )
        assert change == BlockChange(stored=keys(range(4)))
        assert translator.num_left_out == 3

    def test_prompt_embeddings_are_left_out(self, translator: EventTranslator):
        assert translator.apply([stored([1], range(4), extra_keys=[[b"digest"]])]) == BlockChange()

    def test_stored_then_removed_in_one_batch_is_no_change(self, translator: EventTranslator):
        assert translator.apply([stored([1], range(4)), removed(1)]) == BlockChange()

    def test_removed_then_stored_again_in_one_batch_is_no_change(self, translator: EventTranslator):
        translator.apply([stored([1], range(4))])
        assert translator.apply([removed(1), stored([1], range(4))]) == BlockChange()

    def test_a_second_copy_keeps_the_key_until_both_are_removed(self, translator: EventTranslator):
        translator.apply([stored([1], range(4))])
        assert translator.apply([stored([1], range(4))]) == BlockChange()
        assert translator.apply([removed(1)]) == BlockChange()
        assert translator.apply([removed(1)]) == BlockChange(removed=keys(range(4)))

    def test_cleared_resets_and_what_follows_in_the_batch_applies_after(self, translator: EventTranslator):
        translator.apply([stored([1], range(4))])
        change = translator.apply([stored([2], range(4, 8), parent=1), CLEARED, stored([3], range(100, 104))])
        assert change == BlockChange(stored=keys(range(100, 104)), is_reset=True)

    def test_other_media_and_unknown_hashes_are_ignored(self, translator: EventTranslator):
        events = [stored([1], range(4), medium="CPU"), removed(77), stored([5], range(4), parent=99)]
        assert translator.apply(events) == BlockChange()

    def test_copies_in_another_medium_neither_outlive_a_clearing_nor_hide_what_is_in_the_pool(
        self, translator: EventTranslator
    ):
        translator.apply([stored([1], range(4)), stored([1], range(4), medium="CPU")])
        assert translator.apply([CLEARED]) == BlockChange(is_reset=True)
        assert translator.keys == set()
        translator.apply([stored([1], range(4)), stored([1], range(4), medium="CPU")])
        assert translator.apply([{**removed(1), "medium": "CPU"}]) == BlockChange()
        assert translator.keys == set(keys(range(4)))

    def test_another_block_size_ends_cache_awareness(self, translator: EventTranslator):
        translator.apply([stored([1], range(4))])
        change = translator.apply([stored([2], range(8), block_size=8)])
        assert change == BlockChange(is_reset=True)
        assert translator.refusal == "engine's blocks have 8 tokens, announced were 4"

    def test_a_sliding_window_ends_cache_awareness(self, translator: EventTranslator):
        translator.apply([stored([1], range(4), group_idx=0, kv_cache_spec_kind="sliding_window")])
        assert translator.refusal == "the model's cache is not one group of full attention (group 0, sliding_window)"

    def test_malformed_events_are_refused(self, translator: EventTranslator):
        with pytest.raises(ProtocolError, match="malformed BlockStored event"):
            translator.apply([{"type": "BlockStored", "block_size": 4}])

    def test_a_snapshot_replaces_all_and_tells_the_difference(self, translator: EventTranslator):
        a, b = keys(range(8))
        (c,) = keys(range(50, 54))
        translator.apply([stored([1, 2], range(8))])
        change = translator.replace(PoolSnapshot(0, {1: a, 9: c}))
        assert change == BlockChange(stored=(c,), removed=(b,))
        assert translator.apply([removed(9)]) == BlockChange(removed=(c,))


@dataclass
class Publisher:
    """Speaks as vLLM's publisher does; can lose batches on the way and forget old ones."""

    endpoint: str
    replay_endpoint: str
    context: Any = field(default_factory=lambda: zmq.asyncio.Context())
    sent: list[bytes] = field(default_factory=list)
    num_forgotten: int = 0

    def bind(self) -> None:
        self.pub = self.context.socket(zmq.XPUB)  # a PUB that tells of its subscribers
        self.pub.bind(self.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay_endpoint)
        self.task = asyncio.create_task(self.serve_replay())

    async def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        self.sent.append(msgpack.packb([0.0, list(events), 0]))
        if not is_lost:
            await self.pub.send_multipart([b"", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]])

    async def serve_replay(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            for seq in range(max(int.from_bytes(start, "big"), self.num_forgotten), len(self.sent)):
                await self.router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), self.sent[seq]])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)


@pytest.fixture
def endpoints() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:  # short enough for a socket's path
        yield f"ipc://{Path(folder) / 'events'}", f"ipc://{Path(folder) / 'replay'}"


@dataclass
class Told:
    """What the stream told, with a way to wait for it."""

    changes: list[BlockChange] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, change: BlockChange) -> None:
        self.changes.append(change)
        self.arrived.set()

    async def until(self, num_changes: int) -> list[BlockChange]:
        async with asyncio.timeout(60):
            while len(self.changes) < num_changes:
                self.arrived.clear()
                await self.arrived.wait()
        return self.changes


@asynccontextmanager
async def following(
    endpoints: tuple[str, str], fetch_snapshot: Any = None, quiet_s: float = 100.0
) -> AsyncIterator[tuple[Publisher, EventStream, Told]]:
    publisher = Publisher(*endpoints)
    publisher.bind()
    told = Told()
    stream = EventStream(SCHEME, *endpoints, told, fetch_snapshot, quiet_s=quiet_s)
    await stream.start()
    try:
        await publisher.pub.recv_multipart()  # the subscription
        yield publisher, stream, told
    finally:
        await stream.close()
        await publisher.close()


class TestStream:
    async def test_batches_are_told_in_order(self, endpoints: tuple[str, str]):
        async with following(endpoints) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)))
            await publisher.publish(stored([2], range(4, 8), parent=1))
            await publisher.publish(removed(2))
            a, b = keys(range(8))
            assert await told.until(3) == [BlockChange((a,)), BlockChange((b,)), BlockChange(removed=(b,))]
            assert (stream.num_replays, stream.num_rebuilds) == (0, 0)

    async def test_a_hole_is_filled_from_the_replay_buffer(self, endpoints: tuple[str, str]):
        async with following(endpoints) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            await publisher.publish(stored([2], range(4, 8), parent=1), is_lost=True)
            await publisher.publish(stored([3], range(8, 12), parent=2))
            assert await told.until(3) == [BlockChange((key,)) for key in keys(range(12))]
            assert (stream.num_replays, stream.num_rebuilds) == (1, 0)

    async def test_a_hole_past_the_buffer_is_repaired_from_the_pool(self, endpoints: tuple[str, str]):
        a, b, c = keys(range(12))

        async def fetch_snapshot() -> PoolSnapshot:
            return PoolSnapshot(2, {1: a, 2: b})

        async with following(endpoints, fetch_snapshot) as (publisher, stream, told):
            publisher.num_forgotten = 1
            await publisher.publish(stored([1], range(4)), is_lost=True)
            await publisher.publish(stored([2], range(4, 8), parent=1))
            (change,) = await told.until(1)
            assert set(change.stored) == {a, b}
            await publisher.publish(stored([3], range(8, 12), parent=2))
            assert (await told.until(2))[1] == BlockChange((c,))
            assert (stream.num_replays, stream.num_rebuilds) == (1, 1)

    async def test_without_a_pool_to_ask_a_hole_past_the_buffer_forgets_all(self, endpoints: tuple[str, str]):
        async with following(endpoints) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)))
            await told.until(1)
            publisher.num_forgotten = 2
            await publisher.publish(stored([2], range(4, 8), parent=1), is_lost=True)
            await publisher.publish(stored([3], range(100, 104)))
            assert (await told.until(3))[1:] == [BlockChange(is_reset=True), BlockChange(keys(range(100, 104)))]
            assert stream.num_rebuilds == 1

    async def test_resident_contains_what_was_lost_and_drops_what_it_contains(self, endpoints: tuple[str, str]):
        a, b, c = keys(range(12))

        async def fetch_snapshot() -> PoolSnapshot:
            return PoolSnapshot(2, {1: a, 2: b})

        async with following(endpoints, fetch_snapshot) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            assert await stream.resident() == {a, b}
            await publisher.publish(stored([2], range(4, 8), parent=1))  # number 1: in the snapshot already
            await publisher.publish(stored([3], range(8, 12), parent=2))
            changes = await told.until(2)
            assert set(changes[0].stored) == {a, b}
            assert changes[1:] == [BlockChange((c,))]
            assert stream.num_replays == 0

    async def test_resident_without_a_pool_to_ask_fetches_what_is_published(self, endpoints: tuple[str, str]):
        async with following(endpoints) as (publisher, stream, _):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            assert await stream.resident() == set(keys(range(4)))

    async def test_a_lost_last_batch_is_found_in_a_quiet_time(self, endpoints: tuple[str, str]):
        async with following(endpoints, quiet_s=0.05) as (publisher, _, told):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            assert await told.until(1) == [BlockChange(keys(range(4)))]

    @pytest.mark.parametrize("is_quiet_after", [True, False])
    async def test_a_loss_that_a_quiet_time_has_found_is_told_once(
        self, endpoints: tuple[str, str], is_quiet_after: bool, caplog: pytest.LogCaptureFixture
    ):
        async with following(endpoints, quiet_s=0.05) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            await publisher.publish(stored([2], range(4, 8), parent=1), is_lost=True)
            await told.until(2)
            if is_quiet_after:
                async with asyncio.timeout(60.0):
                    while not caplog.records:
                        await asyncio.sleep(0.01)
            await publisher.publish(stored([3], range(8, 12), parent=2))
            await told.until(3)
            assert (stream.num_replays, stream.num_rebuilds) == (0, 0)
        assert [record.getMessage() for record in caplog.records] == [
            "KV events: batches 0 to 1 were lost on their way and are made up for"
        ]

    async def test_a_batch_that_comes_after_a_replay_has_brought_it_is_no_loss(
        self, endpoints: tuple[str, str], caplog: pytest.LogCaptureFixture
    ):
        async with following(endpoints, quiet_s=0.05) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)), is_lost=True)
            async with stream._lock:
                await stream._replay()
                # Its subscription's copy is only a little late.
                await publisher.pub.send_multipart([b"", (0).to_bytes(8, "big"), publisher.sent[0]])
            async with asyncio.timeout(60.0):
                while not stream._num_known:
                    await asyncio.sleep(0.01)
            await stream._look_for_more()
            assert await told.until(1) == [BlockChange(keys(range(4)))]
        assert caplog.records == []

    async def test_bytes_that_are_no_batch_are_repaired(self, endpoints: tuple[str, str]):
        async with following(endpoints) as (publisher, stream, told):
            publisher.sent.append(b"\xc1")
            await publisher.pub.send_multipart([b"", (0).to_bytes(8, "big"), b"\xc1"])
            assert await told.until(1) == [BlockChange(is_reset=True)]
            assert stream.num_rebuilds == 1

    async def test_a_batch_that_fails_half_way_leaves_nothing_untold(self, endpoints: tuple[str, str]):
        a, b = keys(range(8))

        async def fetch_snapshot() -> PoolSnapshot:
            return PoolSnapshot(2, {1: a, 2: b})

        async with following(endpoints, fetch_snapshot) as (publisher, _, told):
            await publisher.publish(stored([1], range(4)))
            await told.until(1)
            await publisher.publish(stored([2], range(4, 8), parent=1), {"type": "BlockStored", "block_size": 4})
            changes = await told.until(3)
            assert changes[1] == BlockChange(is_reset=True)
            assert (set(changes[2].stored), changes[2].removed) == ({a, b}, ())

    async def test_a_wrong_block_size_is_one_error_and_then_silence(
        self, endpoints: tuple[str, str], caplog: pytest.LogCaptureFixture
    ):
        async with following(endpoints) as (publisher, stream, told):
            await publisher.publish(stored([1], range(8), block_size=8))
            await publisher.publish(stored([2], range(8), block_size=8))
            assert await told.until(1) == [BlockChange(is_reset=True)]
            assert await stream.resident() == set()
            assert not stream.is_cache_aware
            assert [record.getMessage() for record in caplog.records] == [
                "model m is not cache-aware: engine's blocks have 8 tokens, announced were 4"
            ]
            stream.forget()
            assert told.changes == [BlockChange(is_reset=True)]

    async def test_of_a_refused_model_nothing_is_ever_told_again(self, endpoints: tuple[str, str]):
        async def fetch_snapshot() -> PoolSnapshot:
            return PoolSnapshot(9, {1: keys(range(4))[0]})

        async with following(endpoints, fetch_snapshot) as (publisher, stream, told):
            publisher.num_forgotten = 1
            stream.refuse("the model is not for us")
            stream.refuse("nor is it now")
            await publisher.publish(stored([1], range(4)), is_lost=True)
            await publisher.publish(stored([2], range(4, 8), parent=1))
            assert stream._task is not None
            await stream._task
            assert await stream.resident() == set()
            assert told.changes == [BlockChange(is_reset=True)]

    async def test_following_that_fails_for_good_tells_that_nothing_is_resident(
        self, endpoints: tuple[str, str], caplog: pytest.LogCaptureFixture
    ):
        async def fetch_snapshot() -> PoolSnapshot:
            raise RuntimeError("a fault of our own")

        async with following(endpoints, fetch_snapshot) as (publisher, stream, told):
            await publisher.publish(stored([1], range(4)))
            await told.until(1)
            publisher.num_forgotten = 2
            await publisher.publish(stored([2], range(4, 8), parent=1), is_lost=True)
            await publisher.publish(stored([3], range(8, 12), parent=2))
            assert (await told.until(2))[1:] == [BlockChange(is_reset=True)]
            assert (stream.is_cache_aware, await stream.resident()) == (False, set())
            assert caplog.records[-1].getMessage() == (
                "model m is not cache-aware: following the engine's events failed: RuntimeError: a fault of our own"
            )
