"""Hot beginnings of prompts, and how much of a prompt was seen before."""

from __future__ import annotations

import random

from router.prefix_groups import PrefixGroups, SeenPrefixes
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme

SCHEME = CacheScheme("fake", 16)
ROOT = root_key(SCHEME)


def chain(*parts: tuple[int, int]) -> list[BlockKey]:
    """Keys of a prompt of parts, each of some blocks that follow from a seed."""
    token_ids: list[int] = []
    for seed, num_blocks in parts:
        rng = random.Random(seed)
        token_ids += [rng.randrange(30_000) for _ in range(16 * num_blocks)]
    return block_keys(pack_tokens(token_ids), 16, ROOT)


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Traffic:
    """Prompts as a router counts them."""

    def __init__(self, max_groups: int = 128) -> None:
        self.clock = Clock()
        self.seen = SeenPrefixes()
        self.groups = PrefixGroups(self.clock, max_groups)

    def add(self, keys: list[BlockKey], times: int = 1) -> None:
        for _ in range(times):
            self.groups.add(keys, self.seen.add(keys))

    def hottest(self, most: int = 12) -> list[tuple[int, float]]:
        return [(group.num_blocks, group.traffic) for group in self.groups.hottest(most)]


def test_what_an_earlier_prompt_began_with_is_known() -> None:
    seen = SeenPrefixes()
    assert seen.add(chain((1, 8), (2, 4))) == 0
    assert seen.add(chain((1, 8), (3, 4))) == 8
    assert seen.add(chain((1, 8), (2, 4), (4, 2))) == 12
    assert seen.add(chain((9, 3))) == 0
    assert seen.add([]) == 0


def test_prompt_is_known_as_far_as_its_last_block_that_has_not_faded() -> None:
    seen = SeenPrefixes(num_places=64)
    first = chain((1, 8))
    seen.add(first)
    for seed in range(2, 4):
        seen.add(chain((seed, 8)))
    assert seen.add(first) == 8
    for seed in range(10, 110):
        seen.add(chain((seed, 64)))
    assert seen.add(first) == 0


def test_group_is_where_prompts_part() -> None:
    traffic = Traffic()
    for tail in range(10):
        traffic.add(chain((1, 8), (100 + tail, 4)))
    for tail in range(4):
        traffic.add(chain((2, 3), (200 + tail, 4)))
    assert traffic.hottest() == [(8, 10.0), (3, 4.0)]
    assert [group.keys for group in traffic.groups.hottest(2)] == [chain((1, 8)), chain((2, 3))]


def test_beginning_whose_traffic_is_all_of_a_longer_one_is_not_told() -> None:
    traffic = Traffic()
    traffic.add(chain((1, 2), (7, 1)))
    for tail in range(10):
        traffic.add(chain((1, 2), (3, 6), (100 + tail, 4)))
    # Twelve prompts share two blocks, and all but one of them eight.
    assert traffic.hottest() == [(8, 10.0)]


def test_both_beginnings_are_told_where_each_has_traffic_of_its_own() -> None:
    traffic = Traffic()
    for tail in range(10):
        traffic.add(chain((1, 4), (100 + tail, 4)))
        traffic.add(chain((1, 4), (3, 4), (200 + tail, 4)))
    assert sorted(traffic.hottest()) == [(4, 20.0), (8, 10.0)]


def test_what_is_hot_cools_down() -> None:
    traffic = Traffic()
    traffic.add(chain((1, 8)), times=8)
    traffic.clock.now_s = 125.0
    assert traffic.hottest() == [(8, 2.0)]


def test_hot_groups_outlive_any_number_of_rare_ones() -> None:
    traffic = Traffic(max_groups=8)
    hot = chain((1, 8))
    traffic.add(hot, times=20)
    for seed in range(1000):
        traffic.add(chain((10 + seed, 4)), times=2)
    assert len(traffic.groups) == 8
    assert traffic.hottest(1) == [(8, 20.0)]


def test_very_long_beginnings_take_bounded_memory() -> None:
    traffic = Traffic()
    keys = chain((1, 1500))
    traffic.add(keys, times=3)
    assert traffic.hottest() == [(1024, 3.0)]
