from __future__ import annotations

import logging

import pytest

from shared.directory.breaker import NUM_MISSES_TO_OPEN, Breaker


def opened_at(now_s: float) -> Breaker:
    breaker = Breaker(rest_s=1.0)
    for _ in range(NUM_MISSES_TO_OPEN):
        assert breaker.admit(now_s)
        breaker.miss(now_s, "match: no answer")
    return breaker


def test_misses_open_it_only_in_a_row() -> None:
    breaker = Breaker(rest_s=1.0)
    for _ in range(10):
        breaker.miss(0.0, "late")
        breaker.miss(0.0, "late")
        breaker.succeed(0.0)
    assert (breaker.is_open, breaker.admit(0.0)) == (False, True)


def test_open_it_admits_one_probe_after_each_rest() -> None:
    breaker = opened_at(10.0)
    assert [breaker.admit(now_s) for now_s in (10.0, 10.9, 11.0, 11.0, 15.0)] == [False, False, True, False, False]
    breaker.miss(15.0, "late")
    assert [breaker.admit(now_s) for now_s in (15.9, 16.0, 16.0)] == [False, True, False]
    breaker.succeed(16.5)
    assert (breaker.is_open, breaker.admit(16.5), breaker.admit(16.5)) == (False, True, True)


def test_abandoned_probe_makes_room_for_another() -> None:
    breaker = opened_at(0.0)
    assert breaker.admit(1.0)
    breaker.abandon()
    assert (breaker.admit(1.0), breaker.is_open) == (True, True)


def test_one_line_is_logged_when_it_opens_and_one_when_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    breaker = opened_at(0.0)
    for now_s in range(1, 100):
        assert breaker.admit(float(now_s))
        breaker.miss(float(now_s), "late")
    breaker.admit(100.0)
    breaker.succeed(100.0)
    breaker.succeed(101.0)
    assert breaker.num_openings == 1
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.ERROR,
            "the directory's store misses (match: no answer); it is asked again every 1 s, "
            "and routing goes on without it",
        ),
        (logging.ERROR, "the directory's store answers again after 100.0 s"),
    ]
