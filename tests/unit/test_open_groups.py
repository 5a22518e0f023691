"""Groups are found by what they share and by their work, as by a look at all of them."""

from __future__ import annotations

import random

import pytest

from router.open_groups import TakenGroups, WaitingGroups
from router.row_groups import Draft, Group, Pace, Urgency, chain_of, num_shared_blocks, planned
from shared.types import BlockKey

PACE = Pace(1.0, 8.0)
BLOCK = 16


def group_of(path: str, num_rows: int = 1, urgency: Urgency = (0, 0)) -> Group[str]:
    """Rows of one prompt, of which each letter stands for a block."""
    draft: Draft[str] = Draft()
    keys = [BlockKey(path[: end + 1].rjust(16, ".").encode()[-16:]) for end in range(len(path))]
    for _ in range(num_rows):
        draft.add(path, chain_of(keys), BLOCK * len(keys) + 5, urgency)
    (group,) = planned(draft, block_size_tokens=BLOCK, num_seats=1, pace=Pace(1e9))[:1] or [None]
    assert group is not None
    return group


def random_path(rng: random.Random) -> str:
    return "".join(rng.choices("ab", (4, 1), k=rng.randint(0, 7)))


def nearest_of_all(groups: list[Group[str]], held: list[bytes], pace: Pace) -> tuple[int, float]:
    """What the best of all groups shares and its work, by the rule as it is written."""

    def nearness(group: Group[str]) -> int:
        return max((num_shared_blocks(group.chain, chain) for chain in held), default=0)

    return max((nearness(group), group.work_s(pace)) for group in groups)


@pytest.mark.parametrize("seed", range(20))
def test_the_nearest_group_is_the_same_as_by_a_look_at_all(seed: int):
    rng = random.Random(seed)
    waiting: WaitingGroups[str] = WaitingGroups()
    left: list[Group[str]] = []
    for _ in range(300):
        if rng.random() < 0.55 or not left:
            group = group_of(random_path(rng), rng.randint(1, 9), (rng.choice((0, 0, 1)), 0))
            waiting.add(group)
            left.append(group)
            continue
        held = [group_of(random_path(rng)).chain for _ in range(rng.randrange(4))]
        pace = Pace(rng.choice((1.0, 1e-3)), rng.random(), 0.0, rng.choice((0.0, 0.1)))
        first = min(group.urgency for group in left)
        expected = nearest_of_all([group for group in left if group.urgency == first], held, pace)
        assert waiting.first_urgency == first
        found = waiting.pop_nearest(held, pace)
        left.remove(found)
        assert (found.urgency, nearest_of_all([found], held, pace)) == (first, expected)
    while left:
        left.remove(waiting.pop_nearest([], PACE))
    assert waiting.first_urgency is None


def test_a_group_is_found_among_many_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(0)
    num_weighed = 0
    work_s = Group.work_s

    def counted(group: Group[str], pace: Pace) -> float:
        nonlocal num_weighed
        num_weighed += 1
        return work_s(group, pace)

    paths = ["".join(rng.choices("abcd", k=10)) for _ in range(2000)]
    groups = [group_of(path) for path in paths]
    monkeypatch.setattr(Group, "work_s", counted)
    waiting: WaitingGroups[str] = WaitingGroups()
    for group in groups:
        waiting.add(group)
    held = [group.chain for group in groups[:8]]
    for _ in groups:
        waiting.pop_nearest(held, PACE)
    # One for each chain that is held.
    assert num_weighed <= 8 * len(groups)


@pytest.mark.parametrize("seed", range(10))
def test_the_largest_group_is_divided_whatever_its_owners_have_taken_of_it(seed: int):
    rng = random.Random(seed)
    taken: TakenGroups[str] = TakenGroups()
    groups: list[Group[str]] = []
    pace = PACE
    for _ in range(300):
        action = rng.randrange(6)
        if action == 0 or not groups:
            groups.append(group_of(random_path(rng), rng.randint(1, 40), (rng.choice((0, 1)), 0)))
            taken.add(groups[-1])
        elif action == 1:
            taken.remove(groups.pop(rng.randrange(len(groups))))
        elif action == 2:
            pace = Pace(rng.choice((1.0, 1e-2)), rng.random(), 0.0, rng.choice((0.0, 0.1)))
        elif action == 3:
            group = rng.choice(groups)
            group.start = rng.randint(group.start, group.end)
            groups = [group for group in groups if group]
        else:
            first = min(group.urgency for group in groups)
            most_s = max(group.work_s(pace) for group in groups if group.urgency == first)
            before = {group: (group.end, group.work_s(pace)) for group in groups}
            part = taken.part_of_largest(pace)
            if part is None:
                # One of the largest is worth no division; of several, another one may be.
                assert any(whole_s == most_s for _, whole_s in before.values())
                assert [group.end for group in groups] == [end for end, _ in before.values()]
            else:
                (cut,) = (group for group in groups if group.end != before[group][0])
                assert (cut.urgency, before[cut][1]) == (first, most_s)
                assert (part.plan, part.start, part.end) == (cut.plan, cut.end, before[cut][0])
                groups.append(part)
                taken.add(part)


def test_what_is_not_worth_dividing_is_so_until_the_pace_changes(monkeypatch: pytest.MonkeyPatch):
    taken: TakenGroups[str] = TakenGroups()
    taken.add(group_of("abababab", 6))
    num_tried = 0
    divided = Group.divided

    def counted(group: Group[str], pace: Pace) -> Group[str] | None:
        nonlocal num_tried
        num_tried += 1
        return divided(group, pace)

    monkeypatch.setattr(Group, "divided", counted)
    assert [taken.part_of_largest(PACE) for _ in range(5)] == [None] * 5
    assert num_tried == 1
    part = taken.part_of_largest(Pace(1e-3, 8.0))
    assert part is not None
    assert num_tried == 2
