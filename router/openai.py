"""OpenAI's request and response bodies: parsed and checked on the way in, built on the way out.

What is not supported is refused by the name of its field and never done by half. Knows nothing of tokens' text, HTTP
or files; a chat's messages and tools are `router.chat`'s business, streamed answers that of `router.chunks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router import chat, fields
from router.schemas import as_json, response_format
from router.told import Whole, message_body, tokens_body
from shared.errors import ContextTooLong, InvalidRequest, ModelNotFound
from shared.types import Reading, Sampling, ToolChoice

MAX_CHOICES = 128
"""Most answers to one prompt, as at OpenAI."""
MAX_SEQUENCES = 1024
"""Most answers to all prompts of one request."""
MAX_REPETITION_PENALTY = 10.0
"""Far over what still gives text; engines name no bound of their own."""
MAX_TOP_LOGPROBS = 20
"""As in vLLM, and at OpenAI for chats."""


class Endpoint(StrEnum):
    """The routes whose bodies are understood."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One checked request. It has either `messages` or `prompts`."""

    endpoint: Endpoint
    model: str
    messages: tuple[Mapping[str, Any], ...] | None
    """Content of each is one string; text parts are joined by newlines, as vLLM does for plain templates."""
    prompts: tuple[str | tuple[int, ...], ...]
    """Empty where there are messages; never more than one unless several were allowed."""
    max_tokens: int | None
    """`None`: as many as the context leaves."""
    sampling_options: Mapping[str, Any]
    """Fields of `Sampling` but for `max_tokens`."""
    stop: tuple[str, ...]
    cache_salt: str
    user: str | None
    priority: int
    deadline_s: float | None = None
    """Time until the answer must be whole; `None`: any."""
    num_choices: int = 1
    """Answers to each prompt."""
    is_streamed: bool = False
    wants_usage: bool = False
    """Whether a streamed answer ends with its token counts."""
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice.NONE
    tool_name: str = ""
    """The one tool to be called, where a tool is `REQUIRED`; empty for any."""
    has_parallel_calls: bool = True

    @property
    def prompt(self) -> str | tuple[int, ...] | None:
        """The only prompt of a request that has no messages."""
        return self.prompts[0] if self.prompts else None

    def sampling(self, num_prompt_tokens: int, max_model_len_tokens: int, *, has_reasoning: bool = False) -> Sampling:
        """How to sample after a prompt of this length; `has_reasoning`: whether workers tell reasoning from content.

        Raises:
            ContextTooLong: prompt and answer do not fit, in OpenAI's words.
        """
        limit = f"This model's maximum context length is {max_model_len_tokens} tokens."
        is_chat = self.endpoint is Endpoint.CHAT
        subject, param = ("messages", "messages") if is_chat else ("prompt", "prompt")
        num_left = max_model_len_tokens - num_prompt_tokens
        if num_left < 1:
            raise ContextTooLong(
                f"{limit} However, your {subject} resulted in {num_prompt_tokens} tokens. "
                f"Please reduce the length of the {subject}.",
                param=param,
            )
        max_tokens = num_left if self.max_tokens is None else self.max_tokens
        if max_tokens > num_left:
            raise ContextTooLong(
                f"{limit} However, you requested {num_prompt_tokens + max_tokens} tokens "
                f"({num_prompt_tokens} in the {subject}, {max_tokens} in the completion). "
                f"Please reduce the length of the {subject} or completion.",
                param=param,
            )
        return Sampling(max_tokens=max_tokens, **self.sampling_options, reading=self._reading(has_reasoning))

    def _reading(self, has_reasoning: bool) -> Reading | None:
        """How a worker is to read the answer; `None` where its text is all there is."""
        if self.endpoint is not Endpoint.CHAT or (self.tool_choice is ToolChoice.NONE and not has_reasoning):
            return None
        return Reading(
            tools=as_json(self.tools, "tools") if self.tools else "",
            tool_choice=self.tool_choice,
            tool_name=self.tool_name,
            has_parallel_calls=self.has_parallel_calls,
            is_streamed=self.is_streamed,
            stop=self.stop,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer. `cached_tokens` is the engine's own count, `None` where it does not tell."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def as_body(self) -> dict[str, Any]:
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is None:
            return counts
        return {**counts, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


def parse_request(
    endpoint: Endpoint, body: Any, *, served_model: str, allow_stream: bool = False, allow_several: bool = False
) -> ParsedRequest:
    """Check a request's body. Several answers are those to several prompts, and with `n` to each of them.

    Raises:
        InvalidRequest: a field is missing, wrong, unknown or not supported; `param` is its name.
        ModelNotFound: it asks for another model.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(f"the request body must be an object, not {fields.kind_of(body)}")
    # An explicit null is the same as leaving a field out.
    given = {name: value for name, value in body.items() if value is not None}
    model = fields.label(fields.required(given, "model"), "model")
    if model != served_model:
        raise ModelNotFound(f"The model '{model}' does not exist; this is '{served_model}'.", param="model")
    own_field = "messages" if endpoint is Endpoint.CHAT else "prompt"
    _refuse_unsupported(endpoint, given, own_field, allow_stream=allow_stream, allow_several=allow_several)
    checks = _CHECKS[endpoint]
    values = {name: checks[name](value, name) for name, value in given.items() if name in checks}
    subject = fields.required(given, own_field)
    is_streamed = values.get("stream", False)
    if "stream_options" in values and not is_streamed:
        raise InvalidRequest("'stream_options' is only allowed where 'stream' is true.", param="stream_options")
    parsed = ParsedRequest(
        endpoint=endpoint,
        model=model,
        messages=chat.messages(subject) if endpoint is Endpoint.CHAT else None,
        prompts=_prompts(subject, allow_several=allow_several) if endpoint is Endpoint.COMPLETIONS else (),
        max_tokens=_max_tokens(endpoint, values),
        sampling_options=_sampling_options(endpoint, values),
        stop=values.get("stop", ()),
        cache_salt=values.get("cache_salt", ""),
        user=values.get("user"),
        priority=values.get("priority", 0),
        deadline_s=values.get("deadline_s"),
        num_choices=values.get("n", 1),
        is_streamed=is_streamed,
        wants_usage=values.get("stream_options", False),
        **_tool_options(values),
    )
    if len(parsed.prompts) * parsed.num_choices > MAX_SEQUENCES:
        raise InvalidRequest(
            f"Invalid 'n': {parsed.num_choices} answers to each of {len(parsed.prompts)} prompts are over the limit of "
            f"{MAX_SEQUENCES} answers.",
            param="n",
        )
    min_tokens = parsed.sampling_options.get("min_tokens", 0)
    if parsed.max_tokens is not None and min_tokens > parsed.max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) is over max_tokens ({parsed.max_tokens})", param="min_tokens")
    _check_grammar(parsed)
    return parsed


def completion_body(
    endpoint: Endpoint,
    *,
    response_id: str,
    model: str,
    created: int,
    answers: Sequence[Whole],
    usage: Usage,
) -> dict[str, Any]:
    """Body of a `chat.completion` or `text_completion` object. `created` is in Unix seconds."""
    is_chat = endpoint is Endpoint.CHAT
    choices = [
        {
            "index": index,
            **({"message": message_body(answer)} if is_chat else {"text": answer.text}),
            "logprobs": None if answer.logprobs is None else tokens_body(answer.logprobs, is_chat=is_chat),
            "finish_reason": answer.finish.value,
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "id": response_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage.as_body(),
    }


# Ranges are those of OpenAI's reference where it has the field, else vLLM's (`SamplingParams`).
_MAX_DEADLINE_S = 1e9
"""As good as none."""
DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, where a request names no number."""
_SAMPLING_CHECKS: Mapping[str, fields.Check] = {
    "temperature": fields.number(0, 2),
    "top_p": fields.number(0, 1),
    "top_k": fields.integer(-1, (1 << 31) - 1),
    "min_p": fields.number(0, 1),
    "seed": fields.integer(-(1 << 63)),
    "presence_penalty": fields.number(-2, 2),
    "frequency_penalty": fields.number(-2, 2),
    "repetition_penalty": fields.number(0, MAX_REPETITION_PENALTY, is_low_open=True),
    "min_tokens": fields.integer(0),
    "ignore_eos": fields.flag,
    "stop_token_ids": fields.stop_token_ids,
}
_COMMON_CHECKS: Mapping[str, fields.Check] = {
    **_SAMPLING_CHECKS,
    "max_tokens": fields.integer(1),
    "stop": fields.stop_strings,
    "response_format": response_format,
    "cache_salt": fields.label,
    "user": fields.label,
    "priority": fields.integer(-(1 << 31), (1 << 31) - 1),
    "deadline_s": fields.number(0, _MAX_DEADLINE_S, is_low_open=True),
    "metadata": fields.mapping,
    "n": fields.integer(1, MAX_CHOICES),
    "stream": fields.flag,
    "stream_options": fields.stream_options,
}
_CHECKS: Mapping[Endpoint, Mapping[str, fields.Check]] = {
    Endpoint.CHAT: {
        **_COMMON_CHECKS,
        "max_completion_tokens": fields.integer(1),
        "logprobs": fields.flag,
        "top_logprobs": fields.integer(0, MAX_TOP_LOGPROBS),
        "tools": chat.tools,
        "tool_choice": chat.tool_choice,
        "parallel_tool_calls": fields.flag,
    },
    Endpoint.COMPLETIONS: {**_COMMON_CHECKS, "logprobs": fields.integer(0, MAX_TOP_LOGPROBS)},
}
# Fields that are known and not supported, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": (),
    "suffix": (),
    "verbosity": (),
    "web_search_options": (),
}


def _refuse_unsupported(
    endpoint: Endpoint, given: Mapping[str, Any], own_field: str, *, allow_stream: bool, allow_several: bool
) -> None:
    """Raise for the first field that is unknown or asks for what is not done."""
    checks = _CHECKS[endpoint]
    for name, value in given.items():
        is_refused = (name == "n" and not allow_several) or (name == "stream_options" and not allow_stream)
        if name in ("model", own_field) or (name in checks and not is_refused):
            if name == "stream" and fields.flag(value, name) and not allow_stream:
                raise InvalidRequest("'stream' is not supported in a batch.", param=name)
        elif name not in _UNSUPPORTED:
            unknown = fields.brief_name(name)
            raise InvalidRequest(f"Unrecognized request argument supplied: {unknown}", param=unknown)
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _UNSUPPORTED[name]):
            choices = " or ".join(repr(neutral) for neutral in _UNSUPPORTED[name])
            only = f" (only {choices} is)" if choices else ""
            raise InvalidRequest(f"'{name}' is not supported{only}.", param=name)


def _max_tokens(endpoint: Endpoint, values: Mapping[str, Any]) -> int | None:
    """Longest answer; `None` for what the context leaves. The endpoints differ in it, at OpenAI as in vLLM."""
    found = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(found) > 1:
        raise InvalidRequest("'max_tokens' and 'max_completion_tokens' differ; give one.", param="max_tokens")
    if found:
        return int(found.pop())
    return DEFAULT_COMPLETION_TOKENS if endpoint is Endpoint.COMPLETIONS else None


def _sampling_options(endpoint: Endpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in values.items() if name in _SAMPLING_CHECKS}
    logprobs = values.get("logprobs")
    if endpoint is Endpoint.COMPLETIONS:
        options |= {} if logprobs is None else {"logprobs": logprobs}
    elif logprobs:
        options["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise InvalidRequest("'top_logprobs' is only allowed where 'logprobs' is true.", param="top_logprobs")
    if json_schema := values.get("response_format"):
        options["json_schema"] = json_schema
    if options.get("top_k") == -1:
        options["top_k"] = 0  # vLLM's older word for no limit
    if options.get("top_p") == 0.0:
        # The smallest set of tokens with a mass over zero is the likeliest token; engines refuse the zero itself.
        options |= {"top_p": 1.0, "top_k": 1}
    return options


def _prompts(value: Any, *, allow_several: bool) -> tuple[str | tuple[int, ...], ...]:
    """Every prompt of a text, of token ids, or of a list of either."""
    if not isinstance(value, list) or not any(isinstance(item, str | list) for item in value):
        return (_prompt(value, "prompt"),)
    if len(value) == 1:
        return (_prompt(value[0], "prompt"),)
    if not allow_several:
        raise InvalidRequest("'prompt' holds several prompts; one for each request is supported.", param="prompt")
    if len(value) > MAX_SEQUENCES:
        raise InvalidRequest(f"Invalid 'prompt': at most {MAX_SEQUENCES} prompts are allowed.", param="prompt")
    return tuple([_prompt(item, f"prompt[{index}]") for index, item in enumerate(value)])


def _prompt(value: Any, param: str) -> str | tuple[int, ...]:
    prompt = fields.text(value, param) if not isinstance(value, list) else fields.token_ids(value, param)
    if not prompt:
        raise InvalidRequest(f"Invalid '{param}': must not be empty.", param=param)
    return prompt


def _tool_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of tools, as fields of `ParsedRequest`. Without a choice the model may call any, as at OpenAI."""
    tools = values.get("tools", ())
    choice, name = values.get("tool_choice", (ToolChoice.AUTO if tools else ToolChoice.NONE, ""))
    if not tools and choice is not ToolChoice.NONE:
        raise InvalidRequest("'tool_choice' is only allowed where there are 'tools'.", param="tool_choice")
    if not tools and "parallel_tool_calls" in values:
        raise InvalidRequest(
            "'parallel_tool_calls' is only allowed where there are 'tools'.", param="parallel_tool_calls"
        )
    if name and all(tool["function"]["name"] != name for tool in tools):
        raise InvalidRequest(
            f"Invalid 'tool_choice.function.name': {fields.brief(name)} is none of the tools.",
            param="tool_choice.function.name",
        )
    return {
        "tools": tools,
        "tool_choice": choice,
        "tool_name": name,
        "has_parallel_calls": values.get("parallel_tool_calls", True),
    }


def _check_grammar(parsed: ParsedRequest) -> None:
    """Raise where an answer that is held to a form is to be something else, too."""
    options, is_forced = parsed.sampling_options, parsed.tool_choice is ToolChoice.REQUIRED
    has_schema = "json_schema" in options
    if has_schema and is_forced:
        raise InvalidRequest(
            "'response_format' is of no use where 'tool_choice' has a tool called.", param="response_format"
        )
    if has_schema or is_forced:
        what = "response_format" if has_schema else "tool_choice"
        # Where the form is complete nothing may follow but the end.
        for name in ("ignore_eos", "min_tokens"):
            if options.get(name):
                raise InvalidRequest(f"'{name}' is not supported together with '{what}'.", param=name)
