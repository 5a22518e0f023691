"""What is told of an answer, as text: its pieces, its tokens with their probabilities, its message. OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shared.messages import MessagePart, ToolCallPart
from shared.types import FinishReason


class TokenText(NamedTuple):
    """One token of an answer, how likely it was, and which were likeliest in its place."""

    text: str
    """Incomplete characters are U+FFFD."""
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset_chars: int
    """Length of the answer's tokens before it."""


class Piece(NamedTuple):
    """New text of one answer."""

    text: str
    finish: FinishReason | None
    logprobs: Sequence[TokenText] | None = None
    """Of the tokens that came with this; `None` where nobody asked."""
    part: MessagePart | None = None
    """New text by what it is, in place of `text`, where a worker reads the answer."""


class ToolCall(NamedTuple):
    """One call of a tool."""

    id: str
    name: str
    arguments: str


class Message(NamedTuple):
    """A whole answer as a worker has read it."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, parts: Iterable[MessagePart]) -> Message:
        """All parts of one answer, put together."""
        parts = list(parts)
        calls: dict[int, list[ToolCallPart]] = {}
        for part in parts:
            for call in part.tool_calls:
                calls.setdefault(call.index, []).append(call)
        return cls(
            "".join([part.content for part in parts]),
            "".join([part.reasoning for part in parts]),
            tuple(
                [
                    ToolCall(
                        "".join([part.id for part in found]),
                        "".join([part.name for part in found]),
                        "".join([part.arguments for part in found]),
                    )
                    for _, found in sorted(calls.items())
                ]
            ),
        )


class Whole(NamedTuple):
    """A whole answer."""

    text: str
    finish: FinishReason
    logprobs: Sequence[TokenText] | None = None
    message: Message | None = None
    """Where a worker has read it; `text` is its content then."""


def message_body(answer: Whole) -> dict[str, Any]:
    """A chat's `message`. `reasoning` is named as vLLM names it."""
    message = answer.message
    body: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if message is None:
        return body
    if not answer.text and (message.tool_calls or message.reasoning):
        body["content"] = None
    if message.reasoning:
        body["reasoning"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def delta_body(part: MessagePart) -> dict[str, Any]:
    """A streamed chat's `delta`."""
    body: dict[str, Any] = {}
    if part.content:
        body["content"] = part.content
    if part.reasoning:
        body["reasoning"] = part.reasoning
    if part.tool_calls:
        body["tool_calls"] = [_call_delta(call) for call in part.tool_calls]
    return body


def tokens_body(tokens: Sequence[TokenText], *, is_chat: bool) -> dict[str, Any]:
    """`logprobs` of a choice, in the form of its endpoint."""
    if is_chat:
        return {"content": [_chat_token(token) for token in tokens], "refusal": None}
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # The token itself is among them, though it may not be among the likeliest.
        "top_logprobs": [{token.text: token.logprob} | dict(reversed(token.top)) for token in tokens],
        "text_offset": [token.offset_chars for token in tokens],
    }


def _chat_token(token: TokenText) -> dict[str, Any]:
    top = [{"token": text, "logprob": logprob, "bytes": _utf8(text)} for text, logprob in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": _utf8(token.text), "top_logprobs": top}


def _utf8(text: str) -> list[int] | None:
    """`None` for a token that ends amid a character: its text does not tell its bytes."""
    return None if "\ufffd" in text else list(text.encode())


def _call_delta(call: ToolCallPart) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
