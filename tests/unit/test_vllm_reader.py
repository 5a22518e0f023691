"""vLLM's parsers on texts that models might write: no engine is needed for these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError, InvalidRequest
from shared.messages import MessagePart
from shared.types import CacheScheme, FinishReason, Reading, Sampling, ToolChoice
from tests.support.tokenizers import write_model_folder

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from router.told import Message
from worker.engines.vllm_options import VllmOptions
from worker.engines.vllm_reader import AnswerReader, AnswerReaders, check_parsers

pytestmark = pytest.mark.vllm

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "add"}},
]
BROKEN_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}
"""With a schema that some of vLLM's parsers trip over."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SECOND_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


class _ModelConfig:
    """As much of vLLM's as its parsers look at."""

    class hf_config:
        model_type = "llama"

    hf_text_config = hf_config
    model = "tiny"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(write_model_folder(tmp_path_factory.mktemp("model")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


def readers_of(tokenizer: Any, tool_call_parser: str = "hermes", reasoning_parser: str = "") -> AnswerReaders:
    options = VllmOptions(
        Path("tiny"), CacheScheme("tiny", 32), tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
    )
    check_parsers(options)
    return AnswerReaders(options, _ModelConfig(), tokenizer)  # type: ignore[arg-type]


def reading(choice: ToolChoice = ToolChoice.AUTO, tools: Any = TOOLS, **more: Any) -> Reading:
    return Reading(json.dumps(tools) if tools else "", choice, **more)


def reader(readers: AnswerReaders, sampling: Sampling) -> AnswerReader:
    found = readers.reader_of(sampling, [1, 5])
    assert found is not None
    return found


def read(
    tokenizer: Any, readers: AnswerReaders, wanted: Reading, text: str, finish: FinishReason = FinishReason.STOP
) -> tuple[Message, FinishReason | None, int]:
    """The message that comes of a text, its end, and in how many parts it came; one token after the other."""
    answer = reader(readers, Sampling(64, reading=wanted))
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts: list[MessagePart] = []
    told, end = "", None
    for number, token_id in enumerate(ids):
        whole = tokenizer.decode(ids[: number + 1], skip_special_tokens=False)
        piece, told = ("", told) if whole.endswith("\ufffd") else (whole[len(told) :], whole)
        found, end = answer.read(piece, [token_id], finish if number == len(ids) - 1 else None)
        parts += found
    return Message.of(parts), end, len(parts)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_are_told_with_their_arguments(tokenizer: Any, is_streamed: bool) -> None:
    wanted = reading(is_streamed=is_streamed)
    message, finish, num_parts = read(tokenizer, readers_of(tokenizer), wanted, f"Let me see. {CALL}{SECOND_CALL}")
    assert message.content.strip() == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("add", {"a": [1, 2]}),
    ]
    assert len({call.id for call in message.tool_calls if call.id}) == 2
    assert finish is FinishReason.TOOL_CALLS
    assert (num_parts > 5) == is_streamed


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_without_a_call_is_content(tokenizer: Any, is_streamed: bool) -> None:
    wanted = reading(is_streamed=is_streamed)
    found = read(tokenizer, readers_of(tokenizer), wanted, "No <tool is needed.")
    assert found[:2] == (Message("No <tool is needed.", "", ()), FinishReason.STOP)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_call_is_told_where_one_is_asked_for(tokenizer: Any, is_streamed: bool) -> None:
    wanted = reading(is_streamed=is_streamed, has_parallel_calls=False)
    message, finish, _ = read(tokenizer, readers_of(tokenizer), wanted, CALL + SECOND_CALL)
    assert ([call.name for call in message.tool_calls], finish) == (["weather"], FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_call_of_the_tool_that_was_named_ends_with_stop(tokenizer: Any, is_streamed: bool) -> None:
    wanted = reading(ToolChoice.REQUIRED, tool_name="weather", is_streamed=is_streamed)
    message, finish, _ = read(tokenizer, readers_of(tokenizer), wanted, CALL.replace("\n", ""))
    assert ([call.name for call in message.tool_calls], finish) == (["weather"], FinishReason.STOP)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answer_that_is_cut_says_so(tokenizer: Any, is_streamed: bool) -> None:
    wanted = reading(is_streamed=is_streamed)
    _, finish, _ = read(tokenizer, readers_of(tokenizer), wanted, CALL[:-20], FinishReason.LENGTH)
    assert finish is FinishReason.LENGTH


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_is_told_from_content(tokenizer: Any, is_streamed: bool) -> None:
    readers = readers_of(tokenizer, "", "deepseek_r1")
    wanted = reading(ToolChoice.NONE, None, is_streamed=is_streamed)
    message, finish, _ = read(tokenizer, readers, wanted, "<think>Hm, 2 + 2.</think>It is 4.")
    assert (message, finish) == (Message("It is 4.", "Hm, 2 + 2.", ()), FinishReason.STOP)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_come_after_reasoning(tokenizer: Any, is_streamed: bool) -> None:
    readers = readers_of(tokenizer, "hermes", "deepseek_r1")
    message, finish, _ = read(tokenizer, readers, reading(is_streamed=is_streamed), f"<think>Hm.</think>{CALL}")
    assert (message.reasoning, message.content.strip()) == ("Hm.", "")
    assert [call.name for call in message.tool_calls] == ["weather"]
    assert finish is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_that_a_parser_fails_on_is_told_as_it_stands(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot")

    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", fail)
    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls_streaming", fail)
    message, finish, _ = read(tokenizer, readers_of(tokenizer), reading(is_streamed=is_streamed), CALL)
    assert (message, finish) == (Message(CALL, "", ()), FinishReason.STOP)
    assert len([record for record in caplog.records if "parser failed" in record.message]) == 1


def test_arguments_of_a_call_that_must_come_are_held_to_their_schema(tokenizer: Any) -> None:
    wanted = Sampling(64, reading=reading(ToolChoice.REQUIRED, tool_name="weather"))
    constraint = reader(readers_of(tokenizer), wanted).structured_outputs
    assert constraint is not None
    assert '"city"' in str(constraint.structural_tag)


def test_schema_and_tools_together_leave_the_model_the_choice(tokenizer: Any) -> None:
    wanted = Sampling(64, json_schema=SCHEMA, reading=reading())
    constraint = reader(readers_of(tokenizer), wanted).structured_outputs
    assert constraint is not None
    assert '"city"' in str(constraint.structural_tag)
    assert '"a"' in str(constraint.structural_tag)


@pytest.mark.parametrize(
    ("parsers", "sampling", "param"),
    [
        (("", "deepseek_r1"), Sampling(1, reading=reading()), "tools"),
        (("", ""), Sampling(1, reading=reading()), "tools"),
        (("", ""), Sampling(1, reading=reading(ToolChoice.NONE, None)), "messages"),
        (("hermes", ""), Sampling(1, reading=reading(tools=[{"type": "function", "function": {"name": 7}}])), "tools"),
        (("glm45", ""), Sampling(1, reading=reading(tools=[BROKEN_TOOL])), "tools"),
        (("hermes", ""), Sampling(1, reading=reading(), json_schema='{"not":{}}'), "response_format"),
        (
            ("hermes", ""),
            Sampling(
                1,
                reading=reading(
                    tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
                ),
            ),
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tokenizer: Any, parsers: tuple[str, str], sampling: Sampling, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        readers_of(tokenizer, *parsers).reader_of(sampling, [1])
    assert caught.value.param == param


def test_nobody_reads_an_answer_of_which_tokens_are_asked_for(tokenizer: Any) -> None:
    assert readers_of(tokenizer).reader_of(Sampling(1, logprobs=2), [1]) is None


@pytest.mark.parametrize(
    ("parsers", "words"),
    [
        (("hermess", ""), "--tool-call-parser: vLLM has no parser 'hermess'; it has .*hermes"),
        (("", "r1"), "--reasoning-parser: vLLM has no parser 'r1'; it has .*deepseek_r1"),
        (("", "deepseek_r1"), "--reasoning-parser deepseek_r1 cannot be used with the tokenizer"),
    ],
)
def test_parser_that_is_not_there_or_does_not_fit_ends_the_start(
    tmp_path: Path, parsers: tuple[str, str], words: str
) -> None:
    bare = AutoTokenizer.from_pretrained(write_model_folder(tmp_path / "model"))
    with pytest.raises(ConfigError, match=words):
        readers_of(bare, *parsers)
