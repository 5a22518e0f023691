"""A chat's tools, the calls of them in its messages, response formats: what is taken, refused, and made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.chat import MAX_TOOLS, MAX_TOOLS_BYTES
from router.openai import Endpoint, ParsedRequest, parse_request
from router.schemas import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, MAX_SCHEMA_VALUES
from shared.errors import InvalidRequest
from shared.types import Reading, Sampling, ToolChoice

MODEL = "m"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "add"}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> ParsedRequest:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    return parse_request(Endpoint.CHAT, body, served_model=MODEL, allow_stream=True)


def refusal(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return str(caught.value), caught.value.param


def format_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "choice", "name", "is_parallel"),
    [
        ({}, ToolChoice.AUTO, "", True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ToolChoice.AUTO, "", False),
        ({"tool_choice": "required"}, ToolChoice.REQUIRED, "", True),
        ({"tool_choice": NAMED}, ToolChoice.REQUIRED, "add", True),
    ],
)
def test_answer_with_tools_is_read_by_the_worker(
    fields: dict[str, Any], choice: ToolChoice, name: str, is_parallel: bool
) -> None:
    parsed = chat(tools=[TOOL, OTHER], stop="x", stream=True, **fields)
    tools = json.dumps([TOOL, OTHER], separators=(",", ":"))
    assert parsed.sampling(1, 100) == Sampling(
        5, reading=Reading(tools, choice, name, is_parallel, is_streamed=True, stop=("x",))
    )


def test_answer_is_read_only_where_there_is_something_to_be_read() -> None:
    assert chat().sampling(1, 100).reading is None
    assert chat(tools=[TOOL], tool_choice="none").sampling(1, 100).reading is None
    assert chat().sampling(1, 100, has_reasoning=True).reading == Reading()
    completion = parse_request(Endpoint.COMPLETIONS, {"model": MODEL, "prompt": "Hi"}, served_model=MODEL)
    assert completion.sampling(1, 100, has_reasoning=True).reading is None


def test_tools_that_must_not_be_called_are_in_the_prompt_all_the_same() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tools == (TOOL,)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": []}, "tools"),
        ({"tools": [function(name=f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function(description="x" * MAX_TOOLS_BYTES)]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{**TOOL, "more": 1}]}, "tools[0].more"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="a" * 65)]}, "tools[0].function.name"),
        ({"tools": [function(description=7)]}, "tools[0].function.description"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(more=1)]}, "tools[0].function.more"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": format_of(SCHEMA)}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    words, named = refusal(**fields)
    assert named == param
    assert param.rpartition(".")[2] in words


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        (format_of({"type": "string", "const": "é"}), '{"type":"string","const":"é"}'),
        (format_of({}, strict=False, description="d"), "{}"),
    ],
)
def test_response_format_becomes_a_schema_for_the_engine(response_format: Any, schema: str) -> None:
    assert chat(response_format=response_format).sampling(1, 100).json_schema == schema
    body = {"model": MODEL, "prompt": "Hi", "response_format": response_format}
    parsed = parse_request(Endpoint.COMPLETIONS, body, served_model=MODEL)
    assert parsed.sampling(1, 100).json_schema == schema


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        (7, "response_format"),
        ({}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "text", "json_schema": {}}, "response_format.json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        (format_of([]), "response_format.json_schema.schema"),
        (format_of({}, strict=1), "response_format.json_schema.strict"),
        (format_of({}, more=1), "response_format.json_schema.more"),
        (format_of({"const": "x" * MAX_SCHEMA_BYTES}), "response_format.json_schema.schema"),
        (format_of({"enum": list(range(MAX_SCHEMA_VALUES))}), "response_format.json_schema.schema"),
        (format_of(nested(MAX_SCHEMA_DEPTH + 2)), "response_format.json_schema.schema"),
        (format_of(nested(50_000)), "response_format.json_schema.schema"),
        (format_of({"const": "\ud800"}), "response_format.json_schema.schema"),
        (format_of({"const": float("nan")}), "response_format.json_schema.schema"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_wrong_response_format_is_refused_by_name(response_format: Any, param: str) -> None:
    assert refusal(response_format=response_format)[1] == param


def test_largest_schemas_are_taken() -> None:
    for schema in (nested(MAX_SCHEMA_DEPTH), {"enum": list(range(MAX_SCHEMA_VALUES - 1))}):
        assert chat(response_format=format_of(schema)).sampling(1, 100).json_schema


@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens"])
def test_nothing_may_follow_what_is_complete(name: str) -> None:
    assert refusal(response_format=format_of(SCHEMA), **{name: name == "ignore_eos" or 2})[1] == name


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_probabilities_are_asked_for_by_a_flag_and_a_number(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).sampling(1, 100).logprobs == logprobs


def test_probabilities_of_completions_are_asked_for_by_a_number() -> None:
    body = {"model": MODEL, "prompt": "Hi", "logprobs": 0}
    assert parse_request(Endpoint.COMPLETIONS, body, served_model=MODEL).sampling(1, 100).logprobs == 0


def test_likeliest_tokens_need_probabilities() -> None:
    assert refusal(top_logprobs=2)[1] == "top_logprobs"
    assert refusal(logprobs=True, top_logprobs=21)[1] == "top_logprobs"


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", **function}}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [('{"city": "Rome"}', {"city": "Rome"}), ("", {}), ("{broken", {}), ("[1]", {}), (None, {})],
)
def test_calls_that_were_made_come_to_the_template_as_objects(written: Any, arguments: Any) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments=written)], "reasoning": "hm"},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert chat(messages=messages).messages == (
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(arguments=arguments)],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [call()] * 129}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call(arguments={})]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(more=1)]}, "messages[0].tool_calls[0].function.more"),
        ({"role": "user", "content": "a", "reasoning": "x"}, "messages[0].reasoning"),
        ({"role": "assistant", "content": "a", "reasoning": 7}, "messages[0].reasoning"),
        ({"role": "assistant", "content": "a", "function_call": {}}, "messages[0].function_call"),
    ],
)
def test_wrong_messages_of_assistants_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    assert refusal(messages=[message])[1] == param
