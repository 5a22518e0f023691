"""Turns options into a running vLLM: configuration, plugin or not, environment and log of the engine's process.

Everything here blocks, for seconds or longer, and is called in a thread.
"""

from __future__ import annotations

import gc
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.environment import inherited
from shared.errors import ConfigError
from worker.engines.vllm_keys import refusal_of_model
from worker.engines.vllm_options import (
    VllmOptions,
    check_bytes_fit,
    check_context_fits,
    check_pin_budget,
    engine_arguments,
    logging_config_file,
    vllm_log_level,
)
from worker.engines.vllm_reader import check_parsers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats

logger = logging.getLogger(__name__)

_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$", re.MULTILINE)
_CONTEXT_REFUSAL = re.compile(r"greater than the derived max_model_len \(\w+=(\d+)")
_REPLAY_BATCHES = 10_000


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is known before the engine's process starts."""

    folder: Path
    """The engine's own, for sockets and logs."""
    config: VllmConfig
    endpoint: str
    """Where the engine publishes its KV events."""
    replay_endpoint: str
    """Where it publishes them again when asked."""
    eviction: str
    """The rule that will be in force, or why the asked one will not."""
    has_plugin: bool


def _cpu_dtype() -> str:
    """The type that this CPU computes fastest: x86 without AVX-512 takes five times as long over bfloat16."""
    import torch

    return "float32" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "bfloat16"


def prepare_launch(options: VllmOptions, folder: Path) -> Launch:
    """Everything that vLLM can check before it starts a process. Imports vLLM.

    Raises:
        ConfigError: an option does not work, here or at all.
        Exception: whatever vLLM raises on a model or a value that it does not take.
    """
    with inherited(_child_environment(options, folder)):
        with _garbage_left_alone():
            from vllm.config import KVEventsConfig, StructuredOutputsConfig
            from vllm.config.logging import LoggingConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401 (of all that it needs)

        check_parsers(options)
        known = {argument.name for argument in fields(AsyncEngineArgs)}
        arguments = engine_arguments(options, known, is_cpu=current_platform.is_cpu(), cpu_dtype=_cpu_dtype())
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{folder}/events",
            replay_endpoint=f"ipc://{folder}/replay",
            buffer_steps=_REPLAY_BATCHES,
        )
        arguments["kv_events_config"] = events
        # By its name: left to choose for each request, vLLM would check one schema by one library and then compile it
        # by that of the first request ever, which may know less of it.
        grammars = {"backend": "xgrammar", **arguments.get("structured_outputs_config", {})}
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**grammars)
        log_level = vllm_log_level(options.log_level)
        log_config = logging_config_file(folder, log_level, error_file(folder))
        arguments.setdefault(
            "logging_config", LoggingConfig(log_level=log_level, pylogging_config_file=str(log_config))
        )
        fallback_reason = _plug_in(options, arguments) if options.eviction != "stock" else None
        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except ValueError as error:
            if (found := _CONTEXT_REFUSAL.search(str(error))) is None:
                raise
            raise ConfigError(
                f"--max-model-len: {options.max_model_len} tokens are more than the model's own context, {found[1]}"
            ) from error
    check_context_fits(options, config.model_config.max_model_len)
    if options.kv_cache_blocks is None:
        _check_bytes_fit(config)
    else:
        check_pin_budget(options, options.kv_cache_blocks, config.model_config.max_model_len)
    return Launch(
        folder,
        config,
        events.endpoint,
        str(events.replay_endpoint),
        options.eviction if fallback_reason is None else f"stock ({fallback_reason})",
        has_plugin=options.eviction != "stock" and fallback_reason is None,
    )


def launch(options: VllmOptions, prepared: Launch, record_step: Callable[[SchedulerStats], None]) -> AsyncLLM:
    """Start the engine's process and wait until the model is loaded.

    Raises:
        Exception: whatever vLLM raises; the cause is often only in the process's log, see `logged_cause`.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    with inherited(_child_environment(options, prepared.folder)):
        return AsyncLLM.from_vllm_config(
            prepared.config, stat_loggers=[_recorder_type(record_step)], disable_log_stats=True
        )


def error_file(folder: Path) -> Path:
    """Where the engine's process logs its errors; appears with the first one."""
    return folder / "errors.log"


def logged_cause(folder: Path) -> str | None:
    """The first exception that the engine's process logged."""
    try:
        logged = error_file(folder).read_text(errors="replace")
    except OSError:
        return None
    found = _ERROR_LINE.search(logged)
    return found[0] if found else None


def _check_bytes_fit(config: VllmConfig) -> None:
    """Raises `ConfigError` before the start for what the engine's process would find after loading the model.

    Says nothing where the bytes are not given, or a cache is not one key and one value for each head of each layer.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache = config.model_config, config.cache_config
    if cache.kv_cache_memory_bytes is None or model.use_mla or refusal_of_model(model) is not None:
        return
    num_layers = model.get_num_layers(config.parallel_config)
    num_heads = model.get_num_kv_heads(config.parallel_config)
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    check_bytes_fit(
        cache.kv_cache_memory_bytes,
        cache.block_size,
        model.max_model_len,
        bytes_per_token=2 * num_layers * num_heads * model.get_head_size() * dtype.itemsize,
    )


def _plug_in(options: VllmOptions, arguments: dict[str, Any]) -> str | None:
    """Add our block pool to the arguments, or say why not. Modifies `arguments`."""
    try:
        from worker.engines import vllm_scheduler

        reason = vllm_scheduler.check_surface()
    except ImportError as error:
        reason = f"this vLLM lacks what the plugin imports: {error}"
    if reason is not None:
        logger.error("eviction rule %s is NOT in force, vLLM's own pool is used: %s", options.eviction, reason)
        return reason
    arguments["scheduler_cls"] = vllm_scheduler.QUALIFIED_NAME
    arguments["additional_config"] = vllm_scheduler.plugin_config(
        options.scheme, options.eviction, options.pin_budget_blocks
    )
    return None


def _child_environment(options: VllmOptions, folder: Path) -> dict[str, str]:
    """What vLLM can only be told by its environment."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        # Its sockets go with the folder; in the system's they would stay for ever.
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(options.start_timeout_s))),
        # A forked child would inherit this process's threads' locks and event loop.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def ending_of(process: Any) -> str:
    """How a process ended whose pipe has just closed, to follow `the process ended`; empty if that cannot be told."""
    exit_code = _exit_code(process)
    if exit_code is None:
        return ""
    return f" with {signal.Signals(-exit_code).name}" if exit_code < 0 else f" with exit code {exit_code}"


def _exit_code(process: Any) -> int | None:
    """`None` if the code cannot be told within a tenth of a second.

    vLLM waits for the process in a thread of its own. Of two threads that wait, one finds no child any more, and the
    code only once the other has written it down.
    """
    for _ in range(100):
        process.join(0.001)
        if process.exitcode is not None:
            break
        time.sleep(0.001)
    code: int | None = process.exitcode
    return code


def _recorder_type(record_step: Callable[[SchedulerStats], None]) -> Any:
    """A stat logger that passes each step on, as vLLM wants it: something that makes one."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):
        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: SchedulerStats | None, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                record_step(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Recorder


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """For imports: they make objects by the million that all stay, and looking at them takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
