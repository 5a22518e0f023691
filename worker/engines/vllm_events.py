"""What vLLM's KV events mean: changes of the resident set in our keys. Does no I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from shared.errors import ProtocolError
from shared.types import BlockKey, CacheScheme
from worker.engines.base import BlockChange
from worker.engines.vllm_keys import chain_keys

_MEDIUM = "GPU"
"""vLLM's name for the engine's own pool, on CPU builds too."""
# Field order of the array encoding (vLLM before 0.26); the map encoding has the same names.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What the engine's pool holds, and how many event batches had been published by then."""

    num_published: int
    hash_to_key: dict[Hashable, BlockKey]


def decode_batch(payload: bytes) -> list[dict[str, Any]]:
    """The events of one published batch as maps with their name under `type`; both encodings of vLLM.

    Raises:
        ProtocolError: the bytes are no batch of KV events.
    """
    try:
        batch = msgpack.unpackb(payload, raw=False, strict_map_key=False)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event if isinstance(event, dict) else _from_array(event) for event in events]
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a batch of KV events: {error!r}") from error


def _from_array(event: Sequence[Any]) -> dict[str, Any]:
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS[name], values, strict=False))}


@dataclass(slots=True)
class _Resident:
    """One engine hash: our key, None where there is none, and how many physical copies hold it."""

    key: BlockKey | None
    num_copies: int = 1


class EventTranslator:
    """The resident set as the events tell it.

    Counts copies of each hash, since stock vLLM reports each of two equal blocks as stored and as removed.
    """

    def __init__(self, scheme: CacheScheme) -> None:
        self._scheme = scheme
        self._residents: dict[Hashable, _Resident] = {}
        self.num_left_out = 0
        """Blocks without a key: multimodal, prompt embeddings, or after a block that is not known."""
        self.refusal: str | None = None
        """Why this engine's cache cannot be described by our keys; None while it can."""

    @property
    def keys(self) -> set[BlockKey]:
        """Our keys of all resident blocks. Linear; does not modify."""
        return {resident.key for resident in self._residents.values() if resident.key is not None}

    def apply(self, events: Iterable[dict[str, Any]]) -> BlockChange:
        """Take one batch into account and return its net effect. Modifies.

        Raises:
            ProtocolError: an event lacks what its kind must have; those before it are taken into account.
        """
        change = _NetChange()
        for event in events:
            if self.refusal is not None:
                break
            try:
                self._apply(event, change)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ProtocolError(f"malformed {event.get('type')} event: {error!r}") from error
        if self.refusal is not None:
            self._residents.clear()
            return BlockChange(is_reset=True)
        return change.result()

    def replace(self, snapshot: PoolSnapshot) -> BlockChange:
        """Take the pool's own account instead of the events'; returns what that changes. Modifies."""
        before = self.keys
        self._residents = {block_hash: _Resident(key) for block_hash, key in snapshot.hash_to_key.items()}
        after = self.keys
        return BlockChange(stored=tuple(after - before), removed=tuple(before - after))

    def refuse(self, reason: str) -> BlockChange:
        """Describe nothing from now on. Modifies."""
        self.refusal = reason
        return self.clear()

    def clear(self) -> BlockChange:
        """Forget everything. Modifies."""
        self._residents.clear()
        return BlockChange(is_reset=True)

    def _apply(self, event: dict[str, Any], change: _NetChange) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._residents.clear()
            change.reset()
        elif kind not in _FIELDS or event.get("medium") not in (_MEDIUM, None):
            return
        elif kind == "BlockStored":
            self._check_scheme(event)
            if self.refusal is None:
                self._store(event, change)
        else:
            for block_hash in event["block_hashes"]:
                self._remove(block_hash, change)

    def _check_scheme(self, event: dict[str, Any]) -> None:
        block_size_tokens = self._scheme.block_size_tokens
        if event["block_size"] != block_size_tokens:
            self.refusal = f"engine's blocks have {event['block_size']} tokens, announced were {block_size_tokens}"
        elif event.get("group_idx") not in (0, None) or event.get("kv_cache_spec_kind") not in ("full_attention", None):
            self.refusal = (
                "the model's cache is not one group of full attention "
                f"(group {event.get('group_idx')}, {event.get('kv_cache_spec_kind')})"
            )

    def _store(self, event: dict[str, Any], change: _NetChange) -> None:
        parent_hash = event["parent_block_hash"]
        parent = self._residents.get(parent_hash)
        keys = chain_keys(
            self._scheme,
            parent.key if parent else None,
            is_first=parent_hash is None,
            token_ids=event["token_ids"],
            extra_keys=event.get("extra_keys"),
            adapter=event.get("lora_name"),
        )
        for block_hash, key in zip(event["block_hashes"], keys, strict=True):
            resident = self._residents.get(block_hash)
            if resident is not None:
                resident.num_copies += 1
                continue
            self._residents[block_hash] = _Resident(key)
            if key is None:
                self.num_left_out += 1
            else:
                change.store(key)

    def _remove(self, block_hash: Hashable, change: _NetChange) -> None:
        resident = self._residents.get(block_hash)
        if resident is None:
            return
        resident.num_copies -= 1
        if resident.num_copies == 0:
            del self._residents[block_hash]
            if resident.key is not None:
                change.remove(resident.key)


class _NetChange:
    """Sums stores and removals so that a key is named once at most."""

    def __init__(self) -> None:
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._is_reset = False

    def store(self, key: BlockKey) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def remove(self, key: BlockKey) -> None:
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def reset(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._is_reset = True

    def result(self) -> BlockChange:
        return BlockChange(tuple(self._stored), tuple(self._removed), self._is_reset)
