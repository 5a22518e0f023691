"""The minimiser of failing walks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.shrink import shortest_failing


@pytest.mark.parametrize("culprits", [[7], [0, 99], [3, 4, 50, 98]])
def test_only_what_the_failure_needs_is_left_and_in_order(culprits: list[int]) -> None:
    def fails(operations: Sequence[int]) -> bool:
        return [number for number in operations if number in culprits] == culprits

    assert shortest_failing(range(100), fails) == culprits


def test_number_of_tries_is_bounded() -> None:
    tried = []

    def fails(operations: Sequence[int]) -> bool:
        tried.append(operations)
        return len(operations) > 10 and len(tried) % 3 == 0

    shortest_failing(range(1000), fails, max_tries=20)
    assert len(tried) == 20
