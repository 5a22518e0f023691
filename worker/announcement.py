"""What a worker says of itself: once, when it joins, and of its load ever after."""

from __future__ import annotations

from shared.hashing import parity_key
from shared.types import CacheScheme, Instance, WorkerId, WorkerInfo, WorkerStatus
from worker.engines.base import EngineInfo, EngineStats


def announced(
    engine_info: EngineInfo,
    *,
    worker: WorkerId,
    instance: Instance,
    address: str,
    scheme: CacheScheme,
    tokenizer_fingerprint: bytes,
) -> WorkerInfo:
    """What the directory is told of a worker's life."""
    return WorkerInfo(
        worker=worker,
        instance=instance,
        address=address,
        scheme=scheme,
        # Routers compare it with theirs; none of theirs is empty, so an engine without our keys matches nobody.
        parity_key=parity_key(scheme, tokenizer_fingerprint) if engine_info.is_cache_aware else b"",
        num_blocks=engine_info.num_blocks,
        max_num_seqs=engine_info.max_num_seqs,
        max_model_len_tokens=engine_info.max_model_len_tokens,
        engine=engine_info.name,
        eviction=engine_info.eviction,
        tells_blocks=engine_info.tells_blocks,
    )


def status_of(
    stats: EngineStats,
    engine_info: EngineInfo,
    *,
    num_unended: int,
    queued_prefill_tokens: int,
    num_resident_blocks: int,
    is_draining: bool = False,
) -> WorkerStatus:
    """The load: the engine's word, and the host's own for what the engine has not yet looked at."""
    # The engine tells its load with each step, so that its last word may be about requests that have ended since.
    num_running = min(stats.num_running, num_unended)
    pool = stats.pool
    return WorkerStatus(
        num_running=num_running + stats.num_foreign,
        num_waiting=num_unended - num_running,
        queued_prefill_tokens=queued_prefill_tokens,
        kv_used_blocks=stats.kv_used_blocks,
        kv_total_blocks=engine_info.num_blocks,
        prefill_s_per_token=stats.step_fit.prefill_s_per_token,
        step_s=stats.step_fit.step_s,
        decode_s_per_seq=stats.step_fit.decode_s_per_seq,
        step_budget_tokens=engine_info.step_budget_tokens,
        is_draining=is_draining,
        num_resident_blocks=num_resident_blocks,
        is_cache_aware=stats.is_cache_aware,
        kv_pinned_blocks=None if pool is None else pool.num_pinned,
        kv_shared_blocks=None if pool is None else pool.num_shared,
        kv_private_blocks=None if pool is None else pool.num_private,
    )
