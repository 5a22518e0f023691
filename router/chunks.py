"""The server-sent events of a streamed answer. What is the same in all of them is encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router.openai import Endpoint, Usage
from router.told import TokenText, delta_body, tokens_body
from shared.messages import MessagePart
from shared.types import FinishReason

DONE = b"data: [DONE]\n\n"
_FINISHES = {finish: b'"' + finish.value.encode() + b'"' for finish in FinishReason} | {None: b"null"}


class Chunks:
    """Encodes the chunks of one request's answers.

    With `wants_usage` every chunk has a `usage`, which is null in all but the last one, as at OpenAI.
    """

    def __init__(self, endpoint: Endpoint, *, response_id: str, model: str, created: int, wants_usage: bool) -> None:
        is_chat = endpoint is Endpoint.CHAT
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = orjson.dumps({"id": response_id, "object": kind, "created": created, "model": model})[:-1]
        self._head = b"data: " + head + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if wants_usage else b"]}\n\n"
        self._is_chat = is_chat
        self._before_text = b',"delta":{"content":' if is_chat else b',"text":'
        self._after_text = b'},"logprobs":null,"finish_reason":' if is_chat else b',"logprobs":null,"finish_reason":'
        self._only = self._head + b'{"index":0' + self._before_text
        """Of an answer that is alone."""
        self._only_end = self._after_text + b"null}" + self._tail

    def first(self, index: int) -> bytes:
        """What opens an answer: a chat's role. Nothing where text alone is told."""
        if not self._is_chat:
            return b""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._head + delta + self._tail

    def piece(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,
        logprobs: Sequence[TokenText] | None = None,
        part: MessagePart | None = None,
    ) -> bytes:
        """New text, and with the last of it a second chunk that says why it ended."""
        if logprobs is not None or part is not None:
            return self._rich(index, text, finish, logprobs, part)
        if finish is None:
            return self._text(index, text)
        if not self._is_chat:
            return self._head + self._choice(index, text, finish) + self._tail
        end = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, _FINISHES[finish])
        return (self._text(index, text) if text else b"") + self._head + end + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that tells the token counts."""
        return self._head + b'],"usage":' + orjson.dumps(usage.as_body()) + b"}\n\n"

    def _rich(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,
        logprobs: Sequence[TokenText] | None,
        part: MessagePart | None,
    ) -> bytes:
        """The same of text that comes with more: there are few of these, so that each is encoded as a whole."""
        choice: dict[str, Any] = {"index": index}
        if not self._is_chat:
            choice["text"] = text
        elif part is not None:
            choice["delta"] = delta_body(part)
        else:
            choice["delta"] = {"content": text} if text else {}
        choice["logprobs"] = None if logprobs is None else tokens_body(logprobs, is_chat=self._is_chat)
        choice["finish_reason"] = finish if finish is not None and not self._is_chat else None
        told = self._head + orjson.dumps(choice) + self._tail
        return told + self.piece(index, "", finish) if finish is not None and self._is_chat else told

    def _text(self, index: int, text: str) -> bytes:
        if index == 0:
            return self._only + orjson.dumps(text) + self._only_end
        return self._head + self._choice(index, text, None) + self._tail

    def _choice(self, index: int, text: str, finish: FinishReason | None) -> bytes:
        return b'{"index":%d%b%b%b%b}' % (
            index,
            self._before_text,
            orjson.dumps(text),
            self._after_text,
            _FINISHES[finish],
        )
