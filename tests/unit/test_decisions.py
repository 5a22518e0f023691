"""The log of decisions: bounded, rendered when somebody looks, and saying why the winner won."""

from __future__ import annotations

import numpy as np
import pytest

from router.decisions import DecisionLog, candidates_of, reason_of
from router.policies.base import Ranking
from router.requests import RequestTrace
from shared.types import RequestId, WorkerId


def ranking(total: list[float], *, best: int = 0, matched: list[int] | None = None, **terms: list[float]) -> Ranking:
    """Costs of workers w0, w1 and so on."""
    return Ranking(
        tuple(WorkerId(f"w{number}") for number in range(len(total))),
        best,
        np.array(total),
        np.array(matched or [0] * len(total), dtype=np.int64),
        {name: np.array(values) for name, values in terms.items()},
    )


def test_decision_tells_every_candidate_with_its_terms_best_first() -> None:
    log = DecisionLog("router-0", "cost")
    trace = RequestTrace(received_at_s=10.0, num_attempts=1, possible_tokens=128)
    costs = ranking([0.5, 0.2, 0.9], best=1, matched=[0, 64, 0], own_s=[0.4, 0.1, 0.4], queue_s=[0.1, 0.1, 0.5])
    log.add(RequestId("r1"), 100, costs, trace, 10.25)
    (decision,) = log.last(5)
    assert (decision.number, decision.request, decision.policy, decision.worker) == (1, "r1", "cost", "w1")
    assert (decision.num_prompt_tokens, decision.matched_tokens, decision.possible_tokens) == (100, 64, 128)
    assert (decision.cached_tokens, decision.ttft_s, decision.waited_s) == (None, None, 0.25)
    assert [(candidate.worker, candidate.total, candidate.terms) for candidate in decision.candidates] == [
        ("w1", 0.2, {"own_s": 0.1, "queue_s": 0.1}),
        ("w0", 0.5, {"own_s": 0.4, "queue_s": 0.1}),
        ("w2", 0.9, {"own_s": 0.4, "queue_s": 0.5}),
    ]
    assert decision.why == "w1 costs 0.3 less than w0, most of all by own_s (+0.3)"


def test_what_becomes_of_a_request_is_in_its_decision() -> None:
    log = DecisionLog("router-0", "cost")
    trace = RequestTrace(received_at_s=1.0)
    log.add(RequestId("r1"), 100, ranking([1.0]), trace, 1.0)
    trace.first_token_at_s, trace.cached_tokens = 1.5, 64
    (decision,) = log.last(1)
    assert (decision.ttft_s, decision.cached_tokens) == (0.5, 64)


def test_engine_that_does_not_tell_of_its_cache_is_waited_for_until_the_answers_end() -> None:
    log = DecisionLog("router-0", "cost")
    trace = RequestTrace(received_at_s=1.0, first_token_at_s=1.5)
    log.add(RequestId("r1"), 100, ranking([1.0]), trace, 1.0)
    assert [(one.cached_tokens, one.is_cache_untold) for one in log.last(1)] == [(None, False)]
    trace.finished_at_s = 2.0
    assert [(one.cached_tokens, one.is_cache_untold) for one in log.last(1)] == [(None, True)]


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (ranking([1.0]), "w0 was the only worker that could take it"),
        (ranking([1.0, np.inf], own_s=[1.0, 1.0]), "w0 was the only worker that could take it"),
        (
            ranking([1.0, 1.0], own_s=[1.0, 1.0]),
            "w0 and w1 cost the same: the tie was broken the same way as on every router",
        ),
        (ranking([1.0, 3.0]), "w0 costs 2 less than w1"),
    ],
)
def test_reason_names_what_there_is(costs: Ranking, why: str) -> None:
    assert reason_of(candidates_of(costs)) == why


def test_worker_that_was_out_of_the_question_has_no_cost() -> None:
    (_, barred) = candidates_of(ranking([1.0, np.inf], own_s=[1.0, np.inf]))
    assert (barred.total, barred.terms) == (None, {})


def test_newest_are_kept_and_shown_first() -> None:
    log = DecisionLog("router-0", "cost")
    for number in range(1000):
        log.add(RequestId(f"r{number}"), 10, ranking([1.0, 2.0]), RequestTrace(), 0.0)
    assert (len(log), log.num_decisions) == (256, 1000)
    assert [decision.request for decision in log.last(2)] == ["r999", "r998"]


def test_fewer_decisions_of_a_large_fleet_are_kept() -> None:
    log = DecisionLog("router-0", "cost")
    costs = ranking([float(number) for number in range(4096)])
    for number in range(50):
        log.add(RequestId(f"r{number}"), 10, costs, RequestTrace(), 0.0)
    assert len(log) == 8
    (decision,) = log.last(1)
    assert (len(decision.candidates), decision.num_more) == (12, 4084)
