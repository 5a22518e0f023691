"""Block keys: chained 128-bit names of full blocks, the same on every router and worker.

Chaining makes a key stand for its block and everything before it, so that equal keys mean equal *prefixes* and a
middle block never matches elsewhere. The hash is xxh3-128: fast and well spread, not a defence against crafted
collisions; tenants that must not learn of each other are kept apart by a salt, and engines check tokens themselves.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from xxhash import xxh3_128_digest

from shared.types import BlockKey, CacheScheme

KEY_VERSION = 1
KEY_SIZE_BYTES = 16
TOKEN_SIZE_BYTES = 4
_PACKED = (bytes, bytearray, memoryview)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed and sent.

    Raises:
        OverflowError: an id does not fit 32 bits.
        TypeError: an id is not an integer, or the ids are bytes, which are packed already.
    """
    if isinstance(token_ids, _PACKED):
        raise TypeError("token ids as bytes: packed already?")  # an array would take them as they are
    values = tuple(token_ids)
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error:
        array("i", values)  # tells which of the two is wrong; to pack with it takes longer
        raise


def unpack_tokens(packed: bytes) -> list[int]:
    """The token ids in `packed`, the inverse of `pack_tokens`.

    Raises:
        ValueError: the length is not a multiple of four.
    """
    token_ids = array("i")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def root_key(scheme: CacheScheme, *, salt: str = "", adapter: str = "") -> BlockKey:
    """The parent of every first block under one scheme, tenant salt and adapter.

    Each field goes in with its length, so that no two different field lists give the same bytes.
    """
    fields = ("kvroute", str(scheme.key_version), scheme.model, str(scheme.block_size_tokens), salt, adapter)
    encoded = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (field.encode() for field in fields))
    return BlockKey(xxh3_128_digest(encoded))


def block_key(parent: BlockKey, packed_block: bytes | memoryview) -> BlockKey:
    """The key of one full block (`block_size * 4` bytes) after `parent`."""
    return BlockKey(xxh3_128_digest(parent + packed_block))


def block_keys(packed_tokens: bytes, block_size_tokens: int, root: BlockKey) -> list[BlockKey]:
    """Keys of all *full* blocks of a prompt, first block first; a partial tail has no key."""
    stride = block_size_tokens * TOKEN_SIZE_BYTES
    keys: list[bytes] = []
    parent: bytes = root
    full_blocks = memoryview(packed_tokens)[: len(packed_tokens) // stride * stride]
    # Cutting the blocks out one by one would take a fifth of the time.
    for (block,) in struct.iter_unpack(f"{stride}s", full_blocks):
        parent = xxh3_128_digest(parent + block)
        keys.append(parent)
    return cast(list[BlockKey], keys)


def num_usable_blocks(num_prompt_tokens: int, block_size_tokens: int) -> int:
    """How many leading blocks of a prompt a cache can serve.

    An engine computes at least the prompt's last token, so a prompt that ends on a block boundary does not get its
    last block from the cache (vLLM, `KVCacheManager.get_computed_blocks`).
    """
    return max(0, num_prompt_tokens - 1) // block_size_tokens


def parity_key(scheme: CacheScheme, tokenizer_fingerprint: bytes) -> bytes:
    """A key that two sides share only if scheme, key code, byte order and tokenizer files are the same."""
    probe = pack_tokens(range(scheme.block_size_tokens * 2))
    return xxh3_128_digest(block_keys(probe, scheme.block_size_tokens, root_key(scheme))[-1] + tokenizer_fingerprint)


def tokenizer_fingerprint(folder: Path) -> bytes:
    """16 bytes over the tokenizer and chat-template files of a model folder."""
    parts: Sequence[bytes] = [
        name.encode() + xxh3_128_digest((folder / name).read_bytes())
        for name in _TOKENIZER_FILES
        if (folder / name).is_file()
    ]
    return xxh3_128_digest(b"".join(parts))
