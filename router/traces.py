"""Traces of requests, read and checked line by line: Mooncake's format, kvroute's request log, OpenAI batch files.

Knows what each prompt consists of and when it came; nothing of fleets, policies or other rates than the trace's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from router import fields
from router.input_files import MAX_LINE_BYTES
from router.openai import Endpoint, ParsedRequest, parse_request
from router.requests import CLASSES, ServiceClass
from shared.config import MAX_BLOCK_SIZE_TOKENS
from shared.errors import ConfigError, InvalidRequest
from shared.hashing import TOKEN_SIZE_BYTES, pack_tokens

MOONCAKE_TOKENS_PER_ID = 512
DEFAULT_LOG_BLOCK_TOKENS = 64
MAX_TOKENS = 1 << 24
"""Longest prompt or answer: far over any model's context, and little enough to hold."""
_MAX_TIME_S = 1e10
_MAX_ID_CHARS = 128
_BOM = b"\xef\xbb\xbf"

Tokenise = Callable[[ParsedRequest], Sequence[int]]
"""Token ids of a request as its model gets them. Raises `InvalidRequest`."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    line: int
    """Counted from 1, blank lines included."""
    at_s: float
    """By the trace's own clock."""
    num_prompt_tokens: int
    num_output_tokens: int
    content: bytes
    """The prompt, at least: packed tokens, each of which stands for `tokens_per_id` equal ones."""
    tokens_per_id: int = 1
    max_tokens: int | None = None
    """Most that the request asks for; None where nobody knows."""
    tenant: str = ""
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE

    def token_ids(self) -> bytes:
        """The prompt as packed tokens. Prompts that are known by ids alone begin alike where their ids do."""
        content = self.content
        if self.tokens_per_id > 1:
            ids = (content[at : at + TOKEN_SIZE_BYTES] for at in range(0, len(content), TOKEN_SIZE_BYTES))
            content = b"".join([packed * self.tokens_per_id for packed in ids])
        return content[: self.num_prompt_tokens * TOKEN_SIZE_BYTES]


class _Format(Protocol):
    """Makes requests of one trace's lines, in their order."""

    time_field: str
    is_in_order: bool
    """Whether lines must be in order of their times."""

    def request(self, line: int, given: Mapping[str, Any]) -> TraceRequest:
        """The request of one line. Raises `InvalidRequest` that names the field."""
        ...


def read_trace(path: Path, tokenise: Tokenise | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace file by their times, one line in memory at a time but for request logs.

    The first line tells the format. `tokenise` is needed for OpenAI batch files alone.

    Raises:
        ConfigError: the file cannot be read or has no line, or a line is at fault; names file, line and value.
    """
    try:
        with open(path, "rb") as file:
            # One byte over the limit, so that a longer line is seen and not held.
            yield from parse_trace(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), str(path), tokenise)
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot read it: {error.strerror}") from None


def parse_trace(lines: Iterable[bytes], name: str, tokenise: Tokenise | None = None) -> Iterator[TraceRequest]:
    """The requests in the lines of a trace, which errors call by `name`. Raises `ConfigError` as `read_trace` does.

    Those of a request log come by their times, once all of it is read.
    """
    trace_format: _Format | None = None
    last: TraceRequest | None = None
    unordered: list[TraceRequest] = []
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            raw = raw.removeprefix(_BOM)
        if not raw.strip():
            continue
        try:
            given = _object(raw)
            if trace_format is None:
                trace_format = _format_of(given, tokenise)
            request = trace_format.request(number, given)
            if trace_format.is_in_order and last is not None and request.at_s < last.at_s:
                when = fields.brief(given.get(trace_format.time_field))
                raise InvalidRequest(f"'{trace_format.time_field}' {when} is before that of line {last.line}")
        except InvalidRequest as error:
            raise ConfigError(f"trace {name}: line {number}: {error}") from None
        last = request
        if trace_format.is_in_order:
            yield request
        else:
            unordered.append(request)
    if last is None:
        raise ConfigError(f"trace {name}: has no requests")
    yield from sorted(unordered, key=lambda request: request.at_s)


class _Chains:
    """The ids of a trace by first sight. An id stands for its tokens *and all before them*, so it has one parent."""

    def __init__(self) -> None:
        self._id_to_place: dict[int | str, tuple[int, int | str | None]] = {}
        self._num_given = 0

    def content(self, ids: Sequence[int | str], param: str, *, has_own_tail: bool = False) -> bytes:
        """One packed token for each id, and one more that no other prompt has where its tail has no id.

        Modifies. Raises `InvalidRequest` for an id that came after another parent before.
        """
        tokens = []
        parent: int | str | None = None
        for id_ in ids:
            place = self._id_to_place.get(id_)
            if place is None:
                place = self._id_to_place[id_] = (self._fresh(), parent)
            elif place[1] != parent:
                raise InvalidRequest(
                    f"'{param}' has {fields.brief(id_)} {_after(parent)}, which came {_after(place[1])} before: an id "
                    "stands for its tokens and all before them"
                )
            tokens.append(place[0])
            parent = id_
        if has_own_tail:
            tokens.append(self._fresh())
        return pack_tokens(tokens)

    def _fresh(self) -> int:
        self._num_given += 1
        return self._num_given


class _Mooncake:
    """The format of the traces that the Mooncake project published (FAST'25). Further fields are left alone."""

    time_field = "timestamp"
    is_in_order = True

    def __init__(self) -> None:
        self._chains = _Chains()

    def request(self, line: int, given: Mapping[str, Any]) -> TraceRequest:
        at_s = _value(given, "timestamp", fields.number(0, _MAX_TIME_S * 1e3)) / 1e3
        num_prompt_tokens = _value(given, "input_length", fields.integer(1, MAX_TOKENS))
        ids = _value(given, "hash_ids", _ids)
        needed = -(-num_prompt_tokens // MOONCAKE_TOKENS_PER_ID)
        if len(ids) != needed:
            raise InvalidRequest(
                f"'input_length' {num_prompt_tokens} needs {needed} 'hash_ids' of {MOONCAKE_TOKENS_PER_ID} tokens, "
                f"but there are {len(ids)}"
            )
        return TraceRequest(
            line,
            at_s,
            num_prompt_tokens,
            _value(given, "output_length", fields.integer(1, MAX_TOKENS)),
            self._chains.content(ids, "hash_ids"),
            MOONCAKE_TOKENS_PER_ID,
        )


class _RequestLog:
    """kvroute's request log: prompts as token ids, or as hashes of their full blocks. Unknown fields are refused.

    Its lines are in order of the requests' ends, since that is when they are written, and its times those of arrival.
    """

    time_field = "timestamp_s"
    is_in_order = False
    _FIELDS = frozenset(
        {
            "timestamp_s",
            "prompt_tokens",
            "output_tokens",
            "max_tokens",
            "token_ids",
            "block_hashes",
            "block_size",
            "tenant",
            "priority",
            "service_class",
        }
    )

    def __init__(self) -> None:
        self._chains = _Chains()
        self._block_size_tokens: int | None = None

    def request(self, line: int, given: Mapping[str, Any]) -> TraceRequest:
        for field in given:
            if field not in self._FIELDS:
                raise InvalidRequest(f"'{fields.brief_name(field)}' is no field of a request log")
        at_s = _value(given, "timestamp_s", fields.number(0, _MAX_TIME_S))
        num_output_tokens = _value(given, "output_tokens", fields.integer(1, MAX_TOKENS))
        if ("token_ids" in given) == ("block_hashes" in given):
            raise InvalidRequest("one of 'token_ids' and 'block_hashes' is needed, and not both")
        tokens_per_id = 1
        if "token_ids" in given:
            token_ids = _value(given, "token_ids", fields.token_ids)
            num_prompt_tokens = len(token_ids)
            if given.get("prompt_tokens", num_prompt_tokens) != num_prompt_tokens or not token_ids:
                said = fields.brief(given.get("prompt_tokens", "at least 1"))
                raise InvalidRequest(f"'prompt_tokens' is {said}, but there are {num_prompt_tokens} 'token_ids'")
            content = pack_tokens(token_ids)
        else:
            num_prompt_tokens = _value(given, "prompt_tokens", fields.integer(1, MAX_TOKENS))
            tokens_per_id = self._block_size(given)
            content = self._of_hashes(_value(given, "block_hashes", _ids), num_prompt_tokens, tokens_per_id)
        return TraceRequest(
            line,
            at_s,
            num_prompt_tokens,
            num_output_tokens,
            content,
            tokens_per_id,
            max_tokens=_max_tokens(given.get("max_tokens"), num_output_tokens),
            tenant=fields.label(given.get("tenant", ""), "tenant"),
            priority=fields.integer(-(1 << 31), (1 << 31) - 1)(given.get("priority", 0), "priority"),
            service_class=_service_class(given.get("service_class", ServiceClass.INTERACTIVE), "service_class"),
        )

    def _block_size(self, given: Mapping[str, Any]) -> int:
        check = fields.integer(1, max(MAX_BLOCK_SIZE_TOKENS, 4096))
        size = int(check(given.get("block_size", DEFAULT_LOG_BLOCK_TOKENS), "block_size"))
        if self._block_size_tokens not in (None, size):
            raise InvalidRequest(f"'block_size' is {size}, but {self._block_size_tokens} on the lines before")
        self._block_size_tokens = size
        return size

    def _of_hashes(self, hashes: Sequence[int | str], num_prompt_tokens: int, block_size_tokens: int) -> bytes:
        num_full, num_tail_tokens = divmod(num_prompt_tokens, block_size_tokens)
        if len(hashes) != num_full:
            raise InvalidRequest(
                f"'prompt_tokens' {num_prompt_tokens} has {num_full} full blocks of {block_size_tokens} tokens, but "
                f"there are {len(hashes)} 'block_hashes'"
            )
        return self._chains.content(hashes, "block_hashes", has_own_tail=num_tail_tokens > 0)


class _Batch:
    """OpenAI batch input, its lines with `timestamp_s` and `output_tokens` beside the body where those are known."""

    time_field = "timestamp_s"
    is_in_order = True

    def __init__(self, tokenise: Tokenise) -> None:
        self._tokenise = tokenise

    def request(self, line: int, given: Mapping[str, Any]) -> TraceRequest:
        url = fields.text(fields.required(given, "url"), "url")
        if url not in list(Endpoint):
            choices = ", ".join(repr(str(endpoint)) for endpoint in Endpoint)
            raise InvalidRequest(f"'url' {fields.brief(url)} is not supported; only {choices} are.")
        body = fields.mapping(given["body"], "body")
        # Whatever model the traffic went to, the simulated fleet answers it.
        parsed = parse_request(Endpoint(url), body, served_model=str(body.get("model")), allow_stream=True)
        if parsed.cache_salt:
            raise InvalidRequest("'cache_salt' is not simulated: leave it out, and its prompts share their blocks")
        asked = parsed.max_tokens
        if asked is None and "output_tokens" not in given:
            raise InvalidRequest("the answer's length is not known: give 'output_tokens' or 'body.max_tokens'")
        token_ids = self._tokenise(parsed)
        num_output_tokens = fields.integer(1, MAX_TOKENS)(given.get("output_tokens", asked), "output_tokens")
        return TraceRequest(
            line,
            fields.number(0, _MAX_TIME_S)(given.get("timestamp_s", 0.0), "timestamp_s"),
            len(token_ids),
            num_output_tokens,
            pack_tokens(token_ids),
            max_tokens=_max_tokens(asked, num_output_tokens),
            priority=parsed.priority,
        )


def _max_tokens(asked: Any, num_output_tokens: int) -> int | None:
    """What a request asks for, if it says so: no answer is longer."""
    if asked is None:
        return None
    max_tokens = int(fields.integer(1, MAX_TOKENS)(asked, "max_tokens"))
    if num_output_tokens > max_tokens:
        raise InvalidRequest(f"'output_tokens' is {num_output_tokens}, more than 'max_tokens' {max_tokens}")
    return max_tokens


def _format_of(given: Mapping[str, Any], tokenise: Tokenise | None) -> _Format:
    """The format that a trace's first line has."""
    if "hash_ids" in given:
        return _Mooncake()
    if "timestamp_s" in given and "body" not in given:
        return _RequestLog()
    if "body" not in given:
        raise InvalidRequest(
            "is of no known format: neither Mooncake's ('hash_ids'), nor a request log ('timestamp_s'), nor OpenAI "
            "batch input ('body')"
        )
    if tokenise is None:
        raise InvalidRequest("is OpenAI batch input, whose prompts need a tokenizer: name one with --model")
    return _Batch(tokenise)


def _object(raw: bytes) -> dict[str, Any]:
    """A line as a JSON object."""
    if len(raw) > MAX_LINE_BYTES:
        raise InvalidRequest(f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        found = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"must be a JSON object, not {fields.kind_of(found)}")
    return found


def _value(given: Mapping[str, Any], name: str, check: fields.Check) -> Any:
    return check(fields.required(given, name), name)


def _service_class(value: Any, param: str) -> ServiceClass:
    if value not in CLASSES:
        choices = ", ".join(repr(str(one)) for one in CLASSES)
        raise InvalidRequest(f"'{param}' is {fields.brief(value)}: only {choices} are known")
    return ServiceClass(value)


def _ids(value: Any, param: str) -> list[int | str]:
    """Ids or hashes of blocks: whole numbers or strings."""
    if not isinstance(value, list):
        raise fields.wrong_type(value, param, "an array")
    for index, item in enumerate(value):
        if type(item) is not int and not (isinstance(item, str) and 0 < len(item) <= _MAX_ID_CHARS):
            raise InvalidRequest(
                f"'{param}[{index}]' is {fields.brief(item)}: must be a whole number or a string of 1 to "
                f"{_MAX_ID_CHARS} characters"
            )
    return value


def _after(parent: int | str | None) -> str:
    return "at the beginning" if parent is None else f"after {fields.brief(parent)}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
