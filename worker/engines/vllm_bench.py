"""Measures what our scheduler costs over vLLM's own: the same requests through both, without an engine or a model."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from shared.errors import ConfigError
from shared.types import CacheScheme
from worker.engines import vllm_scheduler
from worker.engines.tiny_model import write_tiny_model
from worker.engines.vllm_launch import prepare_launch
from worker.engines.vllm_options import VllmOptions

_BLOCK_SIZE_TOKENS = 64
_NUM_BLOCKS = 768
_MAX_NUM_SEQS = 32
_NUM_PREFIXES = 12
_PREFIX_BLOCKS = range(4, 17)
_SHARE_WITH_PREFIX = 0.8
_TAIL_TOKENS = range(16, 513)
_ANSWER_TOKENS = range(32, 257)
_STEPS_BETWEEN_ARRIVALS = 6.0

_STEPS_IN_TURN = 100

_STOCK, _STOCK_SILENT, _OURS = "stock", "stock_without_events", "ours"


@dataclass(frozen=True, slots=True)
class _Arrival:
    step: int
    prompt: list[int]
    max_tokens: int


async def measure_schedule_overhead(seed: int, num_requests: int, num_rounds: int) -> dict[str, float]:
    """Processor time of a step under our scheduler over that under vLLM's own, which reports KV events as ours does.

    A step is `add_request`, `schedule` and `update_from_output`; some 20 sequences run at once, with prefixes found and
    blocks evicted. All variants serve the same requests in each round, a few steps of each in turn; of each step the
    fastest round counts. The spread is that of single rounds.

    Raises:
        ConfigError: our scheduler does not fit this vLLM.
    """
    init_none_hash(sha256_cbor)
    arrivals = _arrivals(random.Random(seed), num_requests)
    rounds: list[dict[str, list[int]]] = []
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        make = _scheduler_makers(Path(folder))
        order = deque(make)
        for _ in range(num_rounds):
            gc.collect()
            rounds.append(_run_in_turn({name: make[name]() for name in order}, arrivals))
            order.rotate()  # whoever comes first may pay for what the round before left behind
            await asyncio.sleep(0)
    fastest = {name: [min(step) for step in zip(*(each[name] for each in rounds), strict=True)] for name in make}
    ratios = [_mean(each[_OURS]) / _mean(each[_STOCK]) for each in rounds]
    return {
        "vllm_schedule_overhead_ratio": _mean(fastest[_OURS]) / _mean(fastest[_STOCK]),
        "vllm_schedule_overhead_ratio_min": min(ratios),
        "vllm_schedule_overhead_ratio_max": max(ratios),
        "vllm_schedule_ratio_to_stock_without_events": _mean(fastest[_OURS]) / _mean(fastest[_STOCK_SILENT]),
        "vllm_schedule_us_per_step": _mean(fastest[_OURS]) / 1e3,
        "vllm_schedule_stock_us_per_step": _mean(fastest[_STOCK]) / 1e3,
        "vllm_schedule_num_steps": len(fastest[_OURS]),
        "vllm_schedule_stock_num_steps": len(fastest[_STOCK]),
        "vllm_schedule_num_rounds": num_rounds,
    }


def _arrivals(rng: random.Random, num_requests: int) -> list[_Arrival]:
    """Prompts that begin with one of a few prefixes, popular as in Zipf's law, or with nothing known."""

    def tokens(num_tokens: int) -> list[int]:
        return [rng.randrange(5, 300) for _ in range(num_tokens)]

    prefixes = [tokens(rng.choice(_PREFIX_BLOCKS) * _BLOCK_SIZE_TOKENS) for _ in range(_NUM_PREFIXES)]
    weights = [1.0 / rank for rank in range(1, _NUM_PREFIXES + 1)]
    arrivals, step = [], 0.0
    for _ in range(num_requests):
        step += rng.expovariate(1.0 / _STEPS_BETWEEN_ARRIVALS)
        prefix = rng.choices(prefixes, weights)[0] if rng.random() < _SHARE_WITH_PREFIX else []
        arrivals.append(_Arrival(int(step), prefix + tokens(rng.choice(_TAIL_TOKENS)), rng.choice(_ANSWER_TOKENS)))
    return arrivals


def _scheduler_makers(folder: Path) -> dict[str, Callable[[], Scheduler]]:
    """Schedulers as an engine of ours would have them, but that their events go nowhere."""
    write_tiny_model(folder)
    scheme = CacheScheme("bench", _BLOCK_SIZE_TOKENS)
    options = VllmOptions(folder, scheme, max_num_seqs=_MAX_NUM_SEQS, kv_cache_blocks=_NUM_BLOCKS)
    prepared = prepare_launch(options, folder)
    if not prepared.has_plugin:
        raise ConfigError(f"eviction rule: {prepared.eviction}")
    config = prepared.config
    config.cache_config.num_gpu_blocks = _NUM_BLOCKS
    config.scheduler_config.async_scheduling = False
    silent = copy(config)
    silent.kv_events_config = None
    assert config.kv_events_config is not None
    config.kv_events_config.publisher = "null"
    spec = FullAttentionSpec(block_size=_BLOCK_SIZE_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)

    def make(scheduler: Callable[..., Scheduler], config: VllmConfig) -> Scheduler:
        return scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=_NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=_BLOCK_SIZE_TOKENS,
            log_stats=True,
        )

    return {
        _STOCK: lambda: make(Scheduler, config),
        _STOCK_SILENT: lambda: make(Scheduler, silent),
        _OURS: lambda: make(vllm_scheduler.scheduler, config),
    }


def _run_in_turn(name_to_scheduler: dict[str, Scheduler], arrivals: list[_Arrival]) -> dict[str, list[int]]:
    durations_ns: dict[str, list[int]] = {name: [] for name in name_to_scheduler}
    name_to_run = {name: _run(scheduler, arrivals) for name, scheduler in name_to_scheduler.items()}
    turn = deque(name_to_run)
    while turn:
        name = turn.popleft()
        steps = list(islice(name_to_run[name], _STEPS_IN_TURN))
        durations_ns[name] += steps
        if steps:
            turn.append(name)
    return durations_ns


def _run(scheduler: Scheduler, arrivals: list[_Arrival]) -> Iterator[int]:
    """Serve all requests; gives the nanoseconds of processor time of each step."""
    hasher = get_request_block_hasher(_BLOCK_SIZE_TOKENS, sha256_cbor)
    requests = [
        Request(
            request_id=f"request-{number}",
            prompt_token_ids=arrival.prompt,
            sampling_params=SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        for number, arrival in enumerate(arrivals)
    ]
    num_arrived = step = 0
    while num_arrived < len(requests) or scheduler.has_unfinished_requests():
        started_ns = time.thread_time_ns()
        while num_arrived < len(requests) and arrivals[num_arrived].step <= step:
            scheduler.add_request(requests[num_arrived])
            num_arrived += 1
        scheduled = scheduler.schedule()
        computing_ns = time.thread_time_ns()
        computed = _compute(scheduler, list(scheduled.num_scheduled_tokens), token=step % 300)
        computed_ns = time.thread_time_ns()
        scheduler.update_from_output(scheduled, computed)
        yield time.thread_time_ns() - computed_ns + computing_ns - started_ns
        step += 1
    if unfinished := [request.request_id for request in requests if not request.is_finished()]:
        raise AssertionError(f"not served: {', '.join(unfinished)}")


def _compute(scheduler: Scheduler, request_ids: list[str], token: int) -> ModelRunnerOutput:
    """What a model would give: a token for each request whose prompt is done."""
    sampled = []
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        sampled.append([token] if request.num_computed_tokens >= request.num_tokens else [])
    return ModelRunnerOutput(request_ids, {name: index for index, name in enumerate(request_ids)}, sampled)


def _mean(durations_ns: list[int]) -> float:
    return sum(durations_ns) / len(durations_ns)
