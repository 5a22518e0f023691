"""What may be said about a simulated engine, and how it follows from settings, a model's files and a profile."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config import Settings
from shared.errors import ConfigError
from shared.kv_size import model_shape
from shared.types import CacheScheme
from worker.engines.profiles import LatencyProfile, load_profile
from worker.pins import default_budget_blocks


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """One simulated engine."""

    profile: LatencyProfile
    scheme: CacheScheme
    num_blocks: int
    max_model_len_tokens: int
    max_num_seqs: int | None = None
    """As the profile says where nothing else is said; so is `step_budget_tokens`."""
    step_budget_tokens: int | None = None
    eviction: str = "adaptive"
    pin_budget_blocks: int | None = None
    vocabulary_size: int = 32_000
    eos_token_ids: frozenset[int] = frozenset()
    is_warm: bool = False
    """Whether step times are known from the start, as of an engine that has served before."""
    tokens_per_delta: int = 1
    """How many tokens are gathered before they are told, apart from the first and the last: simulations without anybody
    who reads along are faster with many."""


def simulator_options(settings: Settings, scheme: CacheScheme, folder: Path) -> SimulatorOptions:
    """One engine as settings want it, with the vocabulary and the context of the model in `folder`.

    Raises:
        ConfigError: the profile is no good, or nothing tells how large the cache is.
    """
    profile = load_profile(settings.profile)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = model_shape(config)
    max_model_len_tokens = settings.max_model_len or shape.context_tokens
    if max_model_len_tokens is None:
        raise ConfigError(f"--max-model-len: needed, since the model in {folder} does not tell its context")
    num_blocks = settings.kv_cache_blocks
    if num_blocks is None and settings.kv_cache_bytes is not None:
        num_blocks = settings.kv_cache_bytes // (shape.bytes_per_token(settings.dtype) * scheme.block_size_tokens)
    if num_blocks is None:
        num_blocks = (profile.kv_capacity_tokens or 0) // scheme.block_size_tokens
    if not num_blocks:
        raise ConfigError(
            f"--kv-cache-blocks: needed, since profile {profile.name} does not tell how many tokens a cache holds"
        )
    return SimulatorOptions(
        profile,
        scheme,
        num_blocks=num_blocks,
        max_model_len_tokens=max_model_len_tokens,
        max_num_seqs=settings.max_num_seqs,
        eviction=settings.eviction,
        pin_budget_blocks=settings.pin_budget_blocks,
        vocabulary_size=int(config["vocab_size"]),
        eos_token_ids=_eos_token_ids(config),
    )


def check_sizes(options: SimulatorOptions, max_num_seqs: int, step_budget_tokens: int) -> int:
    """Refuse sizes that do not fit each other; the blocks that pins may hold together. Raises `ConfigError`."""
    if step_budget_tokens < max_num_seqs:
        raise ConfigError(
            f"a step of {step_budget_tokens} tokens has no place for one of each of {max_num_seqs} sequences"
        )
    longest_blocks = -(-options.max_model_len_tokens // options.scheme.block_size_tokens)
    budget_blocks = options.pin_budget_blocks
    if budget_blocks is None:
        return default_budget_blocks(options.num_blocks, longest_blocks)
    if budget_blocks and budget_blocks > options.num_blocks - longest_blocks:
        raise ConfigError(
            f"--pin-budget-blocks: {budget_blocks} of {options.num_blocks} blocks leave no room for one request of "
            f"{options.max_model_len_tokens} tokens"
        )
    return budget_blocks


def _eos_token_ids(config: dict[str, Any]) -> frozenset[int]:
    told = config.get("eos_token_id")
    return frozenset(told if isinstance(told, list) else [] if told is None else [told])
