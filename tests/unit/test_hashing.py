"""Block keys: golden vectors that pin them for good, and an independent spelling of the rule behind them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from xxhash import xxh3_128

from shared.hashing import (
    block_key,
    block_keys,
    num_usable_blocks,
    pack_tokens,
    parity_key,
    root_key,
    tokenizer_fingerprint,
    unpack_tokens,
)
from shared.types import BlockKey, CacheScheme

SCHEME = CacheScheme("org/model", 64)
SMALL = CacheScheme("org/model", 16)


def spelled_root(*fields: str) -> bytes:
    hasher = xxh3_128()
    for field in fields:
        hasher.update(struct.pack("<I", len(field.encode())))
        hasher.update(field.encode())
    return hasher.digest()


def spelled_key(parent: bytes, token_ids: list[int]) -> bytes:
    hasher = xxh3_128(parent)
    for token in token_ids:
        hasher.update(struct.pack("<i", token))
    return hasher.digest()


def test_golden_root_keys() -> None:
    assert [
        root_key(SCHEME).hex(),
        root_key(SCHEME, salt="tenant").hex(),
        root_key(SCHEME, adapter="tenant").hex(),
        root_key(SMALL).hex(),
    ] == [
        "3c5cc2e1d452b965e090d7aaad31b6a4",
        "8098e3d8073bd93d61abb6db8bdfb717",
        "e94510e739af556f6220d55349626849",
        "a8200a8d7caced2801d91908146c1bf5",
    ]


def test_golden_block_keys() -> None:
    assert [key.hex() for key in block_keys(pack_tokens(range(200)), 64, root_key(SCHEME))] == [
        "57c3181555b43cecf426b6d89d1d9f48",
        "f3a694682477e32927a1ac778bd9f427",
        "f761ac62276eb82e74c639747fc72f1c",
    ]
    extremes = pack_tokens([-1, 2**31 - 1] * 8)
    assert [key.hex() for key in block_keys(extremes, 16, root_key(SMALL))] == ["64400f77d0f28bf3fa2d0f0107c299f1"]


def test_golden_parity_key() -> None:
    assert parity_key(SCHEME, b"f" * 16).hex() == "3ba7109e51812eb8ee1c4969bbfecc18"


def test_root_key_is_the_hash_of_all_its_fields_with_their_lengths() -> None:
    assert root_key(SCHEME, salt="s", adapter="ä") == spelled_root("kvroute", "1", "org/model", "64", "s", "ä")


def test_root_keys_of_different_fields_differ() -> None:
    roots = {
        root_key(SCHEME),
        root_key(SMALL),
        root_key(CacheScheme("org/mode", 64)),
        root_key(CacheScheme("org/model", 64, key_version=2)),
        root_key(SCHEME, salt="ab", adapter="c"),
        root_key(SCHEME, salt="a", adapter="bc"),
        root_key(SCHEME, salt="abc"),
        root_key(SCHEME, adapter="abc"),
    }
    assert len(roots) == 8


def test_block_key_is_the_hash_of_its_parent_and_its_tokens() -> None:
    root = root_key(SMALL)
    first = spelled_key(root, list(range(16)))
    second = spelled_key(first, list(range(16, 32)))
    packed = pack_tokens(range(32))
    assert block_keys(packed, 16, root) == [first, second]
    assert block_key(root, packed[:64]) == first
    assert block_key(BlockKey(first), memoryview(packed)[64:].tobytes()) == second


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)])
def test_only_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    packed = pack_tokens(range(num_tokens))
    whole = block_keys(pack_tokens(range(64)), 16, root_key(SMALL))
    assert block_keys(packed, 16, root_key(SMALL)) == whole[:num_keys]


def test_change_of_one_token_changes_its_block_and_all_after_it_and_none_before() -> None:
    root = root_key(SMALL)
    tokens = list(range(64))
    before = block_keys(pack_tokens(tokens), 16, root)
    tokens[20] += 1
    after = block_keys(pack_tokens(tokens), 16, root)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False, False]


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(block_keys(pack_tokens([7] * 64), 16, root_key(SMALL)))) == 4


def test_salts_share_no_block() -> None:
    packed = pack_tokens(range(64))
    of_salt = [set(block_keys(packed, 16, root_key(SMALL, salt=salt))) for salt in ("", "a", "b")]
    assert len(set().union(*of_salt)) == 12


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)]
)
def test_last_prompt_token_is_always_computed(num_tokens: int, num_blocks: int) -> None:
    assert num_usable_blocks(num_tokens, 16) == num_blocks


def test_tokens_are_packed_as_little_endian_int32_and_come_back() -> None:
    token_ids = [0, 1, 258, -1, 2**31 - 1, -(2**31)]
    assert pack_tokens(token_ids) == struct.pack("<6i", *token_ids)
    assert unpack_tokens(pack_tokens(iter(token_ids))) == token_ids


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [([2**31], OverflowError), ([1.5], TypeError), (["1"], TypeError), (b"\x01\x00\x00\x00", TypeError)],
)
def test_what_is_no_list_of_token_ids_is_not_packed(token_ids: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        pack_tokens(token_ids)


def test_bytes_that_are_no_whole_tokens_are_not_unpacked() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"\x01\x00\x00")


def test_parity_differs_with_scheme_and_tokenizer() -> None:
    parities = {
        parity_key(SCHEME, b"a" * 16),
        parity_key(SCHEME, b"b" * 16),
        parity_key(SMALL, b"a" * 16),
        parity_key(CacheScheme("org/other", 64), b"a" * 16),
    }
    assert len(parities) == 4


def test_fingerprint_tells_tokenizer_and_template_files_apart(tmp_path: Path) -> None:
    seen = [tokenizer_fingerprint(tmp_path)]
    for name, content in [("tokenizer.json", b"1"), ("tokenizer.json", b"2"), ("chat_template.jinja", b"2")]:
        (tmp_path / name).write_bytes(content)
        seen.append(tokenizer_fingerprint(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"other")
    assert len(set(seen)) == 4
    assert tokenizer_fingerprint(tmp_path) == seen[-1]
