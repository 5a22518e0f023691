from router.answer_lengths import AnswerLengths
from tests.support.stores import keys

SYSTEM = range(4)
CHAT = (*SYSTEM, 10, 11, 12, 13, 14)
OTHER_CHAT = (*SYSTEM, 20, 21, 22, 23, 24)


def test_of_an_unknown_prompt_the_mean_of_all_answers_is_expected():
    lengths = AnswerLengths()
    lengths.note(keys(CHAT), 10)
    assert lengths.expected_tokens(keys(range(50, 60)), 64.0) == 64.0
    assert lengths.expected_tokens((), 64.0) == 64.0


def test_the_next_turn_of_a_chat_is_likely_to_get_an_answer_as_long_as_the_former_ones():
    lengths = AnswerLengths()
    for num_output_tokens in (100, 200):
        lengths.note(keys(CHAT), num_output_tokens)
        lengths.note(keys(OTHER_CHAT), 10 * num_output_tokens)
    next_turn, other_turn = (keys((*chat, 30, 31)) for chat in (CHAT, OTHER_CHAT))
    # Two answers against one of the mean's.
    assert lengths.expected_tokens(next_turn, 600.0) == 600.0 + 2 / 3 * (150.0 - 600.0)
    assert lengths.expected_tokens(other_turn, 600.0) == 600.0 + 2 / 3 * (1500.0 - 600.0)


def test_a_new_chat_is_told_by_its_system_prompt():
    lengths = AnswerLengths()
    for _ in range(3):
        lengths.note(keys(CHAT), 8)
        lengths.note(keys(range(100, 120)), 1000)
    assert lengths.expected_tokens(keys((*SYSTEM, 40, 41)), 500.0) == 500.0 + 3 / 4 * (8.0 - 500.0)


def test_what_answers_were_long_ago_is_forgotten():
    lengths = AnswerLengths()
    for num_output_tokens in [1000] * 100 + [10] * 100:
        lengths.note(keys(CHAT), num_output_tokens)
    assert lengths.expected_tokens(keys(CHAT), 10.0) < 20.0


def test_the_beginnings_asked_last_are_remembered_and_no_more():
    lengths = AnswerLengths(max_beginnings=3)
    for first in range(10):
        lengths.note(keys([first]), 100)
    lengths.note(keys([7]), 100)
    lengths.note(keys([99]), 100)
    known = [first for first in range(10) if lengths.expected_tokens(keys([first]), 0.0)]
    assert (len(lengths), known) == (3, [7, 9])
