from __future__ import annotations

from shared.types import BlockKey
from worker.backlog import Pending


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def pending() -> Pending:
    states = Pending()
    states.update(dict.fromkeys(keys(1, 2, 3), True))
    states.update(dict.fromkeys(keys(4, 2), False))
    return states


def test_all_changes_are_taken_where_one_call_takes_them() -> None:
    states = pending()
    assert states.take(4) == (keys(1, 3), keys(2, 4))
    assert not states


def test_of_more_changes_the_oldest_are_taken_and_the_rest_stay() -> None:
    states = pending()
    assert states.take(2) == (keys(1), keys(2))
    assert states.take(1) == (keys(3), ())
    assert states.take(9) == ((), keys(4))
    assert not states
