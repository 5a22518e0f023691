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


class LazyKey:
    """The key of one full block, computed when it is first asked for; until then what it follows from.

    Most blocks go without their key having been asked for, and to compute it would be the greatest part of what a block
    costs in an engine's step. The tokens, some 40 bytes each, stay until then; the cache itself has thousands of bytes
    for each. They are a tuple, which the garbage collector need not visit.
    """

    __slots__ = ("_adapter", "_before", "_extra_keys", "_key", "_token_ids")

    def __init__(
        self,
        before: LazyKey | None,
        token_ids: tuple[int, ...],
        extra_keys: Sequence[Any] | None,
        adapter: str | None,
    ) -> None:
        """The block follows `before`, None if it starts the prompt; the others as in `chain_keys`."""
        self._before = before
        self._token_ids: tuple[int, ...] | None = token_ids
        self._extra_keys = extra_keys
        self._adapter = adapter
        self._key: BlockKey | None = None

    def value(self, scheme: CacheScheme) -> BlockKey | None:
        """The key; None if tokens, salt and adapter do not describe the block. Computes those before it as well.

        Modifies: what the keys follow from is given up.
        """
        waiting: list[LazyKey] = []
        block: LazyKey | None = self
        while block is not None and block._token_ids is not None:
            waiting.append(block)
            block = block._before
        for block in reversed(waiting):
            before, token_ids = block._before, block._token_ids
            assert token_ids is not None
            (block._key,) = chain_keys(
                scheme,
                None if before is None else before._key,
                is_first=before is None,
                token_ids=token_ids,
                extra_keys=[block._extra_keys],
                adapter=block._adapter,
            )
            block._before = block._token_ids = block._extra_keys = None
        return self._key


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
