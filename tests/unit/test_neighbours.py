"""Routers and workers of neighbouring versions: bytes of an older one, and those of a newer one that says more."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from shared import messages, types
from shared.hashing import pack_tokens
from shared.messages import PROTOCOL_VERSION, Delta, Fault, Frame, Hello, Submit, decode, encode, protocol_of
from shared.types import (
    CacheScheme,
    FinishReason,
    Instance,
    Reading,
    RequestId,
    RouterId,
    Sampling,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
)
from shared.wire import decode_record, encode_record

INSTANCE = Instance("0" * 32)
SUBMIT = Submit(
    7,
    RequestId("r1"),
    1,
    pack_tokens([1, 2, 300]),
    Sampling(16, temperature=0.0, seed=5, stop_token_ids=(2,)),
    salt="t",
    priority=-1,
    matched_tokens=64,
)
STATUS = WorkerStatus(1, 2, 3, 4, 5, 0.5, 0.25, 0.125, 6, is_draining=True, num_resident_blocks=7)
FRAME = Frame(
    INSTANCE,
    3,
    7,
    (
        Delta(RequestId("r1"), 1, 0, (5, 6), None, 64),
        Delta(RequestId("r2"), 2, 9, (), FinishReason.STOP, None, Fault("engine_error", "x")),
    ),
    STATUS,
)
INFO = WorkerInfo(
    WorkerId("w1"), INSTANCE, "unix:/x", CacheScheme("org/model", 64), b"parity", 10, 8, 4096, "none 1.0", "lru"
)

# Recorded from earlier code: without a submit's `max_queued_tokens` and `traceparent`, a status's
# `is_cache_aware` and counts of blocks by class, and a worker's `tells_blocks`.
OLD_SUBMIT = (
    "9a0407a2723101c40c01000000020000002c0100009c10cb0000000000000000cb3ff000000000000000cb000000000000000005cb0000"
    "000000000000cb0000000000000000cb3ff000000000000000c29102a174a0ff40"
)
OLD_FRAME = (
    "9607d920303030303030303030303030303030303030303030303030303030303030303003079297a272310100920506c040c097a272320209"
    "90a473746f70c093ac656e67696e655f6572726f72a178c09b0102030405cb3fe0000000000000cb3fd0000000000000cb3fc0000000000000"
    "06c307"
)
OLD_INFO = (
    "9aa27731d9203030303030303030303030303030303030303030303030303030303030303030a7756e69783a2f7893a96f72672f6d6f64656c"
    "4001c4067061726974790a08cd1000a86e6f6e6520312e30a36c7275"
)
EVERY_RECORD = [
    record_type
    for module in (messages, types)
    for record_type in vars(module).values()
    if dataclasses.is_dataclass(record_type) and record_type.__module__ == module.__name__
]


def grown(value: Any) -> Any:
    """As a newer version may send it: with fields more at the end of the message, and of every record in it."""
    if dataclasses.is_dataclass(value):
        fields = [grown(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [*fields, "novel", {"what": [1, None]}]
    if isinstance(value, tuple):
        return [grown(item) for item in value]
    return value


def test_what_an_older_version_has_sent_is_understood() -> None:
    assert decode(bytes.fromhex(OLD_SUBMIT)) == SUBMIT
    assert decode(bytes.fromhex(OLD_FRAME)) == FRAME
    assert decode_record(WorkerInfo, bytes.fromhex(OLD_INFO)) == INFO


@pytest.mark.parametrize(
    ("old", "new"),
    [(OLD_SUBMIT, encode(SUBMIT)), (OLD_FRAME, encode(FRAME)), (OLD_INFO, encode_record(INFO))],
    ids=["submit", "frame", "info"],
)
def test_what_an_older_version_knows_stands_where_it_stood(old: str, new: bytes) -> None:
    def assert_begins(fields: list[Any], known: list[Any]) -> None:
        for field, expected in zip(fields, known, strict=False):
            if isinstance(expected, list) and isinstance(field, list):
                assert_begins(field, expected)
            else:
                assert field == expected
        assert len(fields) >= len(known)

    assert_begins(msgpack.unpackb(new), msgpack.unpackb(bytes.fromhex(old)))


@pytest.mark.parametrize("message", [SUBMIT, FRAME, Hello(PROTOCOL_VERSION, RouterId("r"), b"s" * 16, b"n", b"p", 0)])
def test_what_a_newer_version_says_beyond_is_left_out(message: object) -> None:
    kind = msgpack.unpackb(encode(message))[0]
    assert decode(msgpack.packb([kind, *grown(message)])) == message


def test_what_a_newer_worker_announces_beyond_is_left_out() -> None:
    assert decode_record(WorkerInfo, msgpack.packb(grown(INFO))) == INFO


def test_deltas_of_different_sizes_are_understood_one_by_one() -> None:
    fields = msgpack.unpackb(encode(FRAME))
    fields[4][1].append("novel")
    assert decode(msgpack.packb(fields)) == FRAME


@pytest.mark.parametrize("record_type", EVERY_RECORD, ids=lambda one: one.__name__)
def test_only_trailing_fields_have_defaults(record_type: Any) -> None:
    """So that whatever a record gains can be left out by who does not know it."""
    has_default = [field.default is not dataclasses.MISSING for field in dataclasses.fields(record_type)]
    assert has_default == sorted(has_default)


@pytest.mark.parametrize(
    ("raw", "protocol"),
    [
        (encode(Hello(PROTOCOL_VERSION, RouterId("r"), b"s", b"n", b"p", 0)), PROTOCOL_VERSION),
        (msgpack.packb([1, 9, {"all": "is different"}]), 9),
        (msgpack.packb([1, "9"]), None),
        (msgpack.packb([1]), None),
        (msgpack.packb([6, 9]), None),
        (msgpack.packb({1: 9}), None),
        (b"\xc1", None),
    ],
)
def test_version_of_a_hello_is_read_whatever_follows_it(raw: bytes, protocol: int | None) -> None:
    assert protocol_of(raw) == protocol


def test_how_to_sample_is_the_same_in_all_of_a_version() -> None:
    """A worker that passes over what it does not know of this answers something else than it was asked for."""
    known = [field.name for record in (Sampling, Reading) for field in dataclasses.fields(record)]
    assert (PROTOCOL_VERSION, known) == (
        2,
        [
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "json_schema", "reading"),
            *("tools", "tool_choice", "tool_name", "has_parallel_calls", "is_streamed", "stop"),
        ],
    )
