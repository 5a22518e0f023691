"""Dataclasses as positional msgpack arrays.

Decoding checks every type and every limit. A message can grow at its end, so that peers of neighbouring versions
understand each other: a trailing field that has a default may be missing, and what comes behind the last field that is
known here is left out.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from enum import Enum
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from shared.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 << 20
"""A 1-million-token prompt is 4 MB; what is larger than this is not ours."""
_MAX_ITEMS = 1 << 21
"""Most values of one message, at all depths. The largest message is a frame with all the tokens that a worker keeps for
a router that is away: 8 MiB at 5 bytes a token."""
_HARMLESS_BYTES = 64 << 10
"""Of all that msgpack has, empty containers grow most: one byte becomes some 70."""
_HARMLESS_CLAIMS = 1 << 20
"""Room for items that nested headers may claim without having them."""

Record = TypeVar("Record")
_Decode = Callable[[Any], Any]


def encode_record(record: object) -> bytes:
    """The wire form of a dataclass of `shared.types` that travels inside something else, as a worker's info does."""
    return pack(fields_of(record))


def decode_record(record_type: type[Record], raw: bytes) -> Record:
    """The inverse of `encode_record`, checked as `decode` checks."""
    body = unpack(raw)
    if not isinstance(body, list):
        raise ProtocolError(f"{record_type.__name__}: not an array")
    record: Record = from_fields(record_type, body)
    return record


def unpack(raw: bytes) -> Any:
    """Plain msgpack within this protocol's limits; no extension types."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(raw)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    # Each item takes a byte: a header that claims more lies.
    max_items = min(_MAX_ITEMS, len(raw))
    # Every level of nesting would be allocated as claimed. Payload may hold these bytes too, so this only sends more
    # messages through the check than have to.
    if len(raw) > _HARMLESS_BYTES or max_items * _num_long_headers(raw) > _HARMLESS_CLAIMS:
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


def _num_long_headers(raw: bytes) -> int:
    """How many bytes look like one, payload included."""
    return len(raw) - len(raw.translate(None, _LONG_HEADERS))


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
_LONG_HEADERS = b"\xdc\xdd\xde\xdf"
"""Of arrays and maps that tell their length in bytes of its own."""


def pack(body: Any) -> bytes:
    """msgpack of plain values and, at any depth, dataclasses, which become arrays of their fields."""
    # A small first buffer: msgpack's own default of 256 KiB costs more than packing most messages.
    raw: bytes = msgpack.packb(body, default=fields_of, buf_size=4096)
    return raw


def fields_of(record: Any) -> tuple[Any, ...]:
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


def from_fields(record_type: type[Any], values: list[Any]) -> Any:
    """A dataclass with these raw values, checked and converted. Modifies `values`. Raises `ProtocolError`."""
    decoders, num_required = _decoders_of(record_type)  # type: ignore[arg-type]  # mypy: `type[Any]` has no hash
    if len(values) < num_required:
        raise ProtocolError(f"{record_type.__name__}: {len(values)} fields, and at least {num_required} are needed")
    del values[len(decoders) :]
    for index in _to_convert(record_type, *map(type, values)):  # type: ignore[arg-type]  # as above
        name, _, decode_field = decoders[index]
        try:
            values[index] = decode_field(values[index])
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"{record_type.__name__}.{name}: {error}") from error
    try:
        return record_type(*values)
    except ValueError as error:
        raise ProtocolError(f"{record_type.__name__}: {error}") from error


@lru_cache(maxsize=1024)
def _to_convert(record_type: Any, *raw_types: type[Any]) -> list[int]:
    """Indexes of the values that are not of their fields' types as they are. Traffic has few shapes, met once each."""
    decoders, _ = _decoders_of(record_type)
    return [index for index, raw_type in enumerate(raw_types) if raw_type not in decoders[index][1]]


_FieldDecoder = tuple[str, frozenset[type[Any]], _Decode]


@cache
def _decoders_of(record_type: Any) -> tuple[list[_FieldDecoder], int]:
    """Field decoders of a dataclass and how many fields have no default. Derived once for each type.

    A decoder is a field's name, the types whose values stand as they are, and a function for all others.
    """
    hints = get_type_hints(record_type)
    fields = dataclasses.fields(record_type)
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
        return lambda raw: from_fields(record_type, _expect(raw, list))
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
    if dataclasses.is_dataclass(item_hint) and isinstance(item_hint, type):
        record_type = item_hint
        return lambda raw: _records(record_type, _expect(raw, list))
    item = _decoder(item_hint)
    return lambda raw: tuple([item(value) for value in _expect(raw, list)])


def _records(record_type: type[Any], rows: list[Any]) -> tuple[Any, ...]:
    """Dataclasses of one type, checked field by field over all of them: a step's deltas cost one look at each field."""
    if len(rows) == 1:
        return (from_fields(record_type, _expect(rows[0], list)),)
    decoders, num_required = _decoders_of(record_type)  # type: ignore[arg-type]  # mypy: `type[Any]` has no hash
    sizes = set(map(len, rows)) if set(map(type, rows)) == {list} else set()
    if len(sizes) != 1 or min(sizes) < num_required:
        return tuple([from_fields(record_type, _expect(row, list)) for row in rows])
    columns: list[Any] = list(zip(*rows, strict=True))[: len(decoders)]
    for index, (name, plain_types, decode_field) in enumerate(decoders[: len(columns)]):
        if not plain_types.issuperset(map(type, columns[index])):
            try:
                columns[index] = list(map(decode_field, columns[index]))
            except (TypeError, ValueError) as error:
                raise ProtocolError(f"{record_type.__name__}.{name}: {error}") from error
    try:
        return tuple(map(record_type, *columns))
    except ValueError as error:
        raise ProtocolError(f"{record_type.__name__}: {error}") from error


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
