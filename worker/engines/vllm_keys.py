"""Our block keys from what vLLM says of a block: its tokens, its parent, and the extra keys that entered its hash.

The event stream and the scheduler plugin both name blocks through this one function, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.hashing import TOKEN_SIZE_BYTES, block_key, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme


def chain_keys(
    scheme: CacheScheme,
    parent: BlockKey | None,
    *,
    is_first: bool,
    token_ids: Sequence[int],
    extra_keys: Sequence[Sequence[Any] | None] | None,
    adapter: str | None,
) -> list[BlockKey | None]:
    """Keys of the consecutive full blocks in `token_ids`.

    `is_first` says that the chain starts the prompt, otherwise it follows `parent`. `extra_keys` are those of vLLM's
    events: for each block None or, in this order, the adapter's name, (identifier, offset) pairs of multimodal items,
    the cache salt, and digests of prompt embeddings. A block that tokens, salt and adapter do not describe has no key,
    that is None, and neither have those after it.
    """
    stride = scheme.block_size_tokens * TOKEN_SIZE_BYTES
    packed = pack_tokens(token_ids)
    num_blocks = len(packed) // stride
    keys: list[BlockKey | None] = []
    for index in range(num_blocks):
        extras = list((extra_keys[index] if extra_keys else None) or ())
        if adapter and extras and extras[0] == adapter:
            del extras[0]
        if is_first and index == 0:
            salt = extras.pop() if extras and isinstance(extras[-1], str) else ""
            parent = root_key(scheme, salt=salt, adapter=adapter or "")
        if extras:
            parent = None
        if parent is not None:
            parent = block_key(parent, packed[index * stride : (index + 1) * stride])
        keys.append(parent)
    return keys
