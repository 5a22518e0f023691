"""Promises: they count from the send on, until shortly after the first token, or until they are withdrawn."""

from __future__ import annotations

from router.hints import SETTLE_S, Hints
from shared.types import BlockKey, WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")
KEYS = [BlockKey(bytes([index]) * 16) for index in range(6)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_promise_counts_for_its_worker_only() -> None:
    hints = Hints(Clock())
    hints.promise(W0, KEYS[:4])
    assert hints.promised(KEYS) == {W0: 4}


def test_promise_outlives_a_long_prefill_and_ends_soon_after_the_first_token() -> None:
    clock = Clock()
    hints = Hints(clock)
    promise = hints.promise(W0, KEYS)
    clock.now_s += 3600.0
    assert hints.promised(KEYS) == {W0: len(KEYS)}
    hints.settle(promise)
    clock.now_s += SETTLE_S / 2
    assert hints.promised(KEYS) == {W0: len(KEYS)}
    clock.now_s += SETTLE_S
    assert hints.promised(KEYS) == {}
    assert len(hints) == 0


def test_a_block_tells_of_how_many_requests_it_is_promised_to_a_worker() -> None:
    hints = Hints(Clock())
    hints.promise(W0, KEYS)
    shorter = hints.promise(W0, KEYS[:2])
    hints.promise(W1, KEYS[:1])
    assert [hints.num_promises(W0, key) for key in KEYS[:3]] == [2, 2, 1]
    assert hints.num_promises(W1, KEYS[0]) == 1
    hints.withdraw(shorter)
    assert hints.num_promises(W0, KEYS[0]) == 1


def test_overlapping_promises_end_one_by_one() -> None:
    hints = Hints(Clock())
    short, long = hints.promise(W0, KEYS[:2]), hints.promise(W0, KEYS[:5])
    hints.withdraw(long)
    assert hints.promised(KEYS) == {W0: 2}
    hints.withdraw(short)
    assert hints.promised(KEYS) == {}


def test_withdrawing_twice_or_after_settling_changes_nothing_else() -> None:
    clock = Clock()
    hints = Hints(clock)
    first, second = hints.promise(W0, KEYS), hints.promise(W0, KEYS)
    hints.settle(first)
    hints.withdraw(first)
    hints.withdraw(first)
    clock.now_s += SETTLE_S + 1
    assert hints.promised(KEYS) == {W0: len(KEYS)}
    hints.withdraw(second)
    assert len(hints) == 0


def test_a_worker_that_left_is_promised_nothing() -> None:
    hints = Hints(Clock())
    hints.promise(W0, KEYS)
    hints.promise(W1, KEYS[:1])
    hints.forget(W0)
    assert hints.promised(KEYS) == {W1: 1}


def test_promises_of_prompts_shorter_than_a_block_end_like_any_other() -> None:
    clock = Clock()
    hints = Hints(clock)
    for keys in ([], [], KEYS[:1]):
        hints.settle(hints.promise(W0, keys))
    clock.now_s += SETTLE_S
    assert hints.promised(KEYS) == {}
    assert len(hints) == 0
