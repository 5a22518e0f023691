"""Text of token ids as they come: whole characters, in order, up to the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shared.types import FinishReason

CONTEXT_TOKENS = 6
"""Prompt tokens before the answer that decoding sees, so that a leading space is neither lost nor invented."""
_MAX_HELD_TOKENS = 32
"""Most tokens held back for an unfinished character. A character has at most four bytes; past this bound the bytes
are garbage and come out as U+FFFD, as they would at the end."""
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one stream, piece by piece, up to the first stop string.

    Text comes out once and in order; a character spread over tokens comes out whole; text that may be the beginning of
    a stop string is held back until that is decided. `tokenizers.decoders.DecodeStream` is not used: it has no flush
    for an unfinished character, and raises where a byte-fallback decoder changes its mind about earlier bytes.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        context_text: str | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """`context_text` is what `decode` makes of the context, where that is known."""
        self._decode = decode
        self._stop = tuple(stop)
        self._stop_token_ids = stop_token_ids
        # Tokens whose text is out but which the decoding of the next ones depends on, and their text once it is needed:
        # to decode is what most of this takes, and what comes last is the context of nothing.
        self._context = list(context)
        self._context_text = context_text if context else ""
        self._pending: list[int] = []
        self._held = ""
        self.is_stopped = False
        """Whether a stop string has ended the stream; later tokens give no text."""
        self.num_tokens = 0
        """Tokens taken, the one that completed a stop string included."""

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take the next tokens and return the text that is certain by now; all of it where `finish` is given.

        Modifies the stream. A stop *token* that ends the stream is counted and gives no text.
        """
        text = ""
        silent = finish is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self._stop_token_ids
        visible = token_ids[:-1] if silent else token_ids
        # One at a time where a stop string may end the stream, so that how tokens arrive in groups changes nothing.
        for group in [[token_id] for token_id in visible] if self._stop else [visible]:
            if self.is_stopped:
                return text
            self.num_tokens += len(group)
            text += self._through_stop(self._decode_next(group))
        if self.is_stopped:
            return text
        self.num_tokens += silent
        return text + self.flush() if finish is not None else text

    def flush(self) -> str:
        """What is still held back, once no more tokens come. Modifies the stream."""
        if self.is_stopped:
            return ""
        text = self._through_stop(self._decode_next([], is_last=True)) + self._held
        if self.is_stopped:
            return text
        self._held = ""
        return text

    def _decode_next(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Text that `token_ids` add, as soon as it ends on a whole character."""
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_HELD_TOKENS and not is_last:
            return ""
        if self._context_text is None:
            self._context_text = self._decode(self._context)
        added = text[len(self._context_text) :]
        if added:
            self._context = self._pending
            self._context_text = None
        # Tokens without text (special ones) are dropped, so that a run of them costs nothing.
        self._pending = []
        return added

    def _through_stop(self, added: str) -> str:
        """`added` after what was held, cut at the first complete stop string or before a possible beginning of one."""
        if not self._stop:
            return added
        text = self._held + added
        # The stop string that is complete first wins, as if characters came one by one.
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_held = max(_num_begun(text, stop) for stop in self._stop)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
