"""What a changed setting means to workers that run: a refusal, their replacement, or nothing. Does not modify."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from router.runfile import Run
from shared import __version__
from shared.config import Settings, load_settings
from shared.errors import ConfigError
from shared.types import WorkerId

FIXED = ("model", "served_model_name", "block_size", "redis_url", "ray_address")
"""What a deployment is known by: block keys, directory and names of workers follow from it."""
OF_WORKERS = (
    "engine", "profile", "max_model_len", "max_num_seqs", "kv_cache_blocks", "kv_cache_bytes", "pin_budget_blocks",
    "gpu_memory_utilization", "tensor_parallel_size", "gpus_per_worker", "dtype", "eviction", "engine_args", "seed",
    "lease_s", "heartbeat_s", "audit_s", "cache_dir", "tool_call_parser", "reasoning_parser",
)  # fmt: skip
"""What a worker is told at its start: another value takes another worker."""
OF_STARTS = ("start_timeout_s", "log_level", "log_format")
"""What workers get that start from now on. No reason to replace those that run."""
OF_DEPLOYMENTS = frozenset({*FIXED, *OF_WORKERS, *OF_STARTS, "workers"})
"""What a deployment is made of; all other settings are those of routers and of single commands."""
_EXCLUSIVE = ("kv_cache_blocks", "kv_cache_bytes")


def given(settings: Settings) -> dict[str, Any]:
    """Those settings of a deployment that somebody has set, as plain values."""
    return settings.model_dump(mode="json", exclude_unset=True, include=set(OF_DEPLOYMENTS))


def build_of(settings: Settings) -> str:
    """Stands for all that a worker is made of: equal builds need no replacement."""
    made_of = settings.model_dump(mode="json", include=set(OF_WORKERS))
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()
    return f"{__version__}-{digest[:16]}"


def outdated(run: Run, build: str | None = None) -> list[WorkerId]:
    """Workers that are made otherwise than `build`, which is what the run's settings say by default; oldest first."""
    build = build or build_of(Settings(**run.settings))
    return [WorkerId(worker) for worker in run.workers if run.worker_to_build.get(worker) != build]


def changed(run: Run, settings: Settings) -> dict[str, Any]:
    """The settings of a deployment once it is as it is asked for. What is not given stays as it is.

    Raises:
        ConfigError: a setting cannot change while workers run, or does not go with the others; names it.
    """
    asked = given(settings)
    running = Settings(**run.settings)
    for name in FIXED:
        if name in asked and not _is_same(name, settings, running, run):
            raise ConfigError(
                f"{_flag(name)}: {_text(asked[name])} cannot take the place of {_text(getattr(running, name))} while "
                "the deployment runs; `kvroute down` ends it, and another --run-dir has room for a second one"
            )
        asked.pop(name, None)
    kept = dict(run.settings)
    for name, other in (_EXCLUSIVE, _EXCLUSIVE[::-1]):
        if asked.get(name) is not None and other not in asked:
            kept.pop(other, None)
    merged = {**kept, **asked}
    load_settings(flags=merged, environment={})
    return merged


def differences(former: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """What differs between two of a deployment's settings, one line each."""
    before, after = Settings(**former), Settings(**later)
    return [
        f"{_flag(name)}: {_text(getattr(before, name))} -> {_text(getattr(after, name))}"
        for name in ("workers", *OF_WORKERS)
        if getattr(before, name) != getattr(after, name)
    ]


def _is_same(name: str, settings: Settings, running: Settings, run: Run) -> bool:
    """Whether a fixed setting is asked for as it is, in whatever words."""
    asked = getattr(settings, name)
    if name == "served_model_name":
        return (asked or settings.model or running.model) == running.model_name
    return asked == getattr(running, name) or (name in ("redis_url", "ray_address") and asked == getattr(run, name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    if value is None:
        return "the default"
    return json.dumps(value) if isinstance(value, dict) else str(value) or "none"
