"""Block keys of prompts whose beginnings are known: only what is new is hashed block by block."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache, partial

from xxhash import xxh3_128_digest

from shared.hashing import TOKEN_SIZE_BYTES, block_keys, root_key
from shared.types import BlockKey, CacheScheme

_SPAN_TOKENS = 1024
_MAX_KEYS = 1 << 17
"""Keys that are kept, at some 60 bytes each: of 1,000 chats of 8,192 tokens in blocks of 64."""
_MAX_ROOTS = 1024


class KnownKeys:
    """Keys of spans of blocks, by the chained digest of span and everything before it; least recently used first out.

    The chain begins with the root key, so that salts and adapters have spans of their own. For one event loop.
    """

    def __init__(self, scheme: CacheScheme, *, max_keys: int = _MAX_KEYS) -> None:
        self._block_size_tokens = scheme.block_size_tokens
        self._blocks_per_span = max(1, _SPAN_TOKENS // scheme.block_size_tokens)
        self._max_spans = max(1, max_keys // self._blocks_per_span)
        self._root_key = lru_cache(maxsize=_MAX_ROOTS)(partial(root_key, scheme))
        self._span_to_keys: OrderedDict[bytes, list[BlockKey]] = OrderedDict()

    def of(self, packed_tokens: bytes, *, salt: str = "", adapter: str = "") -> list[BlockKey]:
        """What `hashing.block_keys` gives. Modifies what is known."""
        parent = self._root_key(salt=salt, adapter=adapter)
        keys: list[BlockKey] = []
        span: bytes = parent
        spans = self._span_to_keys
        stride = self._blocks_per_span * self._block_size_tokens * TOKEN_SIZE_BYTES
        start = 0
        for end in range(stride, len(packed_tokens) + 1, stride):
            tokens = packed_tokens[start:end]
            span = xxh3_128_digest(span + tokens)
            known = spans.get(span)
            if known is None:
                known = spans[span] = block_keys(tokens, self._block_size_tokens, parent)
                if len(spans) > self._max_spans:
                    spans.popitem(last=False)
            else:
                spans.move_to_end(span)
            keys += known
            parent = known[-1]
            start = end
        return keys + block_keys(packed_tokens[start:], self._block_size_tokens, parent)
