"""What a real vLLM engine holds its answers to and tells of them; what it cannot do ends one request alone."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from router.told import Message
from shared.errors import ConfigError, InvalidRequest
from shared.messages import MessagePart, TokenLogprobs
from shared.types import FinishReason, Reading, Sampling, ToolChoice
from tests.contracts.test_engine import prompt
from tests.support.engines import EngineUnderTest, start_vllm
from worker.engines.base import EngineRequest, RichEngineDelta

DRAWN: dict[str, Any] = {"temperature": 2.0, "seed": 5}
"""For answers that a grammar alone gives a form: the likeliest tokens of a random model may be blanks for ever."""

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"enum": ["Paris", "Rome"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@dataclass
class Told:
    """All that one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    parts: list[MessagePart] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def message(self) -> Message:
        return Message.of(self.parts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineUnderTest]:
    grammars = {"structured_outputs_config": {"disable_any_whitespace": True}}
    engine = await start_vllm(tmp_path_factory.mktemp("cache"), tool_call_parser="hermes", engine_args=grammars)
    yield engine
    await engine.engine.close()
    assert engine.deaths == []


async def ask(engine: EngineUnderTest, sampling: Sampling, token_ids: list[int] | None = None) -> Told:
    engine.num_requests += 1
    told = Told()
    request = EngineRequest(f"told-{engine.num_requests}", token_ids or prompt(7, 40), sampling)  # type: ignore[arg-type]
    async for delta in engine.engine.generate(request):
        told.token_ids += delta.token_ids
        told.finish = delta.finish
        if isinstance(delta, RichEngineDelta):
            told.logprobs += delta.logprobs
            told.parts += delta.parts
    assert engine.engine.stats().num_running == 0
    return told


def text_of(engine: EngineUnderTest, token_ids: list[int]) -> str:
    text: str = engine.engine._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0}])
async def test_answer_has_the_form_that_is_asked_for(engine: EngineUnderTest, how: dict[str, Any]) -> None:
    told = await ask(engine, Sampling(400, json_schema=json.dumps(PERSON), **how))
    found = json.loads(text_of(engine, told.token_ids))
    assert set(found) == {"name", "age"}
    assert 1 <= len(found["name"]) <= 8
    assert found["age"] in range(100)
    assert told.finish is FinishReason.STOP
    assert told.parts == []


async def test_requests_of_all_kinds_run_side_by_side_on_one_engine(engine: EngineUnderTest) -> None:
    plain = await ask(engine, Sampling(12, temperature=0.0))
    for schema in ({"enum": ["a", "b"]}, {"type": "boolean"}, {"type": "array", "items": CITY, "maxItems": 2}):
        told = await ask(engine, Sampling(64, temperature=0.0, json_schema=json.dumps(schema)))
        json.loads(text_of(engine, told.token_ids))
    assert await ask(engine, Sampling(12, temperature=0.0)) == plain


@pytest.mark.parametrize("num_top", [0, 3])
async def test_each_token_comes_with_its_probability(engine: EngineUnderTest, num_top: int) -> None:
    plain = await ask(engine, Sampling(6, temperature=0.0))
    told = await ask(engine, Sampling(6, temperature=0.0, logprobs=num_top))
    assert told.token_ids == plain.token_ids
    assert len(told.logprobs) == 6
    for token_id, found in zip(told.token_ids, told.logprobs, strict=True):
        assert (len(found.top_token_ids), len(found.top_logprobs)) == (num_top, num_top)
        assert list(found.top_logprobs) == sorted(found.top_logprobs, reverse=True)
        assert sum(map(math.exp, found.top_logprobs)) <= 1.0 + 1e-3
        if num_top:
            # A greedy answer takes the likeliest.
            assert (found.top_token_ids[0], found.top_logprobs[0]) == (token_id, found.logprob)


async def test_token_that_is_drawn_is_not_told_among_likelier_ones(engine: EngineUnderTest) -> None:
    told = await ask(engine, Sampling(24, temperature=2.0, seed=3, logprobs=1))
    drawn = [
        one for token_id, one in zip(told.token_ids, told.logprobs, strict=True) if token_id not in one.top_token_ids
    ]
    assert drawn
    assert all(one.logprob <= one.top_logprobs[0] for one in drawn)


@pytest.mark.parametrize("name", ["", "weather"])
async def test_call_that_must_come_comes_streamed_as_whole(engine: EngineUnderTest, name: str) -> None:
    messages = []
    for is_streamed in (False, True):
        reading = Reading(json.dumps(TOOLS), ToolChoice.REQUIRED, name, is_streamed=is_streamed)
        told = await ask(engine, Sampling(900, **DRAWN, reading=reading))
        assert told.finish is (FinishReason.STOP if name else FinishReason.TOOL_CALLS)
        assert all(call.id for call in told.message.tool_calls)
        assert (len(told.parts) > 1) == is_streamed
        messages.append([(call.name, json.loads(call.arguments)) for call in told.message.tool_calls])
    assert messages[0] == messages[1]
    for called, arguments in messages[0]:
        assert called == "now" or arguments["city"] in CITY["enum"]
        assert not name or called == name


async def test_text_of_a_model_that_calls_nothing_is_its_content(engine: EngineUnderTest) -> None:
    plain = await ask(engine, Sampling(24, temperature=0.0))
    for is_streamed in (False, True):
        reading = Reading(json.dumps(TOOLS), ToolChoice.AUTO, is_streamed=is_streamed)
        told = await ask(engine, Sampling(24, temperature=0.0, reading=reading))
        assert (told.token_ids, told.finish) == (plain.token_ids, FinishReason.LENGTH)
        assert told.message.content
        assert told.message.tool_calls == ()


async def test_stop_string_ends_an_answer_that_is_read(engine: EngineUnderTest) -> None:
    reading = Reading(json.dumps(TOOLS), ToolChoice.REQUIRED, "now", stop=("argu",))
    told = await ask(engine, Sampling(400, **DRAWN, reading=reading))
    assert told.finish is FinishReason.STOP
    assert "arguments" not in told.message.content


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(8, json_schema='{"type":"banana"}'), "response_format"),
        (Sampling(8, json_schema='{"$ref":"#/nope"}'), "response_format"),
        (Sampling(8, json_schema='{"type":"string","pattern":"(("}'), "response_format"),
        (Sampling(8, json_schema='{"type":"integer","multipleOf":3}'), "response_format"),
        (Sampling(8, json_schema='{"type":"integer","minimum":5,"maximum":4}'), "response_format"),
        (Sampling(8, json_schema='{"type":"integer","not":{"const":3}}'), "response_format"),
        (Sampling(8, json_schema="{"), "response_format"),
        (Sampling(8, logprobs=50), "logprobs"),
        (
            Sampling(
                8,
                reading=Reading(
                    json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}]),
                    ToolChoice.REQUIRED,
                ),
            ),
            "tools",
        ),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_by_name_and_harms_nobody(
    engine: EngineUnderTest, sampling: Sampling, param: str
) -> None:
    plain = await ask(engine, Sampling(4, temperature=0.0))
    with pytest.raises(InvalidRequest) as caught:
        await ask(engine, sampling)
    assert caught.value.param == param
    assert await ask(engine, Sampling(4, temperature=0.0)) == plain


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"},
        {"type": "string", "maxLength": 1_000_000},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 100_000},
        {"enum": [f"v{number}" for number in range(4900)]},
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1600)}},
    ],
    ids=["pattern", "maxLength", "maxItems", "enum", "properties"],
)
async def test_hard_schema_costs_time_and_ends_nobody(engine: EngineUnderTest, schema: Any) -> None:
    plain = await ask(engine, Sampling(4, temperature=0.0))
    told = await ask(engine, Sampling(8, temperature=0.0, json_schema=json.dumps(schema)))
    assert told.token_ids
    assert await ask(engine, Sampling(4, temperature=0.0)) == plain


async def test_parser_that_vllm_does_not_have_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser: vLLM has no parser 'nobody'; it has .*hermes"):
        await start_vllm(tmp_path, tool_call_parser="nobody")
