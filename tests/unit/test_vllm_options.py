from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.types import CacheScheme
from worker.engines.vllm_launch import _cpu_dtype
from worker.engines.vllm_options import (
    CPU_CACHE_BYTES,
    VllmOptions,
    check_bytes_fit,
    check_context_fits,
    check_pin_budget,
    engine_arguments,
)

KNOWN = {"model", "block_size", "enforce_eager", "quantization", "distributed_executor_backend"}
OPTIONS = VllmOptions(Path("/models/m"), CacheScheme("m", 64))


def test_gpu_arguments_keep_a_tensor_parallel_group_on_its_node():
    options = replace(OPTIONS, max_model_len=4096, gpu_memory_utilization=0.8, tensor_parallel_size=2)
    assert engine_arguments(options, KNOWN, is_cpu=False) == {
        "model": "/models/m",
        "block_size": 64,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "tensor_parallel_size": 2,
        "dtype": "auto",
        "seed": 0,
        "gpu_memory_utilization": 0.8,
        "distributed_executor_backend": "mp",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,
        "scheduling_policy": "priority",
        "use_tqdm_on_load": False,
    }


def test_cpu_arguments():
    arguments = engine_arguments(OPTIONS, KNOWN, is_cpu=True)
    assert arguments["dtype"] == "bfloat16"
    assert arguments["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    assert arguments["enforce_eager"] is True
    assert arguments["distributed_executor_backend"].endswith(".UniProcExecutor")
    assert "gpu_memory_utilization" not in arguments


def test_asked_blocks_are_usable_blocks():
    arguments = engine_arguments(replace(OPTIONS, kv_cache_blocks=100), KNOWN, is_cpu=True)
    assert arguments["num_gpu_blocks_override"] == 101


def test_asked_bytes_are_taken():
    arguments = engine_arguments(replace(OPTIONS, kv_cache_bytes=5), KNOWN, is_cpu=True)
    assert arguments["kv_cache_memory_bytes"] == 5


def test_a_type_is_the_cpus_own_unless_one_is_named():
    slow_at_bfloat16 = {"is_cpu": True, "cpu_dtype": "float32"}
    assert engine_arguments(OPTIONS, KNOWN, **slow_at_bfloat16)["dtype"] == "float32"
    assert engine_arguments(replace(OPTIONS, dtype="bfloat16"), KNOWN, **slow_at_bfloat16)["dtype"] == "bfloat16"
    assert engine_arguments(replace(OPTIONS, dtype="float32"), KNOWN, is_cpu=True)["dtype"] == "float32"
    assert engine_arguments(OPTIONS, KNOWN, is_cpu=False, cpu_dtype="float32")["dtype"] == "auto"


@pytest.mark.parametrize(("capability", "dtype"), [("AVX2", "float32"), ("AVX512", "bfloat16"), ("SVE256", "bfloat16")])
def test_a_cpu_without_instructions_for_bfloat16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: str
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert _cpu_dtype() == dtype


@pytest.mark.parametrize("block_size", [16, 48, 80, 240])
def test_a_block_size_that_a_cpu_cannot_do_is_refused_with_the_flag(block_size: int):
    options = replace(OPTIONS, scheme=CacheScheme("m", block_size))
    message = f"--block-size: {block_size} does not work on a CPU, where it must be a multiple of 32"
    with pytest.raises(ConfigError, match=message):
        engine_arguments(options, KNOWN, is_cpu=True)
    assert engine_arguments(options, KNOWN, is_cpu=False)["block_size"] == block_size


def test_passed_arguments_go_through_and_win_over_defaults():
    options = replace(OPTIONS, engine_args={"quantization": "fp8", "enforce-eager": False})
    arguments = engine_arguments(options, KNOWN, is_cpu=True)
    assert (arguments["quantization"], arguments["enforce_eager"]) == ("fp8", False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("block_size", "--engine-args: 'block_size' is set by --block-size"),
        ("kv-events-config", "--engine-args: 'kv_events_config' is set by kvroute itself"),
        ("quantisation", "--engine-args: vLLM has no argument 'quantisation'; did you mean 'quantization'?"),
        ("zzz", "--engine-args: vLLM has no argument 'zzz'"),
    ],
)
def test_passed_arguments_that_collide_or_are_unknown_are_refused(name: str, message: str):
    with pytest.raises(ConfigError) as refused:
        engine_arguments(replace(OPTIONS, engine_args={name: 1}), KNOWN, is_cpu=True)
    assert str(refused.value) == message


def test_blocks_must_hold_one_longest_request():
    check_context_fits(replace(OPTIONS, kv_cache_blocks=16), 1024)
    with pytest.raises(ConfigError, match="--kv-cache-blocks: 15 blocks of 64 tokens hold 960 tokens, less than one"):
        check_context_fits(replace(OPTIONS, kv_cache_blocks=15), 1024)


def test_a_budget_for_pins_must_leave_room_for_one_longest_request():
    check_pin_budget(replace(OPTIONS, pin_budget_blocks=84), 100, 1000)
    with pytest.raises(ConfigError) as refused:
        check_pin_budget(replace(OPTIONS, pin_budget_blocks=85), 100, 1000)
    assert str(refused.value) == (
        "--pin-budget-blocks: 85 of 100 blocks leave no room for one request of --max-model-len 1000, "
        "which takes 16 blocks of 64 tokens; at most 84 can be pinned"
    )


def test_a_budget_for_pins_is_refused_where_a_stock_pool_keeps_none():
    check_pin_budget(replace(OPTIONS, eviction="stock", pin_budget_blocks=0), 100, 1000)
    with pytest.raises(ConfigError, match="--pin-budget-blocks: 10 blocks cannot be pinned under --eviction stock"):
        check_pin_budget(replace(OPTIONS, eviction="stock", pin_budget_blocks=10), 100, 1000)


def test_bytes_must_hold_one_longest_request_and_the_placeholder():
    check_bytes_fit(17 * 64 * 512, 64, 1024, bytes_per_token=512)
    with pytest.raises(ConfigError) as refused:
        check_bytes_fit(17 * 64 * 512 - 1, 64, 1024, bytes_per_token=512)
    assert str(refused.value) == (
        "--kv-cache-bytes: 557055 bytes hold 15 blocks of 64 tokens, 960 tokens, less than one request of "
        "--max-model-len 1024; 557056 bytes hold one, at 32768 for a block"
    )
    with pytest.raises(ConfigError, match="1 bytes hold 0 blocks of 64 tokens, 0 tokens"):
        check_bytes_fit(1, 64, 1024, bytes_per_token=512)
