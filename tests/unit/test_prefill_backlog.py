from __future__ import annotations

from worker.prefill_backlog import PrefillBacklog


def backlog(*tokens: int, num_prefilled: int = 0) -> PrefillBacklog:
    made = PrefillBacklog()
    for request, num_tokens in enumerate(tokens):
        made.add(request, num_tokens, num_prefilled)
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
    queue.add(2, 70, 10_150)
    assert queue.num_tokens(10_150) == 70


def test_a_request_that_is_out_already_changes_nothing():
    queue = backlog(100)
    queue.note_prefilled(0, 100)
    queue.note_prefilled(0, 100)
    queue.drop(0, 9000)
    queue.add(1, 30, 100)
    assert queue.num_tokens(110) == 20
