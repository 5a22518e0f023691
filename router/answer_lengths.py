"""How long answers are likely to be, told by those to prompts with the same beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.chain_marks import chain_marks
from shared.types import BlockKey

_PRIOR_ANSWERS = 1.0
"""What is known of answers in general counts as one answer more of those to a beginning."""
_MAX_ANSWERS = 20
"""About so many of the latest answers to a beginning count."""
_MAX_BEGINNINGS = 65_536


class AnswerLengths:
    """Owns the mean length of the answers to each of the beginnings that were asked last; the oldest are forgotten.

    Turns of one chat get answers of like length, and so do requests with one system prompt: on Mooncake's chats this
    takes a sixth off the variance. Where little is known, what is expected is drawn towards the mean of all answers.
    """

    def __init__(self, max_beginnings: int = _MAX_BEGINNINGS) -> None:
        self._max_beginnings = max_beginnings
        self._key_to_answers: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()
        """Number of answers that count, and their mean length in tokens."""

    def __len__(self) -> int:
        return len(self._key_to_answers)

    def note(self, keys: Sequence[BlockKey], num_output_tokens: int) -> None:
        """Let an answer to the prompt of these blocks count. Modifies."""
        key_to_answers = self._key_to_answers
        for key in chain_marks(keys):
            num_answers, mean_tokens = key_to_answers.pop(key, (0, 0.0))
            num_answers = min(num_answers + 1, _MAX_ANSWERS)
            key_to_answers[key] = (num_answers, mean_tokens + (num_output_tokens - mean_tokens) / num_answers)
        while len(key_to_answers) > self._max_beginnings:
            key_to_answers.popitem(last=False)

    def expected_tokens(self, keys: Sequence[BlockKey], mean_tokens: float) -> float:
        """By the longest beginning of this prompt that is known, else the mean of all answers."""
        for key in reversed(tuple(chain_marks(keys))):
            answers = self._key_to_answers.get(key)
            if answers is not None:
                num_answers, own_tokens = answers
                return mean_tokens + num_answers / (num_answers + _PRIOR_ANSWERS) * (own_tokens - mean_tokens)
        return mean_tokens
