"""Reads a chat's answer with vLLM's own parsers: what of its text is reasoning, what is content, what calls tools.

The parsers belong to vLLM's OpenAI server, which nothing else of is used. One reader serves one answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from shared.errors import ConfigError, InvalidRequest
from shared.messages import MessagePart, ToolCallPart
from shared.types import FinishReason, Reading, Sampling, ToolChoice
from worker.engines import vllm_schema
from worker.engines.vllm_sampling import check_schema

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.abstract_parser import Parser
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.tokenizers import TokenizerLike

    from worker.engines.vllm_options import VllmOptions

logger = logging.getLogger(__name__)


def check_parsers(options: VllmOptions) -> None:
    """Raises `ConfigError` for a parser that this vLLM does not have."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for flag, name, known in (
        ("--tool-call-parser", options.tool_call_parser, ToolParserManager.list_registered()),
        ("--reasoning-parser", options.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            raise ConfigError(f"{flag}: vLLM has no parser {name!r}; it has {', '.join(known)}")


class AnswerReaders:
    """Makes the readers of one engine's answers."""

    def __init__(self, options: VllmOptions, model_config: ModelConfig, tokenizer: TokenizerLike) -> None:
        """Raises `ConfigError` where a parser does not go with the model's tokenizer."""
        from vllm.parser import ParserManager

        self._has_tool_parser = bool(options.tool_call_parser)
        self._has_reasoning_parser = bool(options.reasoning_parser)
        self._model_config = model_config
        self._tokenizer = tokenizer
        try:
            self._parser_type: type[Parser] | None = ParserManager.get_parser(
                tool_parser_name=options.tool_call_parser or None,
                reasoning_parser_name=options.reasoning_parser or None,
                enable_auto_tools=self._has_tool_parser,
                model_name=str(options.model_dir),
                is_harmony=model_config.hf_config.model_type == "gpt_oss",
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ConfigError(str(error)) from error

    def reader_of(self, sampling: Sampling, token_ids: list[int]) -> AnswerReader | None:
        """Whoever reads an answer to `token_ids`; `None` where nobody is asked to.

        Raises `InvalidRequest` for tools that no parser here understands, or that vLLM refuses.
        """
        reading = sampling.reading
        if reading is None:
            return None
        if reading.tool_choice is not ToolChoice.NONE and not self._has_tool_parser:
            raise InvalidRequest(
                "'tools' are not supported by this deployment, which runs without --tool-call-parser; "
                "'tool_choice' \"none\" is.",
                param="tools",
            )
        if self._parser_type is None:
            raise InvalidRequest("this worker has no parser to read answers with", param="messages")
        check_schema(sampling)
        try:
            chat = _chat_request(sampling, reading)
            tools: Any = chat.tools
            parser = self._parser_type(self._tokenizer, tools, chat_template_kwargs={}, model_config=self._model_config)
            if self._has_reasoning_parser or reading.tool_choice is not ToolChoice.NONE:
                # What it gives back is the request that it was given, or a copy of it.
                chat = cast("ChatCompletionRequest", parser.adjust_request(chat))
        except InvalidRequest:
            raise
        except Exception as error:
            # Each model's parser looks at schemas in its own way, and raises whatever it trips over in a caller's.
            raise InvalidRequest(f"Invalid 'tools': {_first_fault(error)}", param="tools") from error
        if sampling.json_schema and reading.tool_choice is ToolChoice.AUTO:
            constraint = chat.structured_outputs
            if constraint is None or constraint.structural_tag is None:
                # The schema would hold every answer, so that no tool could be called.
                raise InvalidRequest(
                    "'response_format' together with 'tools' is not supported by this deployment's tool parser.",
                    param="response_format",
                )
        return AnswerReader(parser, chat, reading, token_ids)


class AnswerReader:
    """Reads one answer, piece by piece or once as a whole, as its `Reading` says."""

    def __init__(self, parser: Parser, chat: ChatCompletionRequest, reading: Reading, prompt: list[int]) -> None:
        self._parser = parser
        self._chat = chat
        self._reading = reading
        self._prompt = prompt
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._has_calls = False
        self._is_lost = False
        """Whether the parser has failed: what follows is told as it stands."""
        self.stop: Sequence[str] = reading.stop
        self.skips_special_tokens: bool = chat.skip_special_tokens
        self.structured_outputs: StructuredOutputsParams | None = chat.extract_structured_outputs()

    @property
    def generate_options(self) -> dict[str, Any]:
        """What the engine needs to know to leave reasoning out of a grammar."""
        has_reasoning = self._parser.reasoning_parser is not None
        return {
            "reasoning_ended": self._chat.resolve_reasoning_ended(self._parser, self._prompt),
            "reasoning_parser_kwargs": {"chat_template_kwargs": {}} if has_reasoning else None,
        }

    def read(
        self, text: str, token_ids: Sequence[int], finish: FinishReason | None
    ) -> tuple[tuple[MessagePart, ...], FinishReason | None]:
        """What has become certain with the next piece of text, and how the answer ends where it does. Modifies."""
        if finish is FinishReason.ABORT:
            return (), finish
        if self._reading.is_streamed:
            part = self._next_part(text, token_ids, is_last=finish is not None)
        else:
            self._text.append(text)
            self._token_ids += token_ids
            part = None if finish is None else self._whole("".join(self._text))
        if part is not None and part.tool_calls:
            self._has_calls = True
        if finish is FinishReason.STOP and self._has_calls and not self._reading.tool_name:
            # As at OpenAI: an answer that was told which tool to call ends with `stop`.
            finish = FinishReason.TOOL_CALLS
        return () if part is None else (part,), finish

    def _whole(self, text: str) -> MessagePart:
        try:
            self._parser.set_prompt_token_ids(self._prompt)
            reasoning, content, calls = self._parser.parse(
                text, self._chat, enable_auto_tools=True, model_output_token_ids=self._token_ids
            )
        except Exception as error:
            return self._as_it_stands(text, error)
        if not self._reading.has_parallel_calls:
            calls = (calls or [])[:1]
        return MessagePart(
            content or "",
            reasoning or "",
            tuple(
                [
                    ToolCallPart(index, call.arguments, call.id or _new_call_id(), call.name)
                    for index, call in enumerate(calls or ())
                ]
            ),
        )

    def _next_part(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> MessagePart | None:
        if self._is_lost:
            return MessagePart(text) if text else None
        try:
            found = self._parser.parse_delta(
                text, list(token_ids), self._chat, prompt_token_ids=self._prompt, finished=is_last
            )
        except Exception as error:
            return self._as_it_stands(text, error)
        return None if found is None else self._part_of(found)

    def _part_of(self, found: DeltaMessage) -> MessagePart | None:
        calls = [call for call in found.tool_calls or () if self._reading.has_parallel_calls or call.index == 0]
        parts = []
        for call in calls:
            function = call.function
            parts.append(
                ToolCallPart(
                    call.index,
                    (function and function.arguments) or "",
                    call.id or "",
                    (function and function.name) or "",
                )
            )
        part = MessagePart(found.content or "", found.reasoning or "", tuple(parts))
        return None if part == _NOTHING else part

    def _as_it_stands(self, text: str, error: Exception) -> MessagePart:
        """Text that a parser has failed on is told as content: to compute the answer again would change nothing."""
        self._is_lost = True
        logger.warning("vLLM's parser failed on an answer, which is told unread: %r", error)
        return MessagePart(text)


_NOTHING = MessagePart()


def _chat_request(sampling: Sampling, reading: Reading) -> ChatCompletionRequest:
    """As much of a request as vLLM's parsers look at."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body: dict[str, Any] = {"messages": [], "parallel_tool_calls": reading.has_parallel_calls}
    if reading.tools:
        choice = {"type": "function", "function": {"name": reading.tool_name}}
        is_held = reading.tool_choice is ToolChoice.REQUIRED or bool(sampling.json_schema)
        body["tools"] = [_checked_tool(index, tool, is_held) for index, tool in enumerate(json.loads(reading.tools))]
        body["tool_choice"] = choice if reading.tool_name else reading.tool_choice.value
    if sampling.json_schema:
        schema = json.loads(sampling.json_schema)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return ChatCompletionRequest.model_validate(body)


def _checked_tool(index: int, tool: dict[str, Any], is_held: bool) -> dict[str, Any]:
    """A tool that says whether its arguments are held to their schema.

    They are where the request says so (`strict`). Where it says nothing they are if a grammar is needed anyhow, for a
    call that must come, and if vLLM can hold them to all of it.
    """
    function = tool["function"]
    refusal = vllm_schema.refusal_of(function.get("parameters"))
    if function.get("strict") and refusal is not None:
        param = f"tools[{index}].function.parameters"
        raise InvalidRequest(f"Invalid '{param}': of JSON Schema, where 'strict' is true, {refusal}.", param=param)
    return {**tool, "function": {"strict": is_held and refusal is None, **function}}


def _new_call_id() -> str:
    from vllm.renderers.chat_utils import make_tool_call_id

    call_id: str = make_tool_call_id()
    return call_id


def _first_fault(error: Exception) -> str:
    """The first of pydantic's faults in one line, or an error's own words."""
    faults = getattr(error, "errors", None)
    if faults is None:
        return str(error)
    first = faults(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
