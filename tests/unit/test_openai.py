"""OpenAI bodies: what is taken, what is refused and under which name, and what is answered."""

from __future__ import annotations

from typing import Any

import pytest

from router.failures import error_body, status_of
from router.openai import Endpoint, ParsedRequest, Usage, completion_body, parse_request
from router.told import Whole
from shared.errors import (
    AttemptsExhausted,
    AuthenticationFailed,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    Overloaded,
    StreamBroken,
    WorkerLost,
)
from shared.types import FinishReason, Sampling

MODEL = "m"
TEXT_PART = {"type": "text", "text": "a"}


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_request(Endpoint.CHAT, body, served_model=MODEL)


def completion(**fields: Any) -> ParsedRequest:
    return parse_request(Endpoint.COMPLETIONS, {"model": MODEL, "prompt": "Hi", **fields}, served_model=MODEL)


def refusal(endpoint: Endpoint, body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(endpoint, body, served_model=MODEL)
    return caught.value


def test_chat_request_with_every_supported_field() -> None:
    parsed = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "kim"},
            {"role": "assistant", "content": "ok", "refusal": None},
            {"role": "tool", "content": "4", "tool_call_id": "t1"},
        ],
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        n=1,
        stop=["x", "y"],
        seed=-3,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4, 5],
        user="u",
        cache_salt="tenant",
        priority=-1,
        metadata={"a": "b"},
        store=False,
        stream=False,
        logprobs=False,
        response_format={"type": "text"},
        tools=None,
    )
    assert parsed == ParsedRequest(
        endpoint=Endpoint.CHAT,
        model=MODEL,
        messages=(
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "a\nb", "name": "kim"},
            {"role": "assistant", "content": "ok"},
            {"role": "tool", "content": "4", "tool_call_id": "t1"},
        ),
        prompts=(),
        max_tokens=5,
        sampling_options={
            "temperature": 0.0,
            "top_p": 0.5,
            "top_k": 0,
            "min_p": 0.1,
            "seed": -3,
            "presence_penalty": -2.0,
            "frequency_penalty": 2.0,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": (4, 5),
        },
        stop=("x", "y"),
        cache_salt="tenant",
        user="u",
        priority=-1,
    )
    assert parsed.sampling(10, 100) == Sampling(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        seed=-3,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(4, 5),
    )


def test_prompt_of_text_and_prompt_of_token_ids() -> None:
    assert (completion().prompt, completion(prompt=[1, 2]).prompt) == ("Hi", (1, 2))


def test_one_stop_string_needs_no_array() -> None:
    assert completion(stop="END").stop == ("END",)


def test_top_p_of_zero_takes_the_likeliest_token() -> None:
    assert completion(top_p=0).sampling_options == {"top_p": 1.0, "top_k": 1}


def test_equal_max_tokens_under_both_names_are_no_conflict() -> None:
    assert chat(max_tokens=7, max_completion_tokens=7).max_tokens == 7


def test_missing_max_tokens_is_what_the_context_leaves() -> None:
    assert chat().sampling(90, 100) == Sampling(max_tokens=10)


def test_request_that_fills_the_context_fits() -> None:
    assert chat(max_tokens=10).sampling(90, 100).max_tokens == 10


@pytest.mark.parametrize(
    ("parsed", "num_prompt_tokens", "message", "param"),
    [
        (
            chat(max_tokens=11),
            90,
            "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
            "(90 in the messages, 11 in the completion). Please reduce the length of the messages or completion.",
            "messages",
        ),
        (
            completion(max_tokens=11),
            90,
            "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
            "(90 in the prompt, 11 in the completion). Please reduce the length of the prompt or completion.",
            "prompt",
        ),
        (
            chat(),
            100,
            "This model's maximum context length is 100 tokens. However, your messages resulted in 100 tokens. "
            "Please reduce the length of the messages.",
            "messages",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    parsed: ParsedRequest, num_prompt_tokens: int, message: str, param: str
) -> None:
    with pytest.raises(ContextTooLong) as caught:
        parsed.sampling(num_prompt_tokens, 100)
    assert (str(caught.value), caught.value.param) == (message, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [TEXT_PART | {"x": 1}]}]}, "messages[0].content[0].x"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 1.0}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"user": 5}, "user"),
        ({"cache_salt": "s" * 513}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"metadata": "x"}, "metadata"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"stream": True}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"store": True}, "store"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prompt": "Hi"}, "prompt"),
        ({"temprature": 1}, "temprature"),
    ],
)  # fmt: skip
def test_chat_refusal_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    error = refusal(Endpoint.CHAT, body)
    assert error.param == param
    assert param in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 1 << 31]}, "prompt[1]"),
        ({"prompt": [1, 2.0]}, "prompt[1]"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": []}, "tools"),
        ({"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_completion_refusal_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    error = refusal(Endpoint.COMPLETIONS, {"model": MODEL, "prompt": "Hi", **fields})
    assert error.param == param
    assert param in str(error)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"x" * 100_000: 1}, "x" * 61 + "..."),
        ({"messages": [{"role": "user", "content": "", "x" * 100_000: 1}]}, "messages[0]." + "x" * 61 + "..."),
    ],
)
def test_name_of_an_unknown_field_is_quoted_cut_short(body: dict[str, Any], param: str) -> None:
    error = refusal(Endpoint.CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **body})
    assert error.param == param
    assert len(str(error)) < 200


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_body_that_is_no_object_is_refused(body: Any) -> None:
    assert "must be an object" in str(refusal(Endpoint.CHAT, body))


def test_other_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        chat(model="other")
    assert (status_of(caught.value), error_body(caught.value)) == (
        404,
        {
            "error": {
                "message": "The model 'other' does not exist; this is 'm'.",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        },
    )


def test_stream_is_taken_where_the_front_end_streams() -> None:
    body = {"model": MODEL, "prompt": "Hi", "stream": True}
    assert parse_request(Endpoint.COMPLETIONS, body, served_model=MODEL, allow_stream=True).prompt == "Hi"


def test_golden_chat_completion() -> None:
    assert completion_body(
        Endpoint.CHAT,
        response_id="chatcmpl-1",
        model=MODEL,
        created=1700000000,
        answers=[Whole("Hello", FinishReason.STOP)],
        usage=Usage(prompt_tokens=20, completion_tokens=3, cached_tokens=16),
    ) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 3,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


def test_golden_text_completion() -> None:
    assert completion_body(
        Endpoint.COMPLETIONS,
        response_id="cmpl-1",
        model=MODEL,
        created=1700000000,
        answers=[Whole("Hello", FinishReason.LENGTH)],
        usage=Usage(prompt_tokens=20, completion_tokens=3, cached_tokens=0),
    ) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 3,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_bodies_pass_the_openai_clients_own_models() -> None:
    openai_types = pytest.importorskip("openai.types")
    chat_types = pytest.importorskip("openai.types.chat")
    common = {"model": MODEL, "created": 1, "answers": [Whole("x", FinishReason.STOP)], "usage": Usage(2, 1, 0)}
    chat_body = completion_body(Endpoint.CHAT, response_id="a", **common)  # type: ignore[arg-type]
    text_body = completion_body(Endpoint.COMPLETIONS, response_id="b", **common)  # type: ignore[arg-type]
    assert chat_types.ChatCompletion.model_validate(chat_body, strict=True).choices[0].message.content == "x"
    assert openai_types.Completion.model_validate(text_body, strict=True).choices[0].text == "x"


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("no"), 400, "invalid_request_error", "invalid_value"),
        (ContextTooLong("no"), 400, "invalid_request_error", "context_length_exceeded"),
        (ModelNotFound("no"), 404, "invalid_request_error", "model_not_found"),
        (Overloaded("no"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (NoWorker("no"), 503, "server_error", "service_unavailable"),
        (WorkerLost("no"), 503, "server_error", "worker_lost"),
        (StreamBroken("no"), 503, "server_error", "stream_broken"),
        (AttemptsExhausted("no"), 503, "server_error", "attempts_exhausted"),
        (DeadlineExceeded("no"), 504, "server_error", "deadline_exceeded"),
        (EngineError("no"), 500, "server_error", "engine_error"),
        (AuthenticationFailed("no"), 500, "server_error", "authentication_failed"),
    ],
)
def test_status_and_body_of_errors(error: Exception, status: int, kind: str, code: str) -> None:
    assert status_of(error) == status
    assert error_body(error) == {"error": {"message": "no", "type": kind, "param": None, "code": code}}


def test_unexpected_errors_tell_nothing() -> None:
    assert (status_of(RuntimeError("secret")), error_body(RuntimeError("secret"))) == (
        500,
        {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}},
    )
