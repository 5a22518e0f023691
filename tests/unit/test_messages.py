"""The wire: golden bytes, round trips of every message, and what strangers may send."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import pytest

from shared.errors import ProtocolError
from shared.hashing import pack_tokens
from shared.messages import (
    Ack,
    AskTokenizer,
    Cancel,
    Challenge,
    Delta,
    Fault,
    Frame,
    Hello,
    Inspect,
    Inspection,
    MessagePart,
    Refused,
    ResidentKeys,
    RichDelta,
    Submit,
    TokenizerFile,
    TokenLogprobs,
    ToolCallPart,
    Welcome,
    decode,
    encode,
)
from shared.types import (
    CacheScheme,
    Epoch,
    FinishReason,
    Instance,
    Reading,
    RequestId,
    RouterId,
    Sampling,
    ToolChoice,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
)
from shared.wire import MAX_MESSAGE_BYTES, decode_record, encode_record, unpack

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
    max_queued_tokens=512,
    traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
)
STATUS = WorkerStatus(1, 2, 3, 4, 5, 0.5, 0.25, 0.125, 6, is_draining=True, num_resident_blocks=7, is_cache_aware=False)
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
READ_SUBMIT = Submit(
    8,
    RequestId("r3"),
    1,
    b"",
    Sampling(
        16,
        logprobs=2,
        json_schema='{"type":"object"}',
        reading=Reading("[]", ToolChoice.REQUIRED, "f", False, True, ("x",)),
    ),
)
RICH_FRAME = Frame(
    INSTANCE,
    4,
    8,
    (Delta(RequestId("r1"), 1, 2, (7,)),),
    rich_deltas=(
        RichDelta(RequestId("r2"), 1, 0, (5,), None, 64, None, (TokenLogprobs(-0.5, (5, 6), (-0.5, -1.25)),)),
        RichDelta(
            RequestId("r3"),
            1,
            0,
            (8, 9),
            FinishReason.TOOL_CALLS,
            parts=(MessagePart("c", "r"), MessagePart(tool_calls=(ToolCallPart(0, "{}", "id", "f"),))),
        ),
    ),
)
INSPECTION = Inspection(2, 3, Epoch("e" * 32), 4, 5, 6, 7, is_quiet=True, num_audits=8, num_drifts=9, lag_s=0.5)
EVERY_MESSAGE = [
    Challenge(b"nonce"),
    Hello(1, RouterId("router"), b"s" * 16, b"nonce", b"proof", 0),
    Welcome(WorkerId("w1"), INSTANCE, b"proof", True, 2**40),
    Refused("authentication_failed", "who are you, ä?"),
    SUBMIT,
    Submit(1, RequestId(""), 1, b"", Sampling(1)),
    Cancel(RequestId("r1"), 2),
    Ack(2**63),
    FRAME,
    Frame(INSTANCE, 1, 0),
    READ_SUBMIT,
    RICH_FRAME,
    Inspect(1),
    Inspect(2, is_repair=True),
    INSPECTION,
    Inspection(1, 0, Epoch(""), 0, 0, 0, 0, is_quiet=False, fault=Fault("engine_error", "dead", 1.5)),
    ResidentKeys(2, b"k" * 48),
    AskTokenizer(3),
    TokenizerFile(3, "config.json", b"{}", 2, Fault("engine_error", "none")),
]
INFO = WorkerInfo(
    WorkerId("w1"), INSTANCE, "unix:/x", CacheScheme("org/model", 64), b"parity", 10, 8, 4096, "none 1.0", "lru"
)


def fields_of(message: object) -> list[Any]:
    fields: list[Any] = msgpack.unpackb(encode(message))
    return fields


def with_field(message: object, index: int, value: object) -> bytes:
    fields = fields_of(message)
    fields[index] = value
    raw: bytes = msgpack.packb(fields)
    return raw


def test_golden_submit() -> None:
    assert encode(SUBMIT).hex() == (
        "9c0407a2723101c40c01000000020000002c0100009f10cb0000000000000000cb3ff000000000000000cb0000000000000000"
        "05cb0000000000000000cb0000000000000000cb3ff000000000000000c29102c0a0c0a174a0ff40cd0200d937"
        + SUBMIT.traceparent.encode().hex()
    )


def test_golden_frame() -> None:
    assert encode(FRAME).hex() == (
        "9707d92030303030303030303030303030303030303030303030303030303030303030300307"
        "9297a272310100920506c040c097a27232020990a473746f70c094ac656e67696e655f6572726f72a178c0c0"
        "9f0102030405cb3fe0000000000000cb3fd0000000000000cb3fc000000000000006c307c2c0c0c090"
    )


def test_golden_rich_frame() -> None:
    assert encode(RICH_FRAME).hex() == (
        "9707d920303030303030303030303030303030303030303030303030303030303030303004089197a2723101029107c0c0c0"
        "c09299a2723201009105c040c09193cbbfe000000000000092050692cbbfe0000000000000cbbff40000000000009099a272"
        "330100920809aa746f6f6c5f63616c6c73c0c0909293a163a1729093a0a0919400a27b7da26964a166"
    )


def test_golden_tokenizer_files() -> None:
    assert [encode(message).hex() for message in (AskTokenizer(2), TokenizerFile(2, "a", b"k", 0))] == [
        "920b02",
        "960c02a161c4016b00c0",
    ]


def test_golden_inspection() -> None:
    assert [
        encode(message).hex() for message in (Inspect(2, is_repair=True), INSPECTION, ResidentKeys(2, b"k" * 16))
    ] == [
        "930802c3",
        "9d090203d920" + "65" * 32 + "04050607c30809c0cb3fe0000000000000",
        "930a02c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b",
    ]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: object) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def test_records_come_back_as_they_were() -> None:
    assert decode_record(WorkerInfo, encode_record(INFO)) == INFO
    assert decode_record(WorkerStatus, encode_record(STATUS)) == STATUS


def test_enumerations_come_back_as_their_own_type() -> None:
    assert decode(encode(FRAME)).deltas[1].finish is FinishReason.STOP


def test_fields_with_a_default_may_be_missing_at_the_end() -> None:
    raw = msgpack.packb(fields_of(SUBMIT)[:6])
    assert decode(raw) == Submit(7, RequestId("r1"), 1, SUBMIT.token_ids, SUBMIT.sampling)


def test_whole_numbers_are_taken_for_floats_and_not_the_other_way_round() -> None:
    sampling = [16, 1, 1, 0, 0, None, 0, 0, 1]
    assert decode(with_field(SUBMIT, 5, sampling)).sampling == Sampling(16)
    with pytest.raises(ProtocolError, match=r"Sampling\.max_tokens: float instead of int"):
        decode(with_field(SUBMIT, 5, [16.0]))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x07", "not a message"),
        (b"\x90", "not a message"),
        (b"\x80", "not a message"),
        (b"\xc0", "not a message"),
        (msgpack.packb([99]), "not a message"),
        (msgpack.packb([-1]), "not a message"),
        (msgpack.packb([True, b"nonce"]), "not a message"),
        (msgpack.packb(["Challenge", b"nonce"]), "not a message"),
        (encode(SUBMIT) + b"\x00", "not msgpack"),
        (msgpack.packb([0]), r"Challenge: 0 fields, and at least 1 are needed"),
        (msgpack.packb([0, "nonce"]), r"Challenge\.nonce: str instead of bytes"),
        (msgpack.packb([6, True]), r"Ack\.frame: bool instead of int"),
        (msgpack.packb([6, None]), r"Ack\.frame: NoneType instead of int"),
        (msgpack.packb([8]), r"Inspect: 0 fields, and at least 1 are needed"),
        (msgpack.packb([8, 1, 1]), r"Inspect\.is_repair: int instead of bool"),
        (msgpack.packb([10, 1, "keys"]), r"ResidentKeys\.keys: str instead of bytes"),
        (msgpack.packb([99, 1]), "not a message"),
        (with_field(INSPECTION, 2, "3"), r"Inspection\.num_resident: str instead of int"),
        (with_field(INSPECTION, 8, 1), r"Inspection\.is_quiet: int instead of bool"),
        (with_field(INSPECTION, 11, "dead"), r"Inspection\.fault: str instead of list"),
        (with_field(SUBMIT, 4, "tokens"), r"Submit\.token_ids: str instead of bytes"),
        (with_field(SUBMIT, 5, {}), r"Submit\.sampling: dict instead of list"),
        (with_field(SUBMIT, 5, []), r"Sampling: 0 fields, and at least 1 are needed"),
        (with_field(SUBMIT, 5, [1, float("nan")]), r"Sampling\.temperature: nan is not a finite number"),
        (with_field(FRAME, 4, 5), r"Frame\.deltas: int instead of list"),
        (with_field(FRAME, 4, [5]), r"Frame\.deltas: int instead of list"),
        (with_field(FRAME, 4, [["r", 1, 0, [1, "2"]]]), r"Delta\.token_ids: not an array of integers"),
        (with_field(FRAME, 4, [["r", 1, 0, [True]]]), r"Delta\.token_ids: not an array of integers"),
        (with_field(FRAME, 4, [["r", 1, 0, [], "bored"]]), r"Delta\.finish: 'bored' is not a valid FinishReason"),
        (with_field(FRAME, 4, [["r", 1, 0, [], []]]), r"Delta\.finish"),
        (
            with_field(RICH_FRAME, 6, [["r", 1, 0, [1], None, 0, None, [[float("-inf")]]]]),
            "logprob: -inf is not a finite",
        ),
        (with_field(RICH_FRAME, 6, [["r", 1, 0, [1], None, 0, None, [], [[5]]]]), "MessagePart.content: int instead"),
        (with_field(READ_SUBMIT, 5, [1, *fields_of(READ_SUBMIT)[5][1:14], [0]]), "Reading.tools: int instead of str"),
        (with_field(FRAME, 5, [1, 2, 3, 4, 5, float("inf"), 0, 0, 6]), "prefill_s_per_token: inf is not a finite"),
    ],
)
def test_hostile_bytes_are_refused_by_name(raw: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(raw)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_truncated_messages_are_refused_at_every_length(message: object) -> None:
    raw = encode(message)
    for length in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode(raw[:length])


def test_spoilt_messages_are_refused_or_are_another_message_and_never_anything_else() -> None:
    rng = random.Random(0)
    num_refused = 0
    for _ in range(5000):
        raw = bytearray(encode(rng.choice(EVERY_MESSAGE)))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            decoded = decode(bytes(raw))
        except ProtocolError:
            num_refused += 1
        else:
            assert decode(encode(decoded)) == decoded
    assert num_refused > 1000


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x92\x00" + b"\xdd\x00\x10\x00\x00" * 400,
        b"\x92\x00" + b"\xdd\x00\x10\x00\x00" * 400 + bytes(1 << 20),
        b"\x92\x00" + b"\xdc\x10\x00" * 1000 + bytes(1096),
        b"\x91" * 100_000,
        b"\x81\x01" * 100_000,
        b"\x9f" + (b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF) * 15,
        b"\x9f" + (b"\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF) * 15,
    ],
    ids=[
        "array",
        "map",
        "text",
        "bytes",
        "extension",
        "nested arrays",
        "nested arrays in a long message",
        "nested arrays in a stranger's message",
        "depth of arrays",
        "depth of maps",
        "empty arrays",
        "empty maps",
    ],
)
def test_claims_of_giant_sizes_are_refused_before_they_cost_memory(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode(raw)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_what_a_worker_keeps_for_a_router_that_is_away_passes_in_one_frame() -> None:
    token_ids = tuple(range(70_000, 70_000 + (8 << 20) // (5 * 64)))
    frame = Frame(INSTANCE, 1, 0, tuple(Delta(RequestId(f"r{number}"), 1, 0, token_ids) for number in range(64)))
    assert decode(encode(frame)) == frame


def test_items_of_every_kind_are_counted_in_large_messages() -> None:
    rng = random.Random(0)
    some: list[Any] = [None, True, 0, -1, -33, 200, 1 << 14, 1 << 30, 1 << 60, -(1 << 14), -(1 << 30), -(1 << 60), 0.5]
    some += ["", "x" * 20, "x" * 200, "x" * 2000, "x" * 70_000, b"", b"\xdd" * 20, b"\xdd" * 2000, b"\xdd" * 70_000]
    some += [[], [1], [[1] * 20, {}], {"a": [1]}, {str(number): number for number in range(20)}, [0] * 70_000]
    for _ in range(20):
        body = [*rng.choices(some, k=40), "x" * 70_000]
        assert unpack(msgpack.packb(body)) == body


@pytest.mark.parametrize("raw", [b"\xd4\x01\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x05", b"\xc7\x04\x05abcd"])
def test_extension_types_are_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x92\x06" + raw)


def test_text_that_is_no_utf8_and_odd_map_keys_are_refused() -> None:
    for raw in (b"\x92\x05\xa1\xff", b"\x92\x06\x81\x01\x02", b"\x92\x06\x81\x90\x02"):
        with pytest.raises(ProtocolError):
            decode(raw)


def test_message_over_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 67108864"):
        unpack(bytes(MAX_MESSAGE_BYTES + 1))


def test_records_are_checked_like_messages() -> None:
    for raw in (b"\x80", b"\x90", encode_record(STATUS), encode_record(INFO)[:-1], b"\xc1"):
        with pytest.raises(ProtocolError):
            decode_record(WorkerInfo, raw)
