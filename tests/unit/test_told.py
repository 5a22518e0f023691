"""What callers are told beside text: calls of tools, reasoning, and how likely each token was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.requests import Generated, GenerateRequest, RequestTrace, RichGenerated
from router.tokenizer import Tokenizer
from shared.messages import MessagePart, TokenLogprobs, ToolCallPart
from shared.types import FinishReason
from tests.support.http_front import MODEL, Answered, ask, make_front
from tests.support.tokenizers import byte_fallback_tokenizer, write_model_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALLS = (
    RichGenerated((5,), parts=(MessagePart(reasoning="let me"),)),
    RichGenerated((6,), parts=(MessagePart(reasoning=" see"), MessagePart("Well. "))),
    Generated((7,)),
    RichGenerated((8,), parts=(MessagePart(tool_calls=(ToolCallPart(0, "", "id0", "f"),)),)),
    RichGenerated((9,), parts=(MessagePart(tool_calls=(ToolCallPart(0, '{"a":'), ToolCallPart(1, "", "id1", "g"))),)),
    RichGenerated((10,), parts=(MessagePart(tool_calls=(ToolCallPart(0, "1}"), ToolCallPart(1, "{}"))),)),
    Generated((2,), FinishReason.TOOL_CALLS),
)
CALL_BODIES = [
    {"id": "id0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
    {"id": "id1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


class Scripted:
    """Answers every request with the same items."""

    def __init__(self, items: Sequence[Generated]) -> None:
        self._items = items
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0

    async def __call__(self, request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        self.requests.append(request)
        try:
            for item in self._items:
                await asyncio.sleep(0)
                yield item
        finally:
            self.num_closed += 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


async def told(tokenizer: Tokenizer, items: Sequence[Generated], path: str, **fields: Any) -> Answered:
    subject = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    front = make_front(Scripted(items), tokenizer, has_reasoning=True)
    answered = await ask(front, path, {"model": MODEL, **subject, **fields})
    assert answered.status == 200, answered.body
    return answered


def logprob_items(
    tokenizer: Tokenizer, text: str, finish: FinishReason | None = FinishReason.LENGTH
) -> list[Generated]:
    ids = tokenizer.encode(text)
    other = tokenizer.encode("z")[0]
    return [
        RichGenerated(
            (token_id,),
            finish if number == len(ids) - 1 else None,
            (TokenLogprobs(-0.5 - number, (other, token_id), (-0.25, -0.5 - number)),),
        )
        for number, token_id in enumerate(ids)
    ]


async def test_whole_answer_holds_reasoning_and_calls(tokenizer: Tokenizer) -> None:
    body = (await told(tokenizer, CALLS, CHAT, tools=TOOLS)).json
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Well. ",
                "refusal": None,
                "reasoning": "let me see",
                "tool_calls": CALL_BODIES,
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert body["usage"]["completion_tokens"] == 7
    assert ChatCompletion.model_validate(body).choices[0].message.tool_calls is not None


async def test_content_is_null_where_there_are_calls_alone(tokenizer: Tokenizer) -> None:
    body = (await told(tokenizer, CALLS[3:], CHAT, tools=TOOLS)).json
    message = body["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == (None, CALL_BODIES)


async def test_streamed_parts_make_up_the_same_answer_for_the_client(tokenizer: Tokenizer) -> None:
    answered = await told(tokenizer, CALLS, CHAT, tools=TOOLS, stream=True)
    *events, last = answered.events
    assert last == "[DONE]"
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "let me"},
        {"reasoning": " see"},
        {"content": "Well. "},
        {"tool_calls": [{"index": 0, "id": "id0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"a":'}},
                {"index": 1, "id": "id1", "type": "function", "function": {"name": "g", "arguments": ""}},
            ]
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": "1}"}},
                {"index": 1, "function": {"arguments": "{}"}},
            ]
        },
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 7 + ["tool_calls"]
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    calls = state.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("id0", "f", '{"a":1}'),
        ("id1", "g", "{}"),
    ]


async def test_likeliest_tokens_of_a_chat_are_told_with_their_bytes(tokenizer: Tokenizer) -> None:
    items = logprob_items(tokenizer, "aé")
    body = (await told(tokenizer, items, COMPLETIONS, logprobs=2)).json
    assert body["choices"][0]["text"] == "aé"
    fields = {"logprobs": True, "top_logprobs": 2}
    front = make_front(Scripted(items), tokenizer)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    (choice,) = (await ask(front, CHAT, chat)).json["choices"]
    z = {"token": "z", "logprob": -0.25, "bytes": [122]}
    one, *parts = choice["logprobs"]["content"]
    assert one == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [z, {"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    # Of half a character there is no text that would tell its bytes.
    assert [(part["token"], part["bytes"]) for part in parts] == [("\ufffd", None), ("\ufffd", None)]
    assert choice["message"] == {"role": "assistant", "content": "aé", "refusal": None}


async def test_likeliest_tokens_of_a_completion_are_told_by_their_texts(tokenizer: Tokenizer) -> None:
    body = (await told(tokenizer, logprob_items(tokenizer, "ab"), COMPLETIONS, logprobs=1)).json
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"z": -0.25, "a": -0.5}, {"z": -0.25, "b": -1.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streamed_tokens_come_with_their_probabilities(tokenizer: Tokenizer, path: str) -> None:
    items = logprob_items(tokenizer, "aéb")
    front = make_front(Scripted(items), tokenizer)
    subject: dict[str, Any] = {"prompt": "Hi", "logprobs": 1}
    if path == CHAT:
        subject = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    answered = await ask(front, path, {"model": MODEL, "stream": True, **subject})
    choices = [event["choices"][0] for event in answered.events[:-1]]
    if path == CHAT:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "aéb"
        tokens = [token["token"] for choice in choices for token in (choice["logprobs"] or {"content": []})["content"]]
    else:
        assert "".join(choice["text"] for choice in choices) == "aéb"
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3]
    assert tokens == ["a", "\ufffd", "\ufffd", "b"]
    assert choices[-1]["finish_reason"] == "length"


async def test_nothing_is_told_of_tokens_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    items = logprob_items(tokenizer, "abcdef")
    (choice,) = (await told(tokenizer, items, COMPLETIONS, logprobs=0, stop="cd")).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]


async def test_several_answers_are_told_apart(tokenizer: Tokenizer) -> None:
    answered = await told(tokenizer, CALLS, CHAT, tools=TOOLS, stream=True, n=2)
    arguments: dict[tuple[int, int], str] = {}
    for event in answered.events[:-1]:
        (choice,) = event["choices"]
        for call in choice["delta"].get("tool_calls", []):
            key = choice["index"], call["index"]
            arguments[key] = arguments.get(key, "") + call["function"]["arguments"]
    assert arguments == {(index, call): text for index in (0, 1) for call, text in enumerate(('{"a":1}', "{}"))}


async def test_request_says_how_its_answer_is_read_and_the_prompt_shows_the_tools(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t['function']['name'] }};{% endfor %}{{ messages[0]['content'] }}"
    tokenizer = Tokenizer(write_model_folder(tmp_path / "model", chat_template=template))
    scripted = Scripted([Generated((5,), FinishReason.STOP)])
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    await ask(make_front(scripted, tokenizer), CHAT, body)
    (request,) = scripted.requests
    assert tokenizer.decode(list(memoryview(request.token_ids).cast("i"))) == "f;g;Hi"
    assert request.sampling.reading is not None
    assert json.loads(request.sampling.reading.tools) == TOOLS


async def test_answer_that_breaks_off_is_one_error_in_the_stream(tokenizer: Tokenizer) -> None:
    items = [CALLS[0], RichGenerated((), FinishReason.ABORT)]
    answered = await told(tokenizer, items, CHAT, tools=TOOLS, stream=True)
    # The end mark belongs to answers that are whole.
    assert answered.events[-1]["error"]["code"] == "engine_error"


@pytest.mark.parametrize("text", [" a b", "a", "abc"])
def test_texts_of_tokens_make_up_the_text_of_an_answer(tmp_path: Path, text: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    byte_fallback_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    token_ids = tokenizer.encode("x" + text)[2:]
    assert "".join(map(tokenizer.token_text, token_ids)) == text
