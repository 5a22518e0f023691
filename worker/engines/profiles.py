"""What a step of a simulated engine costs: latency profiles as data, from public facts or fitted by calibration.

A profile knows nothing of scheduling. Those that are shipped follow from the roofline of a model on a GPU: each
constant stands below with where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """The time of one step, and the limits that go with the hardware.

    `step_s + prefill_s_per_token * n + prefill_s_per_token_context * n * c + decode_s_per_seq * s
    + decode_s_per_context_token * d` for `n` prompt tokens that see `c` tokens each in the mean, and `s` sequences that
    decode over `d` tokens of context together.
    """

    name: str
    step_s: float
    """What every step costs, whatever is in it: reading the weights once, the scheduler, launches."""
    prefill_s_per_token: float
    prefill_s_per_token_context: float
    """Attention: for each pair of a prompt token and a token before it."""
    decode_s_per_seq: float
    decode_s_per_context_token: float
    """Reading the keys and values of one token of context."""
    request_s: float = 0.0
    """Until a step can take a request, beside the steps of others: its way into the engine's process, which they go
    one after another, and that of its first token out of it."""
    step_budget_tokens: int = 2048
    """Most tokens in one step: vLLM's `max_num_batched_tokens`."""
    max_num_seqs: int = 256
    kv_capacity_tokens: int | None = None
    """Tokens whose keys and values fit beside the weights; None where nothing is known of it."""

    def __post_init__(self) -> None:
        for name in (*_TIMES, "request_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0.0 <= value < float("inf"):
                raise ConfigError(f"profile {self.name}: {name}: {value!r} is not a time; it must be 0 or more seconds")
        if self.step_s + self.prefill_s_per_token <= 0.0 or self.step_s + self.decode_s_per_seq <= 0.0:
            raise ConfigError(f"profile {self.name}: a step must take time, but step_s and a cost for each token are 0")
        for name in ("step_budget_tokens", "max_num_seqs", "kv_capacity_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"profile {self.name}: {name}: {value!r} is not a positive number")

    def scaled(self, factor: float) -> LatencyProfile:
        """The same hardware, `factor` times slower."""
        return replace(self, **{name: getattr(self, name) * factor for name in (*_TIMES, "request_s")})

    def to_yaml(self) -> str:
        """What `load_profile` reads back."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


_TIMES = (
    "step_s",
    "prefill_s_per_token",
    "prefill_s_per_token_context",
    "decode_s_per_seq",
    "decode_s_per_context_token",
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU. Peaks are from NVIDIA's data sheets, dense, without sparsity."""

    peak_flops: float
    """bf16 and fp16, on tensor cores."""
    bandwidth_bytes_per_s: float
    flops_share: float
    """What a prefill of thousands of tokens gets of the peak. Model FLOPs utilisation of large dense matrix products is
    0.55 to 0.65 on A100 (MLPerf; FlashAttention-2, arXiv 2307.08691, table of end-to-end training) and 0.4 to 0.55 on
    H100, whose peak is harder to feed (FlashAttention-3, arXiv 2407.08608)."""
    memory_bytes: float
    """As the driver shows it."""
    step_budget_tokens: int
    max_num_seqs: int
    """Both as vLLM 0.32 defaults for its server (`EngineArgs.get_batch_defaults`)."""


_A100 = _Gpu(312e12, 2.039e12, 0.60, 85.0e9, step_budget_tokens=2048, max_num_seqs=256)
"""NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s."""
_H100 = _Gpu(989e12, 3.35e12, 0.50, 85.0e9, step_budget_tokens=8192, max_num_seqs=1024)
"""NVIDIA H100 SXM data sheet: 1,979 TFLOP/s with sparsity, so 989 dense; 3.35 TB/s."""

_BANDWIDTH_SHARE = 0.80
"""What streaming kernels get of a GPU's memory bandwidth: 0.8 to 0.9 in BabelStream."""
_STEP_OVERHEAD_S = 2e-3
"""Scheduler, sampling and launches that the GPU does not hide. An assumption: vLLM V1 aims below this."""
_SEQUENCE_OVERHEAD_S = 2e-5
"""Scheduling and sampling of one more sequence. An assumption; its matrix products hide behind the weights' way until
some 150 (A100) to 300 (H100) sequences decode at once."""
_GPU_MEMORY_UTILIZATION = 0.9
"""vLLM's default."""
_WORKSPACE_BYTES = 5.5e9
"""Activations of a profiling run, CUDA graphs, the context. An assumption that gives the usual 45 GB for the cache."""

_13B_PARAMETERS = 13e9
"""Llama 2 13B: 13.0e9 parameters, 40 layers, hidden size 5,120, 40 key-value heads of 128, no grouped queries."""
_13B_BYTES_PER_PARAMETER = 2
_13B_LAYERS, _13B_HIDDEN = 40, 5120
_13B_KV_BYTES_PER_TOKEN = 2 * _13B_LAYERS * _13B_HIDDEN * 2
"""Keys and values, 2 bytes each: 819,200."""


def _roofline_13b(name: str, gpu: _Gpu) -> LatencyProfile:
    flops = gpu.peak_flops * gpu.flops_share
    bandwidth = gpu.bandwidth_bytes_per_s * _BANDWIDTH_SHARE
    weights_bytes = _13B_PARAMETERS * _13B_BYTES_PER_PARAMETER
    cache_bytes = gpu.memory_bytes * _GPU_MEMORY_UTILIZATION - weights_bytes - _WORKSPACE_BYTES
    return LatencyProfile(
        name,
        step_s=weights_bytes / bandwidth + _STEP_OVERHEAD_S,
        # A multiplication and an addition for each parameter.
        prefill_s_per_token=2 * _13B_PARAMETERS / flops,
        # Scores and weighted values: two products, each a multiplication and an addition for each of a layer's numbers.
        prefill_s_per_token_context=4 * _13B_LAYERS * _13B_HIDDEN / flops,
        decode_s_per_seq=_SEQUENCE_OVERHEAD_S,
        decode_s_per_context_token=_13B_KV_BYTES_PER_TOKEN / bandwidth,
        step_budget_tokens=gpu.step_budget_tokens,
        max_num_seqs=gpu.max_num_seqs,
        kv_capacity_tokens=int(cache_bytes / _13B_KV_BYTES_PER_TOKEN),
    )


PROFILES: Mapping[str, LatencyProfile] = MappingProxyType(
    {profile.name: profile for profile in (_roofline_13b("13b-a100", _A100), _roofline_13b("13b-h100", _H100))}
)
"""Shipped profiles by name."""


def load_profile(name: str) -> LatencyProfile:
    """The shipped profile of that name, or the one in the YAML or JSON file of that path. Raises `ConfigError`."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name).expanduser()
    try:
        document = _read(path)
    except OSError as error:
        shipped = ", ".join(PROFILES)
        raise ConfigError(f"--profile: {name}: neither a profile ({shipped}) nor a file: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--profile: {path} is neither YAML nor JSON: {error}") from None
    return _profile_of(document, path)


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    # YAML of PyYAML is no superset of JSON: it takes a number like 5e-9 for a word.
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def _profile_of(document: Any, path: Path) -> LatencyProfile:
    known = {field.name for field in fields(LatencyProfile)}
    if not isinstance(document, dict):
        raise ConfigError(f"--profile: {path} holds no mapping of names to values")
    unknown = sorted(map(str, document.keys() - known))
    missing = sorted({"name", *_TIMES} - document.keys())
    if unknown or missing:
        what = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
        raise ConfigError(f"--profile: {path}: {'; '.join(what)}")
    if not isinstance(document["name"], str):
        raise ConfigError(f"--profile: {path}: name: {json.dumps(document['name'])} is not a name")
    try:
        return LatencyProfile(**document)
    except ConfigError as error:
        raise ConfigError(f"--profile: {path}: {error}") from None
