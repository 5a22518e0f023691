"""What a user may say about a vLLM engine, and the vLLM arguments that follow from it on a GPU and on a CPU."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.errors import ConfigError
from shared.types import CacheScheme

CPU_BLOCK_MULTIPLE_TOKENS = 32
"""vLLM's attention on CPUs takes no other block sizes."""
CPU_CACHE_BYTES = 1 << 30
"""KV cache on a CPU when nothing is said: vLLM itself would ask for nearly all memory of the machine."""
_UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_OWNED_ARGUMENTS: dict[str, str] = {
    "model": "--model",
    "tokenizer": "--model",
    "block_size": "--block-size",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "num_gpu_blocks_override": "--kv-cache-blocks",
    "kv_cache_memory_bytes": "--kv-cache-bytes",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "tensor_parallel_size": "--tensor-parallel-size",
    "dtype": "--dtype",
    "reasoning_parser": "--reasoning-parser",
    "scheduler_cls": "--eviction",
    "data_parallel_size": "--workers",
    "seed": "--seed",
    "additional_config": "",
    "disable_log_stats": "",
    "enable_logging_iteration_details": "",
    "enable_prefix_caching": "",
    "kv_events_config": "",
    "scheduling_policy": "",
}
"""Arguments that kvroute sets itself, with the flag that sets them where there is one."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """One engine. Fields that are also settings mean what they mean there."""

    model_dir: Path
    scheme: CacheScheme
    max_model_len: int | None = None
    max_num_seqs: int = 8
    kv_cache_blocks: int | None = None
    """Blocks that sequences can use; vLLM's own placeholder block comes on top."""
    kv_cache_bytes: int | None = None
    pin_budget_blocks: int | None = None
    """Most blocks that pins may hold together; None for `pins.default_budget_blocks`."""
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    eviction: str = "adaptive"
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    start_timeout_s: float = 600.0
    step_timeout_s: float = 600.0
    """A step that takes longer will never end: the longest honest one, a full budget of a large model's prompt on a
    small CPU, takes minutes."""
    log_level: str = "warning"


def engine_arguments(
    options: VllmOptions, known_arguments: set[str], *, is_cpu: bool, cpu_dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Arguments for vLLM but for events, plugin and logging. What the user passes through wins over defaults of ours.

    `cpu_dtype` is the type that suits the CPU, for options that name none.

    Raises:
        ConfigError: an argument is unknown to vLLM or is kvroute's, or a value does not fit the platform.
    """
    passed = _check_passed_through(options.engine_args, known_arguments)
    defaults: dict[str, Any] = {"use_tqdm_on_load": False}
    owned: dict[str, Any] = {
        "model": str(options.model_dir),
        "block_size": options.scheme.block_size_tokens,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtype": options.dtype,
        "seed": options.seed,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,
        "scheduling_policy": "priority",
    }
    if options.reasoning_parser:
        owned["reasoning_parser"] = options.reasoning_parser
    if options.kv_cache_blocks is not None:
        owned["num_gpu_blocks_override"] = options.kv_cache_blocks + 1
    if options.kv_cache_bytes is not None:
        owned["kv_cache_memory_bytes"] = options.kv_cache_bytes
    if is_cpu:
        if options.scheme.block_size_tokens % CPU_BLOCK_MULTIPLE_TOKENS:
            raise ConfigError(
                f"--block-size: {options.scheme.block_size_tokens} does not work on a CPU, "
                f"where it must be a multiple of {CPU_BLOCK_MULTIPLE_TOKENS}"
            )
        # Without a number vLLM takes a share of all memory, and fails where that is not free.
        owned.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        if options.dtype == "auto":
            owned["dtype"] = cpu_dtype
        # Compiling takes over a minute on a CPU and gains nothing there.
        defaults["enforce_eager"] = True
        if options.tensor_parallel_size == 1:
            # By its full name, since the short one becomes another process with its own binding of threads.
            defaults["distributed_executor_backend"] = _UNIPROC_EXECUTOR
    else:
        owned["gpu_memory_utilization"] = options.gpu_memory_utilization
        if options.tensor_parallel_size > 1:
            # All GPUs of a worker are on its node. By itself vLLM would ask Ray for more bundles than the group has.
            defaults["distributed_executor_backend"] = "mp"
    return defaults | passed | owned


def check_context_fits(options: VllmOptions, context_tokens: int) -> None:
    """Raises `ConfigError` if the asked blocks cannot hold one longest request; vLLM refuses that without our words."""
    if options.kv_cache_blocks is None:
        return
    capacity_tokens = options.kv_cache_blocks * options.scheme.block_size_tokens
    if capacity_tokens < context_tokens:
        raise ConfigError(
            f"--kv-cache-blocks: {options.kv_cache_blocks} blocks of {options.scheme.block_size_tokens} tokens "
            f"hold {capacity_tokens} tokens, less than one request of --max-model-len {context_tokens}"
        )


def check_pin_budget(options: VllmOptions, num_blocks: int, context_tokens: int) -> None:
    """Raises `ConfigError` if the asked budget for pins is in vain, or leaves no room for one longest request.

    Such a request would wait for ever.
    """
    budget_blocks, block_size_tokens = options.pin_budget_blocks, options.scheme.block_size_tokens
    if not budget_blocks:
        return
    if options.eviction == "stock":
        raise ConfigError(f"--pin-budget-blocks: {budget_blocks} blocks cannot be pinned under --eviction stock")
    longest_blocks = -(-context_tokens // block_size_tokens)
    if budget_blocks > num_blocks - longest_blocks:
        raise ConfigError(
            f"--pin-budget-blocks: {budget_blocks} of {num_blocks} blocks leave no room for one request of "
            f"--max-model-len {context_tokens}, which takes {longest_blocks} blocks of {block_size_tokens} tokens; "
            f"at most {max(0, num_blocks - longest_blocks)} can be pinned"
        )


def check_bytes_fit(cache_bytes: int, block_size_tokens: int, context_tokens: int, *, bytes_per_token: int) -> None:
    """Raises `ConfigError` if a cache of so many bytes cannot hold one longest request and vLLM's placeholder block.

    vLLM counts its placeholder as room, which a request that needs all blocks then lacks.
    """
    block_bytes = block_size_tokens * bytes_per_token
    num_blocks = max(0, cache_bytes // block_bytes - 1)
    num_needed = -(-context_tokens // block_size_tokens)
    if num_blocks < num_needed:
        raise ConfigError(
            f"--kv-cache-bytes: {cache_bytes} bytes hold {num_blocks} blocks of {block_size_tokens} tokens, "
            f"{num_blocks * block_size_tokens} tokens, less than one request of --max-model-len {context_tokens}; "
            f"{(num_needed + 1) * block_bytes} bytes hold one, at {block_bytes} for a block"
        )


def vllm_log_level(log_level: str) -> Literal["INFO", "WARNING", "ERROR"]:
    """vLLM's level for a level of ours: one stricter, since it warns a dozen times in a healthy start."""
    if log_level == "debug":
        return "INFO"
    return "WARNING" if log_level == "info" else "ERROR"


def logging_config_file(folder: Path, level: str, errors: Path) -> Path:
    """Write a logging configuration for vLLM into `folder`: its lines to stderr, and errors to a file as well.

    An engine that dies in another process leaves its cause there and nowhere else.
    """
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "()": "vllm.logging_utils.NewLineFormatter",
                "format": "(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] "
                "%(message)s",
                "datefmt": "%m-%d %H:%M:%S",
            },
            "bare": {"format": "%(message)s"},
        },
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"},
            "errors": {
                "class": "logging.FileHandler",
                "formatter": "bare",
                "level": "ERROR",
                "filename": str(errors),
                "delay": True,
            },
        },
        "loggers": {
            "vllm": {"handlers": ["stderr", "errors"], "level": level, "propagate": False},
        },
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(config))
    return path


def _check_passed_through(engine_args: Mapping[str, Any], known_arguments: set[str]) -> dict[str, Any]:
    passed = {name.replace("-", "_"): value for name, value in engine_args.items()}
    for name in passed:
        if name in _OWNED_ARGUMENTS:
            flag = _OWNED_ARGUMENTS[name]
            raise ConfigError(f"--engine-args: {name!r} is set by {flag or 'kvroute itself'}")
        if name not in known_arguments:
            near = difflib.get_close_matches(name, known_arguments, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"--engine-args: vLLM has no argument {name!r}{hint}")
    return passed
