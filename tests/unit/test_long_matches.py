"""Matches of chains that take several rounds, against a store that answers when the test says, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from shared.directory.base import MAX_KEYS_PER_CALL, Match
from shared.directory.connection import Command
from shared.directory.redis import RedisDirectory
from shared.errors import DirectoryUnavailable
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.stores import SCHEME, instance, keys

W1 = WorkerId("w1")
DEADLINE_S = 0.02
NEVER_S = 3600.0
CHAIN = keys(range(2 * MAX_KEYS_PER_CALL + 5))


def directory_that_takes(monkeypatch: pytest.MonkeyPatch, *rounds_s: float) -> RedisDirectory:
    """A directory whose store holds every key of `w1`, and takes so long for one round after another."""
    directory = RedisDirectory("redis://store", SCHEME, match_deadline_s=DEADLINE_S)
    left_s = list(rounds_s)

    async def pipeline(commands: Sequence[Command], **_: Any) -> list[Any]:
        await asyncio.sleep(left_s.pop(0))
        chains = [command.arguments[-1] for command in commands]
        return [[instance(1).encode(), len(chain) // 16] for chain in chains if isinstance(chain, bytes)]

    directory._connection._servers.is_known = True
    monkeypatch.setattr(directory._connection, "pipeline", pipeline)
    return directory


@pytest.mark.parametrize(
    ("rounds_s", "num_blocks", "num_misses"),
    [
        ((0.001, 0.001, 0.001), len(CHAIN), 0),
        ((0.015,), MAX_KEYS_PER_CALL, 0),
        ((0.02 - 1e-6,), MAX_KEYS_PER_CALL, 0),
        ((0.008, 0.008), 2 * MAX_KEYS_PER_CALL, 0),
        ((0.001, NEVER_S), MAX_KEYS_PER_CALL, 1),
        ((0.001, 0.001, NEVER_S), 2 * MAX_KEYS_PER_CALL, 1),
    ],
    ids=str,
)
def test_what_the_first_rounds_find_stands_and_rounds_without_time_are_not_asked_for(
    rounds_s: tuple[float, ...], num_blocks: int, num_misses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        directory = directory_that_takes(monkeypatch, *rounds_s)
        assert await directory.match(CHAIN, [W1]) == {W1: Match(instance(1), num_blocks)}
        assert (directory.num_misses, directory.num_spared) == (num_misses, 0)
        await directory.close()

    run_virtual(scenario())


def test_a_healthy_store_that_has_time_for_one_round_only_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        directory = directory_that_takes(monkeypatch, *[0.015] * 10)
        for _ in range(10):
            assert await directory.match(CHAIN, [W1]) == {W1: Match(instance(1), MAX_KEYS_PER_CALL)}
        assert (directory.num_breaker_openings, directory.is_resting) == (0, False)
        await directory.close()

    run_virtual(scenario())


def test_a_first_round_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        directory = directory_that_takes(monkeypatch, NEVER_S)
        with pytest.raises(DirectoryUnavailable, match=r"^match: no answer within 0\.02 s"):
            await directory.match(CHAIN, [W1])
        await directory.close()

    run_virtual(scenario())
