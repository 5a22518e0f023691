from __future__ import annotations

import pytest

from shared.errors import Outpaced
from shared.hashing import pack_tokens
from worker.prefill_backlog import PrefillBacklog, Prompt


def unlike_any(request: int, num_tokens: int) -> Prompt:
    return Prompt(pack_tokens([request] * num_tokens), "", "")


def backlog(*tokens: int, num_prefilled: int = 0) -> PrefillBacklog:
    made = PrefillBacklog()
    for request, num_tokens in enumerate(tokens):
        made.add(request, unlike_any(request, num_tokens), 0, num_prefilled)
    return made


def test_what_the_engine_computes_is_taken_off_the_request_at_the_head():
    queue = backlog(1000, 200, num_prefilled=5000)
    assert [queue.num_tokens(at) for at in (5000, 5400, 5999, 6000)] == [1200, 800, 201, 200]
    queue.note_prefilled(0, 1000)
    assert [queue.num_tokens(at) for at in (6000, 6150, 6200)] == [200, 50, 0]
    queue.note_prefilled(1, 200)
    assert queue.num_tokens(6200) == 0


def test_an_engine_that_finds_less_in_its_cache_than_expected_never_makes_it_negative():
    queue = backlog(100, 50)
    assert queue.num_tokens(700) == 50
    queue.note_prefilled(0, 700)
    assert queue.num_tokens(700) == 50


def test_a_request_that_is_dropped_half_way_takes_its_progress_along():
    queue = backlog(1000, 200)
    assert queue.num_tokens(600) == 600
    queue.drop(0, 600)
    assert queue.num_tokens(600) == 200
    assert queue.num_tokens(700) == 100


def test_a_first_token_that_is_told_before_its_step_counts_once():
    queue = backlog(100, 50)
    queue.note_prefilled(0, 100)
    assert [queue.num_tokens(at) for at in (0, 100, 130)] == [50, 50, 20]


def test_tokens_of_nobody_here_count_for_one_request_at_most_and_are_forgotten_when_the_backlog_is_empty():
    queue = backlog(100, 50)
    assert queue.num_tokens(10_000) == 50
    queue.note_prefilled(0, 100)
    queue.note_prefilled(1, 50)
    queue.add(2, unlike_any(2, 70), 0, 10_150)
    assert queue.num_tokens(10_150) == 70


def test_a_request_that_is_out_already_changes_nothing():
    queue = backlog(100)
    queue.note_prefilled(0, 100)
    queue.note_prefilled(0, 100)
    queue.drop(0, 9000)
    queue.add(1, unlike_any(1, 30), 0, 100)
    assert queue.num_tokens(110) == 20


def test_what_is_known_to_be_cached_is_not_waited_for():
    queue = PrefillBacklog()
    queue.add(0, unlike_any(0, 100), 64, 0)
    queue.add(1, unlike_any(1, 100), 640, 0)
    assert queue.num_tokens(0) == 36


def test_a_request_is_admitted_with_no_more_before_it_than_it_allows():
    queue = backlog(100)
    assert queue.admit(unlike_any(1, 50), 100, 0) == 0
    assert queue.admit(unlike_any(1, 50), 30, 70) == 0
    assert queue.admit(unlike_any(1, 50), None, 0) == 0
    with pytest.raises(Outpaced, match="31 tokens are to be prefilled before the request, which allows 30"):
        queue.admit(unlike_any(1, 50), 30, 69)


@pytest.mark.parametrize("num_shared_tokens", [0, 1, 2, 63, 64, 99, 100])
def test_what_is_computed_for_one_before_it_anyway_is_allowed_beside(num_shared_tokens: int):
    queue = PrefillBacklog()
    queue.add("other", unlike_any(9, 5), 0, 0)
    queue.add("same", Prompt(pack_tokens(range(100)), "salt", "adapter"), 0, 0)
    token_ids = [*range(num_shared_tokens), *[1000] * 50]
    assert (
        queue.admit(Prompt(pack_tokens(token_ids), "salt", "adapter"), 105 - num_shared_tokens, 0) == num_shared_tokens
    )
    with pytest.raises(Outpaced):
        queue.admit(Prompt(pack_tokens(token_ids), "salt", "adapter"), 104 - num_shared_tokens, 0)
    for stranger in (Prompt(pack_tokens(token_ids), "", "adapter"), Prompt(pack_tokens(token_ids), "salt", "")):
        assert queue.admit(stranger, 105, 0) == 0


def test_what_is_over_is_shared_with_nobody():
    queue = backlog(100, 50)
    queue.note_prefilled(0, 100)
    queue.drop(1, 100)
    assert [queue.admit(unlike_any(request, 50), 0, 100) for request in (0, 1)] == [0, 0]
