"""What routers and workers say to each other: dataclasses as positional msgpack arrays.

A message is `[kind, field, field, ...]`. Decoding checks every type and every limit, so that nothing past this module
sees bytes of a stranger. Trailing fields that have a default may be missing, so that a message can grow.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from shared.errors import ProtocolError
from shared.types import Epoch, FinishReason, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerStatus

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
"""A 1-million-token prompt is 4 MB; what is larger than this is not ours."""
MAX_KEYS_PER_PART = 4096
"""Most keys in one `ResidentKeys`: frames of tokens pass in between."""
_MAX_ITEMS = 1 << 21
"""Most values of one message, at all depths. The largest message is a frame with all the tokens that a worker keeps for
a router that is away: 8 MiB at 5 bytes a token."""
_HARMLESS_BYTES = 64 << 10
"""Of all that msgpack has, empty containers grow most: one byte becomes some 70."""
_HARMLESS_CLAIMS = 1 << 20
"""Room for items that nested headers may claim without having them."""

Message = TypeVar("Message")
_Decode = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Challenge:
    """Worker to router, first on a connection."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """Router to worker: proves the secret over the worker's nonce and asks for its own to be answered."""

    protocol: int
    router: RouterId
    session: bytes
    """16 random bytes, constant while the router wants to resume what it had under way."""
    nonce: bytes
    proof: bytes
    last_frame: int
    """Last frame of this session that arrived; 0 on a new session."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Worker to router: the connection stands."""

    worker: WorkerId
    instance: Instance
    proof: bytes
    is_resumed: bool
    """Whether the session's requests are still alive; if not, the router has lost what was under way."""
    last_submit: int
    """Last submit of this session that arrived; the router sends later ones again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Either side, before it closes: why."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Router to worker: compute one sequence."""

    number: int
    """Counts submits of one session from 1."""
    request: RequestId
    attempt: int
    token_ids: bytes
    """Prompt, as `hashing.pack_tokens` gives it."""
    sampling: Sampling
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    matched_tokens: int = 0
    """What the router expects the cache to give; for load accounting only."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Router to worker: free the engine's request. Unknown requests are no error."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Router to worker: frames up to `frame` have arrived and may be forgotten."""

    frame: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed: an error code of `shared.errors` and a sentence."""

    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request. `offset` is the number of tokens sent before these."""

    request: RequestId
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    """The engine's own count of prompt tokens served from its cache, sent with the first delta."""
    fault: Fault | None = None
    """Ends the request as `finish` does, after the tokens beside it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Worker to router: one engine step's news for this router. `number` counts frames of a session from 1."""

    instance: Instance
    number: int
    last_submit: int
    """Last submit of this session that the status accounts for."""
    deltas: tuple[Delta, ...] = ()
    status: WorkerStatus | None = None


@dataclass(frozen=True, slots=True)
class Inspect:
    """Router to worker: tell what the engine holds, and what is published of it."""

    number: int
    """Stands in all parts of the answer."""
    is_repair: bool = False
    """Whether to publish the engine's own account first, in place of what was published so far."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Worker to router: one moment of a worker. The keys themselves follow in `ResidentKeys`."""

    number: int
    num_resident: int
    """Blocks that the engine's pool can serve: so many keys follow."""
    epoch: Epoch
    seq: int
    """Number of the last batch that the publisher knows to be applied."""
    num_published: int
    """Blocks that the publisher takes for resident: what the store holds after quiet."""
    num_differing: int
    """Blocks that are in one of those two sets alone. A few are on their way from engine to publisher at any time."""
    num_pending: int
    """Changes that the publisher has and the store is not known to have."""
    is_quiet: bool
    """Whether the publisher has nothing left to tell."""
    num_audits: int = 0
    """Times that the worker compared engine, publisher and store by itself."""
    num_drifts: int = 0
    """Times that this found a difference that lasted."""
    fault: Fault | None = None
    """Why there is no answer."""
    lag_s: float | None = None
    """How long the oldest of those changes has waited, by the worker's clock; 0 without one, `None` if not told."""


@dataclass(frozen=True, slots=True)
class ResidentKeys:
    """Worker to router: some of the keys that an `Inspection` has announced."""

    number: int
    keys: bytes
    """16 bytes each, end to end."""


_KINDS: tuple[type[Any], ...] = (
    Challenge, Hello, Welcome, Refused, Submit, Cancel, Ack, Frame, Inspect, Inspection, ResidentKeys,
)  # fmt: skip
"""A kind is a place in here: new ones come last."""
_KIND_OF = {message_type: kind for kind, message_type in enumerate(_KINDS)}


def encode(message: object) -> bytes:
    """The wire form of any message of this module."""
    return _packed((_KIND_OF[type(message)], *_fields(message)))


def decode(raw: bytes) -> Any:
    """The message in `raw`.

    Raises:
        ProtocolError: the bytes are not one message of this protocol; says which field of which message.
    """
    body = unpack(raw)
    if not isinstance(body, list) or not body or type(body[0]) is not int or not 0 <= body[0] < len(_KINDS):
        raise ProtocolError("not a message: no known kind in front")
    return _unpack_fields(_KINDS[body[0]], body, start=1)


def encode_record(record: object) -> bytes:
    """The wire form of a dataclass of `shared.types` that travels inside something else, as a worker's info does."""
    return _packed(_fields(record))


def decode_record(record_type: type[Message], raw: bytes) -> Message:
    """The inverse of `encode_record`, checked as `decode` checks."""
    body = unpack(raw)
    if not isinstance(body, list):
        raise ProtocolError(f"{record_type.__name__}: not an array")
    record: Message = _unpack_fields(record_type, body, start=0)
    return record


def unpack(raw: bytes) -> Any:
    """Plain msgpack within this protocol's limits; no extension types."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    # Each item takes a byte: a header that claims more lies.
    max_items = min(_MAX_ITEMS, len(raw))
    # Every level of nesting would be allocated as claimed. Payload may hold these bytes too, so this only sends more
    # messages through the check than have to.
    if len(raw) > _HARMLESS_BYTES or max_items * sum(map(raw.count, _LONG_HEADERS)) > _HARMLESS_CLAIMS:
        _check_num_items(raw)
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_array_len=max_items,
            max_map_len=max_items,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack within limits: {error}") from error


def _check_num_items(raw: bytes) -> None:
    """Raises `ProtocolError` if the headers claim more items than any message has. Allocates nothing for them.

    Takes about 0.1 us an item, so it is for messages that could do harm.
    """
    at, num_left, num_items = 0, 1, 1
    while num_left > 0 and at < len(raw):
        num_bytes, num_length_bytes, num_fixed, num_for_each = _LAYOUT_OF_HEADER[raw[at]]
        num_left -= 1
        at += num_bytes
        if num_length_bytes or num_fixed:
            length = num_fixed or int.from_bytes(raw[at - num_length_bytes : at], "big")
            if num_for_each:
                num_left += length * num_for_each
                num_items += length * num_for_each
                if num_items > _MAX_ITEMS:
                    raise ProtocolError(f"more than the limit of {_MAX_ITEMS} items in one message")
            else:
                at += length


def _layout_of_headers() -> tuple[tuple[int, int, int, int], ...]:
    """For each first byte of an item of msgpack: bytes up to the payload, how many of the last of them tell a length,
    a length that the first byte itself tells, and items for each unit of length (0: bytes).
    """
    layouts = [(1, 0, 0, 0)] * 256
    for size in range(16):
        layouts[0x80 + size] = (1, 0, size, 2)
        layouts[0x90 + size] = (1, 0, size, 1)
    for size in range(32):
        layouts[0xA0 + size] = (1, 0, size, 0)
    for header, num_length_bytes, num_for_each in (
        (0xC4, 1, 0), (0xC5, 2, 0), (0xC6, 4, 0), (0xD9, 1, 0), (0xDA, 2, 0), (0xDB, 4, 0),
        (0xDC, 2, 1), (0xDD, 4, 1), (0xDE, 2, 2), (0xDF, 4, 2),
    ):  # fmt: skip
        layouts[header] = (1 + num_length_bytes, num_length_bytes, 0, num_for_each)
    for header, num_bytes in zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True):
        layouts[header] = (1 + num_bytes, 0, 0, 0)
    # Extension types are left as they are: msgpack refuses the first of them.
    return tuple(layouts)


_LAYOUT_OF_HEADER = _layout_of_headers()
_LONG_HEADERS = (b"\xdc", b"\xdd", b"\xde", b"\xdf")
"""Of arrays and maps that tell their length in bytes of its own."""


def _packed(body: Any) -> bytes:
    """msgpack of plain values and, at any depth, dataclasses, which become arrays of their fields."""
    # A small first buffer: msgpack's own default of 256 KiB costs more than packing most messages.
    raw: bytes = msgpack.packb(body, default=_fields, buf_size=4096)
    return raw


def _fields(record: Any) -> tuple[Any, ...]:
    """Values of a dataclass in the order of its fields."""
    return _getter_of(type(record))(record)  # type: ignore[arg-type]  # mypy: `type[Any]` has no hash


@cache
def _getter_of(record_type: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the values of all fields. Derived once for each type."""
    names = [field.name for field in dataclasses.fields(record_type)]
    if len(names) > 1:
        return attrgetter(*names)
    single = attrgetter(names[0])
    return lambda record: (single(record),)


def _unpack_fields(message_type: type[Any], body: list[Any], *, start: int) -> Any:
    decoders, num_required = _decoders_of(message_type)  # type: ignore[arg-type]  # mypy: `type[Any]` has no hash
    num_given = len(body) - start
    if not num_required <= num_given <= len(decoders):
        raise ProtocolError(f"{message_type.__name__}: {num_given} fields, not {num_required} to {len(decoders)}")
    values = []
    for (name, plain_types, decode_field), raw in zip(decoders, body[start:], strict=False):
        if type(raw) in plain_types:
            values.append(raw)
            continue
        try:
            values.append(decode_field(raw))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"{message_type.__name__}.{name}: {error}") from error
    try:
        return message_type(*values)
    except ValueError as error:
        raise ProtocolError(f"{message_type.__name__}: {error}") from error


_FieldDecoder = tuple[str, frozenset[type[Any]], _Decode]


@cache
def _decoders_of(message_type: Any) -> tuple[list[_FieldDecoder], int]:
    """Field decoders of a dataclass and how many fields have no default. Derived once for each type.

    A decoder is a field's name, the types whose values stand as they are, and a function for all others.
    """
    hints = get_type_hints(message_type)
    fields = dataclasses.fields(message_type)
    num_required = sum(field.default is dataclasses.MISSING for field in fields)
    decoders = [(field.name, _plain_types(hints[field.name]), _decoder(hints[field.name])) for field in fields]
    return decoders, num_required


def _plain_types(hint: Any) -> frozenset[type[Any]]:
    """Types of raw values that need no conversion to be of the annotated type."""
    if isinstance(hint, NewType):
        return _plain_types(hint.__supertype__)
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*map(_plain_types, get_args(hint)))
    return frozenset({hint}) if hint in (str, bytes, int, bool, types.NoneType) else frozenset()


def _decoder(hint: Any) -> _Decode:
    """A function that checks and converts one value of the annotated type."""
    if isinstance(hint, NewType):
        return _decoder(hint.__supertype__)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner_hint,) = (arg for arg in get_args(hint) if arg is not type(None))
        inner = _decoder(inner_hint)
        return lambda raw: None if raw is None else inner(raw)
    if origin is tuple:
        return _tuple_decoder(get_args(hint)[0])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        record_type = hint
        return lambda raw: _unpack_fields(record_type, _expect(raw, list), start=0)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is float:
        return _decode_float
    return lambda raw: _expect(raw, hint)


def _tuple_decoder(item_hint: Any) -> _Decode:
    if item_hint is int:
        # Token ids are the bulk of all traffic: one set of types instead of one call for each id.
        def decode_ints(raw: Any) -> tuple[int, ...]:
            if type(raw) is not list or not set(map(type, raw)) <= {int}:
                raise TypeError("not an array of integers")
            return tuple(raw)

        return decode_ints
    item = _decoder(item_hint)
    return lambda raw: tuple([item(value) for value in _expect(raw, list)])


def _decode_float(raw: Any) -> float:
    number = float(raw) if type(raw) is int else _expect(raw, float)
    if not math.isfinite(number):
        # One NaN makes every comparison of costs false: one bad worker would spoil all decisions.
        raise ValueError(f"{number} is not a finite number")
    return float(number)


def _expect(raw: Any, wanted: type) -> Any:
    if type(raw) is not wanted:
        raise TypeError(f"{type(raw).__name__} instead of {wanted.__name__}")
    return raw
