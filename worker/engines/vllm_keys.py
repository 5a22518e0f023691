"""Our block keys from what vLLM says of a block: its tokens, its parent, and the extra keys that entered its hash.

The event stream and the scheduler plugin both name blocks through this one function, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.hashing import TOKEN_SIZE_BYTES, block_key, block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme

_FULL_ATTENTION = "full_attention"


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
    if not any(extra_keys or ()):
        # What nearly all blocks are, since this runs in the engine's steps.
        if is_first:
            parent = root_key(scheme, adapter=adapter or "")
        if parent is not None:
            return [*block_keys(packed, scheme.block_size_tokens, parent)]
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


def refusal_of_groups(scheme: CacheScheme, groups: Sequence[tuple[str, int]]) -> str | None:
    """Why our keys cannot describe a cache of these groups; None if they can. A group is vLLM's kind and a block size.

    With one group of full attention a block can be used exactly if all blocks before it are there.
    """
    if [kind for kind, _ in groups] != [_FULL_ATTENTION]:
        return f"its cache is not one group of full attention but {', '.join(kind for kind, _ in groups) or 'none'}"
    ((_, block_size_tokens),) = groups
    if block_size_tokens != scheme.block_size_tokens:
        return f"the engine's blocks have {block_size_tokens} tokens, announced were {scheme.block_size_tokens}"
    return None


def refusal_of_model(model_config: Any) -> str | None:
    """The same as far as vLLM's configuration of a model tells, for engines that cannot be asked for their groups."""
    for is_so, what in (
        (model_config.is_attention_free, "no attention"),
        (model_config.is_hybrid, "layers of other kinds than attention"),
        (model_config.is_encoder_decoder, "cross attention"),
        (model_config.attention_chunk_size is not None, "chunked local attention"),
        (model_config.get_sliding_window() is not None, "a sliding window"),
    ):
        if is_so:
            return f"it has {what}, and its cache need not be one group of full attention"
    return None
