"""The mirrored directory in virtual time: what it asks the store, what it forgets, and when it loads a worker again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from shared.directory.base import Match, Reply
from shared.directory.feed import EntryId
from shared.directory.mirrored import MirroredDirectory
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, WorkerId
from shared.vtime import run_virtual
from tests.support.memory_store import MemoryFeed, MemoryStore
from tests.support.stores import LONG_LEASE_S, SCHEME, batch, epoch, instance, keys, wait_until, worker_info
from worker.engines.base import BlockChange
from worker.publisher import Publisher

E1, E2, E3 = epoch(1), epoch(2), epoch(3)
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


class Store(MemoryStore):
    """Counts matches, and refuses them when it is away."""

    def __init__(self) -> None:
        super().__init__(SCHEME, asyncio.get_running_loop().time)
        self.asked: list[list[WorkerId]] = []
        self.is_away = False

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        self.asked.append(list(workers))
        if self.is_away:
            raise DirectoryUnavailable("match: away")
        return await super().match(keys, self.asked[-1])

    async def hold(self, name: str, numbers: range, *, life: int = 1, lease_s: float = LONG_LEASE_S) -> None:
        assert await self.register(worker_info(name, life=life), E1, lease_s) == Reply.OK
        assert await self.apply(batch(name, E1, 1, numbers)) == Reply.OK


class Reader:
    """A mirror of a store, and the feed between the two."""

    def __init__(self, store: Store, *, longest_delay_s: float = 0.0) -> None:
        self.store = store
        self.feed = MemoryFeed(store, rng=random.Random(0), longest_delay_s=longest_delay_s)
        self.directory = MirroredDirectory(store, self.feed, refresh_s=1.0)

    async def depths(self, numbers: range, *workers: WorkerId) -> dict[str, int]:
        found = await self.directory.match(keys(numbers), workers)
        return {worker: match.num_blocks for worker, match in found.items()}

    async def depths_in_memory(self, numbers: range, *workers: WorkerId) -> dict[str, int]:
        """What is matched without a word to the store."""
        num_asked = len(self.store.asked)
        found = await self.depths(numbers, *workers)
        assert len(self.store.asked) == num_asked
        return found


@asynccontextmanager
async def reading(store: Store, *, longest_delay_s: float = 0.0) -> AsyncIterator[Reader]:
    reader = Reader(store, longest_delay_s=longest_delay_s)
    reader.directory.start()
    try:
        await reader.directory.caught_up()
        yield reader
    finally:
        await reader.directory.close()


# Matching.


def test_loaded_workers_are_matched_without_asking_the_store() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5), life=7)
        await store.hold("w2", range(9))
        async with reading(store) as reader:
            assert await reader.directory.match(keys(range(8)), [W1]) == {W1: Match(instance(7), 5)}
            assert await reader.depths(range(8), W1, W2) == {W1: 5, W2: 8}
            await store.apply(batch("w1", E1, 2, [5, 6], [3]))
            await reader.directory.caught_up()
            assert await reader.depths(range(8), W1, W2) == {W1: 3, W2: 8}
            assert store.asked == []

    run_virtual(scenario())


def test_workers_that_are_not_loaded_are_asked_for_at_the_store_and_no_others() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            await store.hold("w2", range(3))
            assert await reader.depths(range(8), W1, W2) == {W1: 5, W2: 3}
            assert store.asked == [[W2]]
            assert await reader.depths(range(0), W1, W2) == {}
            assert store.asked == [[W2]]

    run_virtual(scenario())


def test_store_that_refuses_costs_only_those_that_are_not_loaded() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            store.is_away = True
            assert await reader.depths(range(8), W1, W2) == {W1: 5}
            with pytest.raises(DirectoryUnavailable, match="away"):
                await reader.depths(range(8), W2)

    run_virtual(scenario())


def test_hundreds_of_workers_are_loaded_and_followed() -> None:
    async def scenario() -> None:
        store = Store()
        workers = [WorkerId(f"w{number}") for number in range(300)]
        for number, worker in enumerate(workers):
            await store.hold(worker, range(number % 20))
        async with reading(store, longest_delay_s=0.01) as reader:
            for worker in workers:
                await store.apply(batch(worker, E1, 2, [20]))
            await reader.directory.caught_up()
            expected = {worker: number % 20 for number, worker in enumerate(workers) if number % 20}
            assert await reader.depths_in_memory(range(20), *workers) == expected

    run_virtual(scenario())


# Loading and following.


def test_changes_during_a_load_are_not_lost() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(100))
        reader = Reader(store, longest_delay_s=0.05)
        reader.directory.start()
        seq = 1
        while W1 not in reader.directory.shown:
            seq += 1
            await store.apply(batch("w1", E1, seq, [100 + seq], [100 - seq] if seq < 100 else []))
            await asyncio.sleep(0.05)
        await reader.directory.caught_up()
        assert reader.feed.num_scans == 1
        for number in range(200):
            resident = await store.resident(W1)
            expected = {W1: 1} if keys([number])[0] in resident else {}
            assert await reader.depths_in_memory(range(number, number + 1), W1) == expected
        await reader.directory.close()

    run_virtual(scenario())


@pytest.mark.parametrize(
    "meanwhile", ["more than one read brings", "a snapshot, and a stream that tells nothing of it"]
)
def test_copy_is_shown_only_once_it_is_as_good_as_the_store_was_when_its_scan_ended(meanwhile: str) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(100))
        reader = Reader(store, longest_delay_s=0.05)
        scan = reader.feed.scan

        async def scan_and_change(worker: WorkerId) -> AsyncGenerator[Sequence[BlockKey], None]:
            async for piece in scan(worker):
                yield piece
            if reader.feed.num_scans > 1:
                return
            if meanwhile == "more than one read brings":
                for seq in range(2, 10):
                    await store.apply(batch("w1", E1, seq, (), [101 - seq]))
            else:
                await store.stage(W1, E1, E2, keys(range(2)))
                await store.commit(W1, E1, E2, 2)
                store.trim(W1, 0)

        reader.feed.scan = scan_and_change  # type: ignore[method-assign]
        reader.directory.start()
        await wait_until(lambda: W1 in reader.directory.shown)
        assert reader.directory.mirrored(W1) == await store.resident(W1)
        await reader.directory.close()

    run_virtual(scenario())


@pytest.mark.parametrize("cause", ["gap", "gap and more", "other epoch", "snapshot", "registration", "repeat"])
def test_what_does_not_fit_has_that_worker_loaded_again_and_no_other(cause: str) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        await store.hold("w2", range(5))
        async with reading(store) as reader:
            expected = {W1: 5, W2: 5}
            if cause == "gap":
                await store.apply(batch("w1", E1, 2, [5]))
                await store.apply(batch("w1", E1, 3, [6]))
                del store.worker_to_stream[W1][-2]
                expected[W1] = 7
            elif cause == "gap and more":
                for seq in (2, 3, 4):
                    await store.apply(batch("w1", E1, seq, [3 + seq]))
                del store.worker_to_stream[W1][-3]
                expected[W1] = 8
            elif cause == "other epoch":
                store._applied(batch("w1", E3, 2, [5]))
            elif cause == "snapshot":
                await store.stage(W1, E1, E2, keys(range(2)))
                await store.commit(W1, E1, E2, 2)
                expected[W1] = 2
            elif cause == "registration":
                await store.register(worker_info("w1"), E2, LONG_LEASE_S)
                del expected[W1]
            else:
                store._applied(batch("w1", E1, 1, range(5, 8)))
            await wait_until(lambda: reader.directory.num_loads == 3)
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(8), W1, W2) == expected
            assert (reader.feed.num_scans, reader.directory.num_faults) == (3, 0)

    run_virtual(scenario())


def test_stream_that_was_trimmed_before_it_was_read_has_its_worker_loaded_again() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            # Nothing that comes later would show the hole.
            await store.apply(batch("w1", E1, 2, [5]))
            store.trim(W1, 0)
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(8), W1) == {W1: 6}

    run_virtual(scenario())


def test_reader_that_was_cut_off_for_a_while_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            reader.feed.is_down = True
            for seq in range(2, 12):
                await store.apply(batch("w1", E1, seq, [seq + 3]))
                await asyncio.sleep(1.0)
            assert await reader.depths_in_memory(range(20), W1) == {W1: 5}
            reader.feed.is_down = False
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(20), W1) == {W1: 15}
            assert reader.feed.num_scans == 1

    run_virtual(scenario())


def test_late_reader_knows_what_was_stored_long_ago_and_needs_no_other_reader() -> None:
    async def scenario() -> None:
        store = Store()
        for name, num_blocks in (("w1", 10), ("w2", 7), ("w3", 3)):
            await store.hold(name, range(num_blocks))
        async with reading(store) as first:
            await asyncio.sleep(LONG_LEASE_S / 2)
            async with reading(store) as late:
                expected = {W1: 10, W2: 7, W3: 3}
                assert await late.depths_in_memory(range(12), W1, W2, W3) == expected
                assert await first.depths_in_memory(range(12), W1, W2, W3) == expected
                await first.directory.close()
                await store.apply(batch("w3", E1, 2, [3]))
                await late.directory.caught_up()
                assert await late.depths_in_memory(range(12), W1, W2, W3) == {**expected, W3: 4}

    run_virtual(scenario())


# Leases and silence.


def test_expired_worker_is_forgotten_when_its_lease_ends_and_not_at_the_next_look() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5), lease_s=10.3)
        await store.hold("w2", range(5))
        ends_at_s = asyncio.get_running_loop().time() + 10.3
        async with reading(store) as reader:
            await wait_until(lambda: W1 not in reader.directory.shown)
            assert asyncio.get_running_loop().time() == pytest.approx(ends_at_s, abs=0.05)
            assert await reader.depths(range(5), W1, W2) == {W2: 5}
            assert reader.directory.num_entries == 5

    run_virtual(scenario())


def test_worker_that_leaves_is_forgotten_at_the_next_look() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            await store.forget(W1, instance(1))
            await asyncio.sleep(1.1)
            assert reader.directory.shown == set()
            assert reader.directory.mirrored(W1) is None
            assert await reader.depths(range(5), W1) == {}

    run_virtual(scenario())


def test_all_expire_where_the_store_is_well() -> None:
    async def scenario() -> None:
        store = Store()
        for name in ("w1", "w2", "w3"):
            await store.hold(name, range(5), lease_s=5.0)
        async with reading(store) as reader:
            await asyncio.sleep(5.1)
            assert reader.directory.shown == set()
            assert await reader.depths(range(5), W1, W2, W3) == {}

    run_virtual(scenario())


def test_nobody_is_forgotten_while_the_store_does_not_answer() -> None:
    async def scenario() -> None:
        store = Store()
        for name in ("w1", "w2", "w3"):
            await store.hold(name, range(5), lease_s=5.0)
        async with reading(store) as reader:
            reader.feed.is_down = True
            await asyncio.sleep(60.0)
            assert await reader.depths_in_memory(range(5), W1, W2, W3) == {W1: 5, W2: 5, W3: 5}

    run_virtual(scenario())


def test_fault_while_leases_are_read_is_told_once_and_forgets_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5), lease_s=5.0)
        async with reading(store) as reader:
            look = reader.feed.look

            async def broken_look(workers: Iterable[WorkerId]) -> object:
                raise KeyError("a fault of ours")

            reader.feed.look = broken_look  # type: ignore[method-assign,assignment]
            await asyncio.sleep(20.5)
            assert reader.directory.shown == {W1}
            reader.feed.look = look  # type: ignore[method-assign]
            await asyncio.sleep(2.0)
            assert reader.directory.shown == set()
            assert reader.directory.num_faults == 20

    run_virtual(scenario())
    assert [record.getMessage() for record in caplog.records] == ["refresh of the mirror failed"]


@pytest.mark.parametrize("fault", ["frozen", "empty at once"])
def test_store_at_fault_gives_everybody_one_lease_to_come_back_in(fault: str) -> None:
    async def scenario() -> None:
        store = Store()
        for name in ("w1", "w2", "w3"):
            await store.hold(name, range(5), lease_s=5.0)
        async with reading(store) as reader:
            if fault == "frozen":
                reader.feed.is_down = True
                await asyncio.sleep(20.0)  # all leases run out meanwhile
                reader.feed.is_down = False
            else:
                store.flush()
            await asyncio.sleep(2.0)
            assert await reader.depths_in_memory(range(5), W1, W2, W3) == {W1: 5, W2: 5, W3: 5}
            await store.hold("w1", range(2), life=2)
            await reader.directory.refresh()
            await wait_until(lambda: reader.directory.num_loads == 4)
            await wait_until(lambda: W1 in reader.directory.shown)
            assert await reader.depths_in_memory(range(5), W1, W2, W3) == {W1: 2, W2: 5, W3: 5}
            await asyncio.sleep(6.0)
            assert await reader.depths(range(5), W1, W2, W3) == {W1: 2}

    run_virtual(scenario())


def test_lease_of_a_year_gives_nobody_more_than_a_minute_to_come_back_in() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5), lease_s=5.0)
        await store.hold("w2", range(5), lease_s=31_536_000.0)
        async with reading(store) as reader:
            store.flush()
            await asyncio.sleep(55.0)
            assert reader.directory.shown == {W1, W2}
            await asyncio.sleep(10.0)
            assert reader.directory.shown == set()

    run_virtual(scenario())


def test_part_of_the_store_at_fault_excuses_its_own_workers_only() -> None:
    async def scenario() -> None:
        store = Store()
        for name in ("w1", "w2"):
            await store.hold(name, range(5), lease_s=5.0)
        async with reading(store) as reader:
            reader.feed.hidden = {W1}
            await asyncio.sleep(20.0)
            assert await reader.depths(range(5), W1, W2) == {W1: 5}
            reader.feed.hidden = set()
            await asyncio.sleep(2.0)
            assert await reader.depths_in_memory(range(5), W1) == {W1: 5}
            await asyncio.sleep(6.0)
            assert reader.directory.shown == set()

    run_virtual(scenario())


def test_part_of_the_store_that_comes_back_empty_excuses_its_own_workers_only() -> None:
    async def scenario() -> None:
        store = Store()
        for name in ("w1", "w2"):
            await store.hold(name, range(5), lease_s=5.0)
        async with reading(store) as reader:
            await store.forget(W1, instance(1))
            await store.forget(W2, instance(1))
            store.canaries.discard(W1)
            await asyncio.sleep(1.1)
            assert reader.directory.shown == {W1}
            await asyncio.sleep(6.0)
            assert reader.directory.shown == set()

    run_virtual(scenario())


def test_read_that_hangs_holds_up_its_own_place_only() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        await store.hold("w2", range(5))
        async with reading(store) as reader:
            read = reader.feed.read

            async def hang(worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float) -> object:
                return await (asyncio.Event().wait() if W1 in worker_to_entry else read(worker_to_entry, wait_s))

            reader.feed.read = hang  # type: ignore[method-assign,assignment]
            await asyncio.sleep(1.0)  # one that has begun may still tell
            for name in ("w1", "w2"):
                await store.apply(batch(name, E1, 2, [5]))
            await asyncio.sleep(10.0)
            assert await reader.depths_in_memory(range(8), W1, W2) == {W1: 5, W2: 6}

    run_virtual(scenario())


def test_matches_while_the_store_does_not_answer_are_counted() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            store.is_resting = True
            assert reader.directory.is_resting
            for _ in range(10):
                assert await reader.depths_in_memory(range(5), W1) == {W1: 5}
            store.is_resting = False
            await reader.depths(range(5), W1)
            assert reader.directory.num_stale_matches == 10

    run_virtual(scenario())


def test_batches_behind_are_told_while_streams_cannot_be_read() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        async with reading(store) as reader:
            assert reader.directory.num_batches_behind == 0

            async def no_read(*_: object) -> None:
                raise DirectoryUnavailable("read: away")

            reader.feed.read = no_read  # type: ignore[method-assign,assignment]
            await asyncio.sleep(1.0)  # one that has begun may still tell
            for seq in range(2, 6):
                await store.apply(batch("w1", E1, seq, [seq + 3]))
            await asyncio.sleep(2.0)
            assert reader.directory.num_batches_behind == 4

    run_virtual(scenario())


def test_copy_whose_stream_cannot_be_read_for_long_is_matched_no_more() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(5))
        await store.hold("w2", range(5))
        async with reading(store) as reader:
            read = reader.feed.read

            async def no_read_of_w1(worker_to_entry: Mapping[WorkerId, EntryId], wait_s: float) -> object:
                if W1 in worker_to_entry:
                    raise DirectoryUnavailable("read: an entry of gigabytes")
                return await read(worker_to_entry, wait_s)

            reader.feed.read = no_read_of_w1  # type: ignore[method-assign,assignment]
            await asyncio.sleep(1.0)  # one that has begun may still tell
            await store.apply(batch("w1", E1, 2, [], [3]))
            await asyncio.sleep(20.0)
            assert reader.directory.shown == {W2}
            assert await reader.depths(range(8), W1, W2) == {W1: 3, W2: 5}
            reader.feed.read = read  # type: ignore[method-assign]
            await reader.directory.caught_up()
            assert await reader.depths_in_memory(range(8), W1, W2) == {W1: 3, W2: 5}

    run_virtual(scenario())


def test_catching_up_ends_while_workers_publish_all_the_time() -> None:
    async def scenario() -> None:
        store = Store()
        workers = [WorkerId(f"w{number}") for number in range(20)]
        for worker in workers:
            await store.hold(worker, range(5))
        async with reading(store, longest_delay_s=0.05) as reader:

            async def publish() -> None:
                for seq in itertools.count(2):
                    for worker in workers:
                        await store.apply(batch(worker, E1, seq, [seq + 3]))
                    await asyncio.sleep(0.02)

            publishing = asyncio.create_task(publish())
            await asyncio.sleep(1.0)
            held = {worker: await store.resident(worker) for worker in workers}
            async with asyncio.timeout(5.0):
                await reader.directory.caught_up()
            for worker in workers:
                assert held[worker] <= (reader.directory.mirrored(worker) or set())
            publishing.cancel()
            await asyncio.wait({publishing})

    run_virtual(scenario())


# Memory.


def test_fault_while_cleaning_is_told_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        store = Store()
        for worker in ("w1", "w2"):
            await store.hold(worker, range(50))
        async with reading(store) as reader:
            mirror = reader.directory._mirror
            with monkeypatch.context() as patch:
                patch.setattr(mirror, "clean", lambda max_keys: {}[max_keys])
                await store.forget(W1, instance(1))
                await asyncio.sleep(2.0)
                assert mirror.has_dropped
            await store.forget(W2, instance(1))
            await asyncio.sleep(2.0)
            assert (mirror.num_keys, mirror.num_slots, mirror.has_dropped) == (0, 0, False)

    run_virtual(scenario())
    assert [record.getMessage() for record in caplog.records] == ["cleaning the mirror failed"]


def test_tails_that_come_and_go_leave_nothing_in_store_mirror_and_publisher() -> None:
    async def scenario() -> None:
        store = Store()
        publisher = Publisher(store, worker_info("w1"), rng=random.Random(0))
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(100))))
        async with reading(store) as reader:
            for start in range(1000, 1000 + 300 * 60, 60):
                publisher.on_blocks(BlockChange(stored=keys(range(start, start + 60))))
                await asyncio.sleep(0.02)
                publisher.on_blocks(BlockChange(removed=keys(range(start, start + 60))))
                await asyncio.sleep(0.02)
            await wait_until(lambda: publisher.is_quiet)
            await reader.directory.caught_up()
            assert await store.resident(W1) == publisher.resident == set(keys(range(100)))
            mirror = reader.directory._mirror
            assert (mirror.num_keys, mirror.num_entries, mirror.num_slots) == (100, 100, 1)
            assert len(publisher._pending) == 0
            # All sixty went in and out each time.
            assert reader.directory.num_keys_applied == 100 + 300 * 2 * 60
            await publisher.stop()
            await asyncio.sleep(2.0)
            assert (mirror.num_keys, mirror.num_slots, mirror.has_dropped) == (0, 0, False)

    run_virtual(scenario())


def test_worker_that_is_loaded_again_and_again_takes_one_slot() -> None:
    async def scenario() -> None:
        store = Store()
        await store.hold("w1", range(50))
        async with reading(store) as reader:
            for number in range(2, 50):
                snapshot = epoch(number)
                await store.stage(W1, epoch(number - 1), snapshot, keys(range(50)))
                await store.commit(W1, epoch(number - 1), snapshot, 50)
                await asyncio.sleep(0.001 * (number % 7))
            await reader.directory.caught_up()
            await wait_until(lambda: not reader.directory._mirror.has_dropped)
            mirror = reader.directory._mirror
            assert (mirror.num_keys, mirror.num_entries, mirror.num_slots) == (50, 50, 1)

    run_virtual(scenario())
