"""What a `vllm serve` says over HTTP, as far as an attached engine needs it: facts, load and answers. Does no I/O.

Nothing past this module sees what a stranger's server has sent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ContextTooLong, EngineError, InvalidRequest, KvrouteError, Overloaded
from shared.messages import TokenLogprobs
from shared.types import FinishReason
from worker.engines.base import EngineDelta, EngineRequest, RichEngineDelta

_MAX_EVENT_BYTES = 32 << 20
"""Longest event of an answer. The first one repeats the prompt: a million tokens are 8 MB."""
_MAX_MESSAGE_CHARS = 500
"""Longest part of a server's own words in an error of ours."""
_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What a server lists under `/v1/models`."""

    names: tuple[str, ...]
    """Of the model itself; the first is how the server names it in answers."""
    adapters: frozenset[str]
    root: str
    """Where the server has the model from: a folder of its own host, or a name on Hugging Face."""
    max_model_len_tokens: int | None


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """One engine's part of `/metrics`. None for what is not told there."""

    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV blocks that live requests hold."""
    num_tokens: float | None = None
    """Computed and generated since the process began: if it falls, another process answers."""
    started_at_s: float | None = None
    """When the process began, by its clock."""
    num_blocks: int | None = None
    block_size_tokens: int | None = None
    has_prefix_cache: bool | None = None


def read_models(body: Any) -> ServedModels:
    """Raises `EngineError` for what is no list of models."""
    try:
        cards = [card for card in body["data"] if isinstance(card["id"], str)]
        own = [card for card in cards if card.get("parent") is None]
        length = own[0].get("max_model_len")
        return ServedModels(
            names=tuple(card["id"] for card in own),
            adapters=frozenset(card["id"] for card in cards if card.get("parent") is not None),
            root=str(own[0].get("root") or own[0]["id"]),
            max_model_len_tokens=length if type(length) is int and length > 0 else None,
        )
    except (KeyError, TypeError, IndexError, AttributeError):
        raise EngineError("it answers /v1/models with something else than a list of models") from None


_SAMPLE = re.compile(
    r"^(vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|prompt_tokens_total"
    r"|generation_tokens_total|cache_config_info)|process_start_time_seconds)(?:\{(.*)\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_metrics(text: str, rank: int | None) -> ServerMetrics:
    """What `/metrics` tells of one engine. Samples without an engine's number count for all of them."""
    name_to_value: dict[str, float] = {}
    config: Mapping[str, str] = {}
    for name, labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        if found.get("engine", str(rank or 0)) != str(rank or 0):
            continue
        if name == "vllm:cache_config_info":
            config = found
        elif (number := _number(value)) is not None:
            name_to_value[name] = name_to_value.get(name, 0.0) + number
    running, waiting = (name_to_value.get(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    tokens = [name_to_value.get(f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation")]
    return ServerMetrics(
        num_running=None if running is None else int(running),
        num_waiting=None if waiting is None else int(waiting),
        # vLLM before 0.10 has the second name.
        kv_usage=name_to_value.get("vllm:kv_cache_usage_perc", name_to_value.get("vllm:gpu_cache_usage_perc")),
        num_tokens=sum(count for count in tokens if count is not None) if any(c is not None for c in tokens) else None,
        started_at_s=name_to_value.get("process_start_time_seconds"),
        num_blocks=_label_count(config, "num_gpu_blocks"),
        block_size_tokens=_label_count(config, "block_size"),
        has_prefix_cache={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _label_count(labels: Mapping[str, str], name: str) -> int | None:
    value = labels.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() and 0 < int(value) < 1 << 31 else None


def completion_body(request: EngineRequest, model: str, max_tokens: int) -> dict[str, Any]:
    """The request as `/v1/completions` takes it, with all choices written out: servers have defaults of their own."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.adapter or model,
        "prompt": request.token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.logprobs is not None:
        # Tokens by their ids: their texts are the router's to make.
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.json_schema:
        schema = {"name": "answer", "schema": json.loads(sampling.json_schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.salt:
        body["cache_salt"] = request.salt
    if request.priority:
        body["priority"] = request.priority
    return body


class CompletionStream:
    """Token ids, and what is told of each, out of the events of one streamed completion.

    Fed with bytes as they come.
    """

    def __init__(self, num_top_logprobs: int | None = None) -> None:
        self._rest = b""
        self._num_top_logprobs = num_top_logprobs
        self._logprobs: list[TokenLogprobs] = []
        """Of tokens that are in no delta yet."""
        self.finish: FinishReason | None = None
        self.cached_tokens: int | None = None
        """Comes after the last token, and only from servers that were told to tell it."""
        self.is_done = False
        """Whether the server has said that nothing will follow."""

    def feed(self, data: bytes) -> list[int]:
        """The tokens in `data` and what was left of before. Modifies.

        Raises what the server says went wrong, or `EngineError` for what is no streamed completion.
        """
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise EngineError(f"the server's answer has an event of over {_MAX_EVENT_BYTES} bytes")
        token_ids: list[int] = []
        for line in lines:
            if line.startswith(_DATA):
                event = line[len(_DATA) :].strip()
                if event == _DONE:
                    self.is_done = True
                else:
                    self._take(event, token_ids)
            elif line.strip() and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise EngineError(f"the server's answer is no stream of events: {_told(line)}")
        return token_ids

    def delta_of(
        self, token_ids: list[int], finish: FinishReason | None = None, cached_tokens: int | None = None
    ) -> EngineDelta:
        """A delta with all tokens that were fed and are in none yet, and what was told of them. Modifies."""
        if self._num_top_logprobs is None:
            return EngineDelta(tuple(token_ids), finish, cached_tokens)
        logprobs, self._logprobs = tuple(self._logprobs), []
        if len(logprobs) != len(token_ids):
            raise EngineError(f"the server tells probabilities of {len(logprobs)} of {len(token_ids)} tokens")
        return RichEngineDelta(tuple(token_ids), finish, cached_tokens, logprobs)

    def _take(self, event: bytes, token_ids: list[int]) -> None:
        try:
            body = json.loads(event)
            if "error" in body:
                raise error_of_body(body, status=None)
            for choice in body["choices"]:
                ids = choice["token_ids"]
                if not set(map(type, ids)) <= {int}:
                    raise TypeError("token_ids")
                token_ids += ids
                if self._num_top_logprobs is not None and ids:
                    self._logprobs += _told_logprobs(choice["logprobs"], self._num_top_logprobs)
                if choice.get("finish_reason") is not None:
                    self.finish = FinishReason(choice["finish_reason"])
            usage = body.get("usage")
            if usage:
                details = usage.get("prompt_tokens_details") or {}
                cached_tokens = details.get("cached_tokens")
                self.cached_tokens = cached_tokens if type(cached_tokens) is int else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise EngineError(f"the server's answer is no completion with token ids: {_told(event)}") from None


def _told_logprobs(told: Any, num_top: int) -> list[TokenLogprobs]:
    """One for each token of a choice's `logprobs`, with tokens named by their ids."""
    found = []
    for own, top in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        likeliest = sorted(((_logprob(value), _token_id(name)) for name, value in top.items()), reverse=True)[:num_top]
        ids, values = [token_id for _, token_id in likeliest], [value for value, _ in likeliest]
        found.append(TokenLogprobs(_logprob(own), tuple(ids), tuple(values)))
    return found


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError("logprobs")
    return float(value)


def _token_id(name: str) -> int:
    token_id = int(name.removeprefix("token_id:"))
    if not 0 <= token_id < 1 << 31:
        raise ValueError("token id")
    return token_id


def error_of_response(status: int, retry_after: str | None, raw: bytes) -> KvrouteError:
    """What an answer that is no answer means to whoever asked."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = {"error": {"message": _told(raw)}}
    return error_of_body(body, status=status, retry_after=retry_after)


def error_of_body(body: Any, *, status: int | None, retry_after: str | None = None) -> KvrouteError:
    """The same of an error's body; within a stream the body has the status as well."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {"message": error or body}
    message, param = _told(str(error.get("message", ""))), error.get("param")
    if status is None:
        code = error.get("code")
        status = code if type(code) is int else 500
    if status in (401, 403):
        return EngineError(f"the server refuses our API key ({status}): {message}")
    if status in (429, 503):
        return Overloaded(f"the server is busy ({status}): {message}", retry_after_s=_seconds(retry_after))
    if 400 <= status < 500 and status != 408:
        if "maximum context length" in message:
            return ContextTooLong(message)
        return InvalidRequest(message, param=param if isinstance(param, str) else None)
    return EngineError(f"the server failed on this request ({status}): {message}")


def _seconds(retry_after: str | None) -> float | None:
    """A `Retry-After` in seconds; its form as a date is not used by these servers."""
    return float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdecimal() else None


def _told(text: str | bytes) -> str:
    """A stranger's words, short and printable."""
    told = text[: 4 * _MAX_MESSAGE_CHARS].decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    told = "".join(char if char.isprintable() else " " for char in told[:_MAX_MESSAGE_CHARS])
    return told or "(nothing)"


def another_process(last: ServerMetrics, now: ServerMetrics) -> str | None:
    """What shows that these are not of one process; None if nothing does."""
    if last.started_at_s is not None and now.started_at_s is not None and last.started_at_s != now.started_at_s:
        return "it began at another time"
    if last.num_tokens is not None and now.num_tokens is not None and now.num_tokens < last.num_tokens:
        return f"it has computed {now.num_tokens:g} tokens after {last.num_tokens:g}"
    return None
