"""Traces are checked line by line: what is whole becomes prompts that agree where their ids do, faults are named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from router.generated import GENERATORS, generated_lines
from router.openai import ParsedRequest
from router.traces import MAX_TOKENS, TraceRequest, parse_trace, read_trace
from shared.errors import ConfigError
from shared.hashing import block_keys, root_key, unpack_tokens
from shared.types import CacheScheme
from tests.support.batches import chat_row, token_row
from tests.support.traces import lines, logged, mooncake, parsed, require_trace

ROOT_KEY = root_key(CacheScheme("m", 64))


def keys(request: TraceRequest) -> list[Any]:
    return block_keys(request.token_ids(), 64, ROOT_KEY)


def num_equal(first: TraceRequest, second: TraceRequest) -> int:
    """Leading blocks that two prompts share, and no later one may be equal."""
    pairs = [one == other for one, other in zip(keys(first), keys(second), strict=False)]
    assert pairs == sorted(pairs, reverse=True)
    return sum(pairs)


def fault(*rows: Any, tokenise: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(*rows, tokenise=tokenise)
    return str(caught.value)


def test_mooncake_prompts_share_eight_blocks_of_64_for_each_leading_id_they_share():
    first, second, third = parsed(
        mooncake(0, 1600, (0, 1, 2, 3)), mooncake(0, 1536, (0, 1, 4)), mooncake(3000, 512, (5,))
    )
    assert (num_equal(first, second), num_equal(first, third)) == (16, 0)
    assert [len(keys(each)) for each in (first, second, third)] == [25, 24, 8]
    assert [len(unpack_tokens(each.token_ids())) for each in (first, second, third)] == [1600, 1536, 512]
    assert (third.at_s, third.num_output_tokens, third.line) == (3.0, 8, 3)


def test_ids_may_be_any_whole_numbers_or_words():
    (request,) = parsed(mooncake(0, 1500, (-1, 2**70, "0a")))
    assert len(keys(request)) == 23


def test_logged_prompts_agree_where_their_hashes_do_and_never_in_their_tails():
    first, second = parsed(logged(prompt_tokens=190), logged(prompt_tokens=190))
    assert (num_equal(first, second), len(keys(first))) == (2, 2)
    longer = parsed(logged(prompt_tokens=128), logged(1, prompt_tokens=192, block_hashes=["a", "b", "c"]))
    assert num_equal(*longer) == 2


def test_logged_hashes_may_stand_for_blocks_of_another_size():
    (request,) = parsed(logged(prompt_tokens=40, block_hashes=[7, 8], block_size=16))
    assert unpack_tokens(request.token_ids())[14:34] == [1, 1, *[2] * 16, 3, 3]


def test_logged_requests_come_by_their_times_since_lines_are_in_order_of_ends():
    requests = parsed(logged(2), logged(1, tenant="a"), logged(1, tenant="b"), logged(0))
    assert [(one.at_s, one.line, one.tenant) for one in requests] == [(0, 4, ""), (1, 2, "a"), (1, 3, "b"), (2, 1, "")]


def test_logged_token_ids_are_the_prompt():
    (request,) = parsed(logged(2.5, token_ids=[5, 6, 7], tenant="a", priority=-1))
    assert unpack_tokens(request.token_ids()) == [5, 6, 7]
    assert (request.at_s, request.num_prompt_tokens, request.tenant, request.priority) == (2.5, 3, "a", -1)


def test_batch_input_is_tokenised_and_its_answers_are_as_long_as_they_may_be_or_were():
    def tokenise(request: ParsedRequest) -> list[int]:
        return [1, 2, 3] if request.messages else list(request.prompt or ())  # type: ignore[arg-type]

    chat, tokens = parsed(
        chat_row("a", max_tokens=32),
        {**token_row("b", [9, 9]), "timestamp_s": 4, "output_tokens": 2},
        tokenise=tokenise,
    )
    assert (chat.at_s, unpack_tokens(chat.token_ids()), chat.num_output_tokens) == (0.0, [1, 2, 3], 32)
    assert (tokens.at_s, unpack_tokens(tokens.token_ids()), tokens.num_output_tokens) == (4.0, [9, 9], 2)
    assert (chat.max_tokens, tokens.max_tokens) == (32, 4)


def test_what_a_request_asked_for_is_known_where_a_log_says_so():
    asked, unsaid = parsed(logged(output_tokens=3, max_tokens=50), logged(output_tokens=3))
    assert [(one.num_output_tokens, one.max_tokens) for one in (asked, unsaid)] == [(3, 50), (3, None)]


def test_blank_lines_are_counted_and_a_byte_order_mark_is_not_read():
    first, second = parsed(b"\xef\xbb\xbf" + lines(mooncake())[0].strip(), b"  ", mooncake())
    assert (first.line, second.line) == (1, 3)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([mooncake(), '{"timestamp": 1'], ["line 2", "not JSON"]),
        ([mooncake(), b"\xff"], ["line 2", "not UTF-8"]),
        (["[]"], ["line 1", "must be a JSON object, not an array"]),
        (['{"hash_ids": NaN}'], ["line 1", "NaN is not a JSON value"]),
        ([{"a": 1}], ["line 1", "no known format"]),
        ([chat_row("a")], ["line 1", "--model"]),
        ([mooncake(-1)], ["line 1", "'timestamp'", "-1"]),
        ([mooncake("0")], ["line 1", "'timestamp'", "a string"]),
        ([mooncake(True)], ["line 1", "'timestamp'", "a boolean"]),
        ([mooncake(3000), mooncake(2999.5)], ["line 2", "'timestamp' 2999.5", "line 1"]),
        ([mooncake(0, 0, ())], ["line 1", "'input_length'", "0"]),
        ([mooncake(0, MAX_TOKENS + 1)], ["line 1", "'input_length'", str(MAX_TOKENS)]),
        ([mooncake(output_length=0)], ["line 1", "'output_length'", "0"]),
        ([mooncake(output_length=1.5)], ["line 1", "'output_length'", "a number"]),
        ([mooncake(0, 1025, (0, 1))], ["line 1", "1025 needs 3 'hash_ids'", "there are 2"]),
        ([mooncake(0, 512, (0, 1))], ["line 1", "512 needs 1 'hash_ids'", "there are 2"]),
        ([mooncake(hash_ids="0")], ["line 1", "'hash_ids'", "a string"]),
        ([mooncake(hash_ids=(0, None))], ["line 1", "'hash_ids[1]' is None"]),
        ([mooncake(hash_ids=(0, 1)), mooncake(hash_ids=(2, 1))], ["line 2", "1 after 2", "after 0 before"]),
        ([mooncake(hash_ids=(0, 1)), mooncake(hash_ids=(1, 2))], ["line 2", "1 at the beginning", "after 0 before"]),
        ([mooncake(hash_ids=(0, 0))], ["line 1", "0 after 0", "at the beginning before"]),
        ([{"hash_ids": [1], "input_length": 5, "output_length": 1}], ["line 1", "'timestamp'"]),
        ([logged(-0.5)], ["line 1", "'timestamp_s'", "-0.5"]),
        ([logged(service_class="bulk")], ["line 1", "'service_class' is 'bulk'", "'interactive', 'batch'"]),
        ([logged(output_tokens=9, max_tokens=8)], ["line 1", "'output_tokens' is 9", "'max_tokens' 8"]),
        ([logged(max_tokens=0)], ["line 1", "'max_tokens'", "0"]),
        ([logged(2), logged(-1)], ["line 2", "'timestamp_s'", "-1"]),
        ([logged(prompt_tokens=64)], ["line 1", "64 has 1 full blocks", "there are 2"]),
        ([logged(block_size=0)], ["line 1", "'block_size'", "0"]),
        ([logged(), logged(prompt_tokens=40, block_size=16)], ["line 2", "'block_size' is 16, but 64"]),
        ([logged(block_hashes=["b", "a"]), logged()], ["line 2", "'a' at the beginning", "after 'b' before"]),
        ([logged(tennant="a")], ["line 1", "'tennant' is no field"]),
        ([logged(tenant=3)], ["line 1", "'tenant'", "an integer"]),
        ([logged(token_ids=[1], block_hashes=[])], ["line 1", "one of 'token_ids' and 'block_hashes'"]),
        ([logged(token_ids=[])], ["line 1", "there are 0 'token_ids'"]),
        ([logged(token_ids=[1, 2], prompt_tokens=3)], ["line 1", "'prompt_tokens' is 3", "2 'token_ids'"]),
        ([logged(token_ids=[1, 2**31])], ["line 1", "token_ids[1]", "2147483648"]),
    ],
)
def test_fault_of_a_line_is_named_with_line_and_value(rows: list[Any], words: list[str]):
    message = fault(*rows)
    assert message.startswith("trace t: ")
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**chat_row("a"), "url": "/v1/embeddings"}, ["/v1/embeddings"]),
        (chat_row("a", cache_salt="s"), ["cache_salt", "not simulated"]),
        (chat_row("a", max_tokens=None), ["output_tokens"]),
        ({**chat_row("a"), "output_tokens": 0}, ["output_tokens", "0"]),
        ({**chat_row("a"), "body": []}, ["'body'", "an array"]),
        (chat_row("a", model=None), ["'model'"]),
    ],
)
def test_fault_of_batch_input_is_named(row: Any, words: list[str]):
    message = fault(row, tokenise=lambda request: [1])
    assert [word for word in ["line 1", *words] if word not in message] == []


def test_file_that_is_missing_empty_or_a_folder_is_named(tmp_path: Path):
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (empty, "has no requests")):
        with pytest.raises(ConfigError, match=f"{path.name}.*{words}"):
            list(read_trace(path))


def test_lines_after_those_asked_for_are_not_read():
    rows = lines(mooncake(), "broken")
    assert len(list(islice(parse_trace(rows, "t"), 1))) == 1


@pytest.mark.parametrize("name", list(GENERATORS))
def test_made_up_trace_is_whole_shares_prefixes_and_is_the_same_for_the_same_seed(name: str):
    first = list(islice(generated_lines(name, 1), 300))
    assert first == list(islice(generated_lines(name, 1), 300))
    assert first != list(islice(generated_lines(name, 2), 300))
    requests = list(parse_trace(first, name))
    assert len(requests) == 300
    seen: set[Any] = set()
    num_shared = 0
    for request in requests:
        own = keys(request)
        num_shared += sum(key in seen for key in own)
        seen.update(own)
    assert num_shared > 300


@pytest.mark.slow
def test_mooncakes_own_trace_has_no_fault():
    requests = list(read_trace(require_trace()))
    assert (len(requests), requests[-1].at_s) == (6000, 1872.0)
    assert sum(request.num_prompt_tokens for request in requests) == 76_643_649
