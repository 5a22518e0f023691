"""What is told of values in the store that are none of ours."""

from __future__ import annotations

import logging

import pytest

from shared.directory.refusals import Refusals


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_each_key_is_told_once_and_every_value_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for _ in range(100):
        refusals.note("kvr:a", "no text")
    refusals.note("kvr:b", ValueError("no number"), num_values=7)
    assert refusals.num_malformed == 107
    assert told(caplog) == [
        "kvr:a in the store holds what is not ours and is refused: no text",
        "kvr:b in the store holds what is not ours and is refused: no number",
    ]


def test_a_store_full_of_nonsense_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(1000):
        refusals.note(f"kvr:{number}", "no text")
    assert refusals.num_malformed == 1000
    assert len(told(caplog)) == 33
    assert told(caplog)[-1] == "further keys in the store that hold what is not ours are only counted"


def test_what_a_stranger_wrote_breaks_no_line_and_takes_no_page(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note("kvr:a", "a\nERROR all is lost\x1b[2J" + "x" * 10_000)
    (line,) = told(caplog)
    assert line.endswith("refused: a?ERROR all is lost?[2J" + "x" * 177)
