"""What counts as held of a prompt: what lies there, and what is promised, for as many as a worker is to get."""

from __future__ import annotations

import numpy as np
import pytest

from router.credit import Credit, UnderWay
from router.hints import Hints
from router.requests import GenerateRequest
from shared.directory.base import Match
from shared.hashing import pack_tokens
from shared.types import BlockKey, RequestId, Sampling, WorkerId
from tests.support.policies import loads_of

KEYS = [BlockKey(bytes([index]) * 16) for index in range(8)]
REQUEST = GenerateRequest(RequestId("r"), pack_tokens(list(range(8 * 64 + 10))), Sampling(max_tokens=8))
W0, W1 = WorkerId("w0"), WorkerId("w1")


def credit_of(hints: Hints, *, num_requests: int = 0, num_held: int = 0, num_routers: int = 1) -> Credit:
    """Of two workers with so many requests each."""
    loads = loads_of({"num_requests": num_requests}, {"num_requests": num_requests})
    credit = Credit(hints, block_size_tokens=64, min_prefix_tokens=0)
    credit.relay(loads)
    credit.note_loads(loads, num_held, num_routers)
    return credit


def tokens_by_place(credit: Credit, num_places: int, match: Match | None = None) -> list[list[int]]:
    """What counts for requests for one beginning, in their order."""
    matches = {} if match is None else {W1: match}
    return [
        credit.row(REQUEST, KEYS, matches, lambda depth, place=place: place).tokens.tolist()  # type: ignore[misc]
        for place in range(num_places)
    ]


def test_what_a_worker_computes_counts_for_four_requests_itself_included() -> None:
    hints = Hints(lambda: 0.0)
    hints.promise(W0, KEYS)
    assert tokens_by_place(credit_of(hints), 5) == [[512, 0]] * 3 + [[0, 0]] * 2
    hints.promise(W1, KEYS)
    # Each has its own worker, so that none gets those of the other.
    assert tokens_by_place(credit_of(hints), 7) == [[512, 0]] * 3 + [[0, 512]] * 3 + [[0, 0]]
    for _ in range(3):
        hints.promise(W0, KEYS)
    assert tokens_by_place(credit_of(hints), 4) == [[0, 512]] * 3 + [[0, 0]]


@pytest.mark.parametrize(
    ("crowd", "num_places"),
    [
        ({"num_requests": 6}, 11),
        ({"num_held": 12}, 11),
        ({"num_held": 12, "num_routers": 4}, 11),
        ({"num_routers": 4}, 0),
    ],
)
def test_it_counts_for_twice_a_worker_s_share_of_all_requests_and_routers_divide_that(
    crowd: dict[str, int], num_places: int
) -> None:
    hints = Hints(lambda: 0.0)
    hints.promise(W0, KEYS)
    counted = [tokens != [0, 0] for tokens in tokens_by_place(credit_of(hints, **crowd), 20)]
    assert counted == [True] * num_places + [False] * (20 - num_places)


def test_what_somebody_holds_is_promised_to_all() -> None:
    hints = Hints(lambda: 0.0)
    hints.promise(W0, KEYS)
    held = Match(num_blocks=8, instance=loads_of({}, {}).instances[1])
    assert tokens_by_place(credit_of(hints), 6, held) == [[512, 512]] * 6


def test_a_shorter_promise_counts_for_who_gets_no_share_of_a_longer_one() -> None:
    hints = Hints(lambda: 0.0)
    hints.promise(W0, KEYS)
    hints.promise(W1, KEYS[:2])
    assert tokens_by_place(credit_of(hints), 4) == [[512, 128]] * 3 + [[0, 128]]


def test_a_promise_counts_for_all_where_nobody_is_held() -> None:
    hints = Hints(lambda: 0.0)
    for _ in range(9):
        hints.promise(W0, KEYS)
    credited = credit_of(hints).row(REQUEST, KEYS, {})
    assert credited.tokens.tolist() == [512, 0]
    assert (credited.most_tokens, credited.under_way) == (512, UnderWay(0, 0, 512))
    assert credited.tokens.dtype == np.int64
