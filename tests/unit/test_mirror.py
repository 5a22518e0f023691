"""The mirror as a data structure: what is matched, what is never matched again, and what memory is given back."""

from __future__ import annotations

import random
import sys

import pytest

from shared.directory.base import Match
from shared.directory.mirror import Copy, Mirror, in_parts
from shared.types import BlockKey, WorkerId
from tests.support.stores import instance, keys

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


def shown(mirror: Mirror, worker: WorkerId, numbers: range, *, life: int = 1) -> Copy:
    copy = mirror.begin(worker, instance(life))
    mirror.apply(copy, keys(numbers))
    mirror.show(copy)
    return copy


def depths(mirror: Mirror, numbers: range, *workers: WorkerId) -> dict[str, int]:
    return {worker: match.num_blocks for worker, match in mirror.match(keys(numbers), workers).items()}


def clean(mirror: Mirror) -> None:
    while mirror.has_dropped:
        mirror.clean(100)


def num_table_bytes(mirror: Mirror) -> int:
    return sum(map(sys.getsizeof, mirror._shards))


def test_depths_differ_from_worker_to_worker() -> None:
    mirror = Mirror()
    for worker, num_blocks in ((W1, 3), (W2, 7), (W3, 7)):
        shown(mirror, worker, range(num_blocks))
    assert depths(mirror, range(10), W1, W2, W3) == {W1: 3, W2: 7, W3: 7}
    assert depths(mirror, range(5), W1, W2) == {W1: 3, W2: 5}
    assert depths(mirror, range(10), W3) == {W3: 7}
    assert depths(mirror, range(10)) == {}
    assert depths(mirror, range(0), W1) == {}


def test_hole_ends_the_prefix_of_its_worker_alone() -> None:
    mirror = Mirror()
    copies = [shown(mirror, worker, range(10)) for worker in (W1, W2, W3)]
    mirror.apply(copies[0], (), keys([0]))
    mirror.apply(copies[1], (), keys([4]))
    assert depths(mirror, range(10), W1, W2, W3) == {W2: 4, W3: 10}
    assert depths(mirror, range(10), W2) == {W2: 4}


def test_copy_is_not_matched_before_it_is_shown() -> None:
    mirror = Mirror()
    copy = mirror.begin(W1, instance(1))
    mirror.apply(copy, keys(range(3)))
    assert depths(mirror, range(3), W1) == {}
    assert W1 not in mirror.shown
    mirror.show(copy)
    assert mirror.match(keys(range(3)), [W1]) == {W1: Match(instance(1), 3)}


def test_copy_that_is_shown_takes_the_place_of_the_older_one() -> None:
    mirror = Mirror()
    shown(mirror, W1, range(10), life=1)
    shown(mirror, W1, range(2), life=2)
    assert mirror.match(keys(range(10)), [W1]) == {W1: Match(instance(2), 2)}
    clean(mirror)
    assert mirror.match(keys(range(10)), [W1]) == {W1: Match(instance(2), 2)}
    assert (mirror.num_keys, mirror.num_entries, mirror.num_slots) == (2, 2, 1)


def test_dropped_copy_is_gone_at_once_and_takes_nothing_more() -> None:
    mirror = Mirror()
    copy = shown(mirror, W1, range(10))
    shown(mirror, W2, range(10))
    mirror.drop(copy)
    mirror.drop(copy)
    mirror.apply(copy, keys(range(20)))
    mirror.show(copy)
    assert depths(mirror, range(20), W1, W2) == {W2: 10}
    clean(mirror)
    assert (mirror.num_keys, mirror.num_entries, mirror.num_slots) == (10, 10, 1)


def test_slot_is_used_again_only_after_its_last_bit_is_gone() -> None:
    mirror = Mirror()
    old = shown(mirror, W1, range(250))
    mirror.drop(old)
    while mirror.num_keys:
        mirror.clean(100)
        newcomer = shown(mirror, W2, range(0))
        # Whichever keys are not cleaned yet: none of them may be taken for the newcomer's.
        assert all(depths(mirror, range(number, number + 1), W2) == {} for number in range(250))
        assert (newcomer.slot == old.slot) == (not mirror.num_keys)
        mirror.drop(newcomer)
    clean(mirror)
    assert mirror.num_slots == 0


def test_cleaning_is_done_in_steps_of_the_size_asked_for() -> None:
    mirror = Mirror()
    mirror.drop(shown(mirror, W1, range(250)))
    left = []
    while mirror.num_keys:
        mirror.clean(100)
        left.append(mirror.num_keys)
    assert left == [150, 50, 0]


def test_hundreds_of_workers_are_told_apart() -> None:
    mirror = Mirror()
    workers = [WorkerId(f"w{number}") for number in range(300)]
    for number, worker in enumerate(workers):
        shown(mirror, worker, range(number % 40))
    expected = {worker: number % 40 for number, worker in enumerate(workers) if number % 40}
    assert depths(mirror, range(50), *workers) == expected


def test_depths_are_right_after_more_of_them_than_are_remembered() -> None:
    mirror = Mirror()
    shown(mirror, W1, range(200))
    assert [depths(mirror, range(length), W1) for length in range(1, 201)] == [{W1: n} for n in range(1, 201)]


def test_memory_goes_back_to_the_live_set_after_workers_are_forgotten() -> None:
    mirror = Mirror()
    shown(mirror, W1, range(1000))
    before = num_table_bytes(mirror)
    many = [mirror.begin(WorkerId(f"m{number}"), instance(1)) for number in range(20)]
    rng = random.Random(0)
    for copy in many:
        mirror.apply(copy, [BlockKey(rng.randbytes(16)) for _ in range(5000)])
    assert num_table_bytes(mirror) > 10 * before
    for copy in many:
        mirror.drop(copy)
    clean(mirror)
    assert (mirror.num_keys, mirror.num_slots) == (1000, 1)
    assert num_table_bytes(mirror) < 2 * before
    assert depths(mirror, range(1000), W1) == {W1: 1000}


def test_stored_and_removed_again_leaves_nothing() -> None:
    mirror = Mirror()
    copies = [shown(mirror, worker, range(10)) for worker in (W1, W2)]
    for number in range(100, 2000, 60):
        for copy in copies:
            mirror.apply(copy, keys(range(number, number + 60)))
            mirror.apply(copy, (), keys(range(number, number + 60)))
    assert (mirror.num_keys, mirror.num_entries) == (10, 20)


def test_group_that_is_remembered_is_never_matched_with_an_earlier_life() -> None:
    mirror = Mirror()
    for worker in (W1, W2, W3):
        first = shown(mirror, worker, range(4))
    assert depths(mirror, range(4), W1, W2, W3) == {W1: 4, W2: 4, W3: 4}
    mirror.drop(first)
    clean(mirror)
    shown(mirror, W3, range(4), life=2)
    assert mirror.match(keys(range(4)), [W1, W2, W3]) == {
        W1: Match(instance(1), 4),
        W2: Match(instance(1), 4),
        W3: Match(instance(2), 4),
    }


def test_one_that_goes_on_alone_is_matched_to_its_own_depth() -> None:
    mirror = Mirror()
    for worker, num_blocks in ((W1, 4), (W2, 4), (W3, 9)):
        shown(mirror, worker, range(num_blocks))
    for _ in range(2):
        assert depths(mirror, range(12), W1, W2, W3) == {W1: 4, W2: 4, W3: 9}
        assert depths(mirror, range(12), W1, W3) == {W1: 4, W3: 9}


@pytest.mark.parametrize("seed", range(20))
def test_random_changes_match_like_sets(seed: int) -> None:
    rng = random.Random(seed)
    mirror = Mirror()
    truth: dict[WorkerId, set[BlockKey]] = {}
    copies: dict[WorkerId, Copy] = {}
    workers = [WorkerId(f"w{number}") for number in range(6)]
    for _ in range(400):
        worker = rng.choice(workers)
        chosen = keys(rng.sample(range(30), rng.randrange(1, 8)))
        act = rng.choice(("store", "store", "remove", "clean", "load", "forget"))
        if act == "clean":
            mirror.clean(rng.randrange(1, 10))
        elif act == "load":
            copies[worker] = mirror.begin(worker, instance(1))
            mirror.show(copies[worker])
            truth[worker] = set()
        elif worker in truth and act == "forget":
            mirror.drop(copies.pop(worker))
            del truth[worker]
        elif worker in truth and act == "store":
            mirror.apply(copies[worker], chosen)
            truth[worker].update(chosen)
        elif worker in truth and act == "remove":
            mirror.apply(copies[worker], (), chosen)
            truth[worker].difference_update(chosen)
        chain = keys(rng.sample(range(30), 12))
        if truth and rng.random() < 0.8:
            chain = tuple(sorted(truth[rng.choice(sorted(truth))])) + chain
        asked = rng.sample(workers, rng.randrange(1, 7))
        expected = {
            worker: depth
            for worker in asked
            if (depth := next((n for n, key in enumerate(chain) if key not in truth.get(worker, ())), len(chain)))
        }
        assert {worker: match.num_blocks for worker, match in mirror.match(chain, asked).items()} == expected
    clean(mirror)
    assert mirror.num_keys == len(set().union(*truth.values())) if truth else mirror.num_keys == 0
    assert mirror.num_entries == sum(map(len, truth.values()))


def test_changes_in_parts_are_the_same_in_the_same_order() -> None:
    stored, removed = tuple(keys(range(5))), tuple(keys(range(10, 13)))
    assert list(in_parts(stored, removed, 8)) == [(stored, removed)]
    assert list(in_parts(stored, removed, 3)) == [(stored[:3], ()), (stored[3:], ()), ((), removed)]
