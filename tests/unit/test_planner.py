"""What belongs together, who is given what next, and when a second worker helps."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from router.planner import Planner, Room, Seat, Turn
from router.row_groups import (
    Draft,
    Group,
    Pace,
    Urgency,
    best_cut,
    chain_of,
    group_starts,
    num_shared_blocks,
    planned,
    urgency_of,
)
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme, WorkerId

BLOCK = 16
SCHEME = CacheScheme("m", BLOCK)
PACE = Pace(1.0, 8.0, 8.0)
W = [WorkerId(f"w{number}") for number in range(8)]


def chain(*blocks: int) -> bytes:
    """A prompt of blocks that each repeat a token."""
    tokens = [token for token in blocks for _ in range(BLOCK)]
    return chain_of(block_keys(pack_tokens(tokens), BLOCK, root_key(SCHEME)))


Prompt = tuple[int, ...]


def draft_of(prompts: Iterable[Prompt], urgencies: Sequence[Urgency] | None = None, own_tokens: int = 8) -> Draft[int]:
    """Rows numbered in their order, each a prompt of blocks and tokens of its own behind."""
    draft: Draft[int] = Draft()
    for number, prompt in enumerate(prompts):
        urgency = (0, 0) if urgencies is None else urgencies[number]
        draft.add(number, chain(*prompt), len(prompt) * BLOCK + own_tokens, urgency)
    return draft


def groups_of(draft: Draft[int], num_seats: int = 2) -> list[Group[int]]:
    return planned(draft, block_size_tokens=BLOCK, num_seats=num_seats, pace=PACE)


def items(groups: Iterable[Group[int]]) -> list[list[int]]:
    return [list(group.plan.items[group.start : group.end]) for group in groups]


def planner_of(draft: Draft[int], num_seats: int = 2, num_rows: int = 4, max_under_way: int = 1000) -> Planner[int]:
    planner: Planner[int] = Planner(max_under_way=max_under_way)
    planner.pace = PACE
    planner.seat({worker: Room(num_rows) for worker in W[:num_seats]})
    planner.add(groups_of(draft, num_seats))
    return planner


def seat_of(planner: Planner[int], number: int) -> Seat[int]:
    return next(seat for seat in planner.seats if seat.worker == W[number])


def taken_groups(planner: Planner[int], seat: Seat[int]) -> list[list[int]]:
    """Everything that a seat is given, by group."""
    groups: dict[Group[int] | None, list[int]] = {}
    while (turn := planner.take(seat)) is not None:
        groups.setdefault(seat.group, []).append(turn.item)
    return list(groups.values())


def run_to_end(planner: Planner[int], rng: random.Random) -> dict[WorkerId | None, list[int]]:
    """Hand everything out, rows ending in random order; who got what."""
    worker_to_items: dict[WorkerId | None, list[int]] = {seat.worker: [] for seat in planner.seats}
    under_way: list[Turn[int]] = []
    while planner.num_waiting or under_way:
        for seat in planner.seats:
            while (turn := planner.take(seat)) is not None:
                under_way.append(turn)
                worker_to_items[seat.worker].append(turn.item)
        planner.finish(under_way.pop(rng.randrange(len(under_way))))
    return worker_to_items


def test_chains_of_one_beginning_share_as_many_blocks_as_their_prompts():
    assert num_shared_blocks(chain(1, 2, 3, 4), chain(1, 2, 3, 9, 9)) == 3
    assert num_shared_blocks(chain(1, 2), chain(1, 2, 3)) == 2
    assert num_shared_blocks(chain(1, 2), chain(2, 2)) == 0
    assert num_shared_blocks(b"", chain(1)) == 0
    assert chain_of([]) == b""
    assert len(chain_of([BlockKey(bytes(16))] * 3)) == 12


@pytest.mark.parametrize("seed", range(5))
def test_shared_blocks_are_counted_as_one_by_one(seed: int):
    rng = random.Random(seed)
    for _ in range(200):
        one, other = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        expected = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert num_shared_blocks(chain(*one), chain(*other)) == expected


def test_rows_of_one_beginning_are_one_group_in_whatever_order_they_came():
    prompts = [(template, template, template) for template in (1, 2, 3)] * 40
    groups = groups_of(draft_of(prompts))
    assert sorted(map(sorted, items(groups))) == [list(range(first, 120, 3)) for first in range(3)]


def test_rows_without_anything_in_common_are_dealt_in_portions():
    groups = groups_of(draft_of([(number + 1,) for number in range(320)]), num_seats=2)
    assert len(groups) == 32
    assert {len(group) for group in groups} == {10}


def test_rows_shorter_than_a_block_are_planned_like_others():
    groups = groups_of(draft_of([()] * 64, own_tokens=5), num_seats=1)
    assert sorted(number for group in items(groups) for number in group) == list(range(64))
    assert len(groups) == 16


def test_what_little_all_share_divides_nobody_and_what_much_they_share_is_kept_whole():
    # All rows share one block, and those of a template twenty more.
    prompts = [(7, *[template] * 20) for template in range(20, 40)] * 100
    groups = groups_of(draft_of(prompts, own_tokens=100), num_seats=2)
    assert len(groups) == 20
    # All of one template: whoever else works on it computes twenty blocks first.
    assert len(groups_of(draft_of([(7,) * 21] * 100), num_seats=2)) == 1


def test_beginnings_within_beginnings_are_neighbours():
    prompts = [(1, document, question) for question in (4, 5) for document in (2, 3) for _ in range(3)]
    groups = groups_of(draft_of(prompts, own_tokens=0), num_seats=1)
    order = [prompts[number] for group in items(groups) for number in group]
    assert sum(order[i] != order[i + 1] for i in range(len(order) - 1)) == 3
    assert sum(order[i][:2] != order[i + 1][:2] for i in range(len(order) - 1)) == 1


def test_more_urgent_rows_are_groups_of_their_own():
    urgencies = [(number % 2, 0) for number in range(40)]
    groups = groups_of(draft_of([(1, 2)] * 40, urgencies))
    assert {(group.urgency, len(group)) for group in groups} == {((0, 0), 20), ((1, 0), 20)}


def test_nothing_is_planned_of_nothing():
    assert groups_of(draft_of([])) == []


def left(work: Sequence[float]) -> np.ndarray:
    return np.append(np.cumsum(np.array(work[::-1], dtype=float))[::-1], 0.0)


def test_a_group_is_divided_where_both_parts_end_at_one_time():
    assert best_cut(left([1.0] * 10), np.zeros(10)) == 5
    # The helper has to compute two rows' worth first.
    assert best_cut(left([1.0] * 10), np.full(10, 2.0)) == 6


def test_a_group_is_divided_only_if_that_ends_it_sooner():
    assert best_cut(left([1.0] * 10), np.full(10, 4.0)) is None
    assert best_cut(left([1.0] * 100), np.full(100, 4.0)) == 52
    assert best_cut(left([1.0]), np.zeros(1)) is None
    assert best_cut(left([]), np.zeros(0)) is None


def test_a_group_is_divided_where_a_new_beginning_comes_rather_than_in_the_middle():
    copy_s = np.array([9.0, 9, 9, 9, 9, 9, 0, 9, 9, 9])
    assert best_cut(left([1.0] * 10), copy_s) == 6


@pytest.mark.parametrize("factor", [0.01, 1.0, 1000.0])
def test_rules_do_not_depend_on_the_unit_of_time(factor: float):
    work, copy_s = left([factor] * 30), np.full(30, 3.0 * factor)
    assert best_cut(work, copy_s) == 16
    shared = np.array([0, *[1, 1, 0] * 9, 1, 1])
    expected = [0, 6, 12, 18, 24]
    assert group_starts(shared, work, grain_s=7 * factor, block_s=factor) == expected


def test_a_fleet_without_measurements_weighs_rows_by_their_tokens():
    assert Pace(0.0, 0.5, 64.0, 0.1) == Pace(1.0, 0.0, 64.0)


def test_rows_weigh_by_what_their_answers_see_too():
    # As many tokens of their own, but answers that see two and twenty blocks.
    short, long = (groups_of(draft_of([(depth,) * depth] * 9))[0] for depth in (2, 20))
    assert short.work_s(PACE) == 9 * (8 + 8) + 2 * BLOCK
    assert long.work_s(PACE) == 9 * (8 + 8) + 20 * BLOCK
    seeing = Pace(1.0, 8.0, 8.0, 0.5)
    assert short.work_s(seeing) - short.work_s(PACE) == 9 * 0.5 * (2 * BLOCK + 8)
    assert long.work_s(seeing) - long.work_s(PACE) == 9 * 0.5 * (20 * BLOCK + 8)


def test_a_worker_stays_with_its_group_until_it_is_empty():
    prompts = [(template,) * 9 for template in (1, 2, 3, 4)] * 30
    got = run_to_end(planner_of(draft_of(prompts), num_seats=2), random.Random(0))
    for numbers in got.values():
        templates = [prompts[number] for number in numbers]
        assert sum(templates[i] != templates[i + 1] for i in range(len(templates) - 1)) <= 2
    assert sorted(number for numbers in got.values() for number in numbers) == list(range(120))


def test_the_next_group_is_the_one_that_shares_most_with_what_the_worker_had():
    planner = planner_of(draft_of([(1, 1, 1, 5, 5, 5)] * 9), num_seats=1, num_rows=100)
    # The nearest one is not the largest.
    for prompt, num_rows in (((2,) * 6, 6), ((1, 1, 1, 6, 6, 6), 4)):
        planner.add(groups_of(draft_of([prompt] * num_rows)))
    seat = seat_of(planner, 0)
    assert [len(group) for group in taken_groups(planner, seat)] == [9, 4, 6]


def test_what_is_done_is_forgotten_while_more_waits():
    class Row:
        pass

    planner: Planner[Row] = Planner(max_under_way=4)
    planner.seat({W[0]: Room(4)})
    early: list[weakref.ref[Row]] = []
    for number in range(200):
        # Each a plan of its own, of which one group always waits.
        draft: Draft[Row] = Draft()
        draft.add(Row(), chain(number + 1), BLOCK)
        early.append(weakref.ref(draft.items[0]))
        planner.add(planned(draft, block_size_tokens=BLOCK, num_seats=1, pace=PACE))
        if number:
            turn = planner.take(next(iter(planner.seats)))
            assert turn is not None
            planner.finish(turn)
    del draft, turn
    gc.collect()
    assert sum(row() is not None for row in early) <= 40


def test_one_giant_group_is_shared_out_among_all_workers():
    planner = planner_of(draft_of([(1,) * 20] * 400), num_seats=8)
    got = run_to_end(planner, random.Random(1))
    assert all(len(numbers) >= 20 for numbers in got.values()), got
    assert sorted(number for numbers in got.values() for number in numbers) == list(range(400))
    assert planner.num_divided >= 7


def test_a_small_group_stays_with_one_worker():
    planner = planner_of(draft_of([(1,) * 20] * 10), num_seats=8)
    got = run_to_end(planner, random.Random(1))
    assert sorted(map(len, got.values())) == [0] * 7 + [10]


def test_windows_bound_what_is_under_way():
    planner = planner_of(draft_of([(1, 1)] * 100), num_seats=2, num_rows=3, max_under_way=5)
    turns = [turn for seat in planner.seats for turn in iter(lambda seat=seat: planner.take(seat), None)]
    assert [seat.num_under_way for seat in planner.seats] == [3, 2]
    assert (planner.num_under_way, planner.num_waiting) == (5, 95)
    planner.finish(turns[-1])
    assert planner.take(seat_of(planner, 0)) is None
    assert planner.take(seat_of(planner, 1)) is not None


def test_rows_under_way_fit_into_the_workers_blocks():
    planner = planner_of(draft_of([(1,) * 6] * 100, own_tokens=16), num_seats=1)
    planner.seat({W[0]: Room(100, num_blocks=20)})
    turns = list(iter(lambda: planner.take(seat_of(planner, 0)), None))
    # The first brings the group's six blocks; each has its own, and an answer's.
    assert [turn.num_blocks for turn in turns] == [8, 2, 2, 2, 2, 2, 2]


def test_a_row_larger_than_all_room_goes_alone():
    planner = planner_of(draft_of([(number,) * 30 for number in (1, 2)]), num_seats=1)
    planner.seat({W[0]: Room(100, num_blocks=20)})
    turns = list(iter(lambda: planner.take(seat_of(planner, 0)), None))
    assert len(turns) == 1


def test_urgent_rows_that_come_later_go_first_and_the_others_go_on_after_them():
    planner = planner_of(draft_of([(1, 1)] * 10), num_seats=1, num_rows=100)
    seat = seat_of(planner, 0)
    first = [planner.take(seat) for _ in range(3)]
    planner.add(groups_of(draft_of([(2, 2)] * 4, [(-1, 0)] * 4)))
    rest = list(iter(lambda: planner.take(seat), None))
    chains = [turn.item for turn in rest]
    assert len(first) == 3
    assert sorted(chains[:4]) == [0, 1, 2, 3]
    assert len(chains) == 11


def test_rows_that_are_due_sooner_go_first_within_their_priority():
    deadlines = [None, 1000.0, 3.0, 900.0, None]
    urgencies = [urgency_of(0, deadline_s) for deadline_s in deadlines]
    planner = planner_of(draft_of([(number,) for number in range(1, 6)], urgencies), num_seats=1, num_rows=100)
    order = [turn.item for turn in iter(lambda: planner.take(seat_of(planner, 0)), None)]
    assert (order[0], sorted(order[1:3]), sorted(order[3:])) == (2, [1, 3], [0, 4])
    assert urgency_of(-1, None) < urgency_of(0, 0.5) < urgency_of(0, 2.0) < urgency_of(0, None) < urgency_of(1, 0.5)


def test_what_a_lost_worker_has_left_of_its_group_goes_to_another():
    prompts = [(1,) * 9] * 20 + [(2,) * 9] * 20
    planner = planner_of(draft_of(prompts), num_seats=2)
    lost = seat_of(planner, 1)
    under_way = [planner.take(lost) for _ in range(4)]
    assert planner.seat({W[0]: Room(4)})
    assert planner.take(lost) is None
    got = [turn.item for turn in under_way if turn is not None]
    for turn in under_way:
        assert turn is not None
        planner.finish(turn)
    got += run_to_end(planner, random.Random(0))[W[0]]
    assert sorted(got) == list(range(40))


def test_a_worker_that_joins_has_a_seat_at_once():
    planner = planner_of(draft_of([(1,) * 9] * 20 + [(2,) * 9] * 20), num_seats=1)
    assert planner.take(seat_of(planner, 0)) is not None
    assert planner.seat({W[0]: Room(4), W[1]: Room(4)})
    assert planner.take(seat_of(planner, 1)) is not None
    assert not planner.seat({W[0]: Room(8), W[1]: Room(4)})
    assert seat_of(planner, 0).room == Room(8)


def test_without_any_word_of_workers_there_is_one_seat_for_all():
    planner: Planner[int] = Planner(max_under_way=3)
    planner.add(groups_of(draft_of([(1,), (2,), (1,), (2,), (1,)])))
    (seat,) = planner.seats
    turns = list(iter(lambda: planner.take(seat), None))
    assert (seat.worker, len(turns)) == (None, 3)


def test_rows_that_each_have_a_priority_of_their_own_take_no_search_of_all_that_wait():
    num_compared = 0

    class Counted(tuple[int, int]):
        def __lt__(self, other: tuple[int, int]) -> bool:
            nonlocal num_compared
            num_compared += 1
            return tuple.__lt__(self, other)

    num_rows = 2000
    priorities = random.Random(0).sample(range(num_rows), num_rows)
    draft = draft_of([(1, 2)] * num_rows, [Counted((priority, 0)) for priority in priorities])
    groups = groups_of(draft)
    planner: Planner[int] = Planner(max_under_way=4)
    num_compared = 0
    planner.add(groups)
    (seat,) = planner.seats
    handed_out = []
    while (turn := planner.take(seat)) is not None:
        planner.finish(turn)
        handed_out.append(turn.item)
    assert [priorities[row] for row in handed_out] == list(range(num_rows))
    # A heap's two times twice its depth, and some more.
    assert num_compared < 50 * num_rows
