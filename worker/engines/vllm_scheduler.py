"""The plugin that brings our block pool into vLLM's engine process, and the check that this vLLM is one we know.

vLLM is told the name of `scheduler` in this module (`scheduler_cls`) and calls it in the engine's process. The worker's
process asks it through `EngineCore.kvr`. What this relies on beyond vLLM's public interface is listed in `_SURFACE`.
"""

from __future__ import annotations

import inspect
import time
from functools import reduce
from operator import xor
from typing import Any, cast

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, EventPublisher, KVEventBatch
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_kind
from vllm.v1.request import Request

from shared.types import CacheScheme
from worker.engines.vllm_pool import FreeQueue, KeyedBlockPool

QUALIFIED_NAME = f"{__name__}.scheduler"
CONFIG_KEY = "kvr"
KNOWN_VERSIONS = ("0.32.",)

_SURFACE: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (BlockPool, "__init__", ("num_gpu_blocks", "enable_caching", "hash_block_size", "enable_kv_cache_events")),
    (
        BlockPool,
        "cache_full_blocks",
        (
            "request",
            "blocks",
            "num_cached_blocks",
            "num_full_blocks",
            "block_size",
            "kv_cache_group_id",
            "block_mask",
        ),
    ),
    (BlockPool, "touch", ("blocks",)),
    (BlockPool, "free_blocks", ("ordered_blocks",)),
    (BlockPool, "get_cached_block", ("block_hash", "kv_cache_group_ids")),
    (BlockPool, "reset_prefix_cache", ()),
    (BlockPool, "_remove_cached_block_hashes", ("block",)),
    (BlockPool, "_emit_block_removed_events", ("block_hashes",)),
    (BlockPool, "_maybe_evict_cached_block", ("block",)),
    (BlockHashToBlockMap, "get_one_block", ("key",)),
    (KVCacheCoordinator, "allocate_new_computed_blocks", ("request_id", "new_computed_blocks")),
    (KVCacheManager, "take_events", ()),
    (KVCacheManager, "reset_prefix_cache", ()),
    (EventPublisher, "publish", ("events",)),
    (Scheduler, "add_request", ("request",)),
    (Scheduler, "reset_prefix_cache", ("reset_running_requests", "reset_connector")),
)
"""Owner, method and the first of its parameters, in order."""


def check_surface() -> str | None:
    """Why our pool must not be put into this vLLM; None if everything that it relies on is there as it should be."""
    if not vllm.__version__.startswith(KNOWN_VERSIONS):
        return f"vLLM {vllm.__version__} is not one of {', '.join(f'{known}x' for known in KNOWN_VERSIONS)}"
    for owner, name, expected in _SURFACE:
        method = getattr(owner, name, None)
        if method is None:
            return f"{owner.__name__}.{name} is missing"
        found = tuple(inspect.signature(method).parameters)[1:]
        if found[: len(expected)] != expected:
            return f"{owner.__name__}.{name} takes ({', '.join(found)}), expected was ({', '.join(expected)}, ...)"
    queue_methods = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    if missing := queue_methods - set(vars(FreeQueue)):
        return f"FreeKVCacheBlockQueue has {', '.join(sorted(missing))}, which our queue does not"
    for struct, fields in (
        (BlockStored, {"block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "lora_name"}),
        (BlockRemoved, {"block_hashes", "medium"}),
    ):
        if missing := fields - set(struct.__struct_fields__):
            return f"{struct.__name__} has no {', '.join(sorted(missing))}"
    if not {"block_id", "ref_cnt", "is_null"} <= set(KVCacheBlock.__dataclass_fields__):
        return "KVCacheBlock has other fields"
    return None


def plugin_config(scheme: CacheScheme, rule: str) -> dict[str, Any]:
    """What goes into vLLM's `additional_config` for `scheduler` to find in the engine's process."""
    return {
        CONFIG_KEY: {
            "rule": rule,
            "model": scheme.model,
            "block_size_tokens": scheme.block_size_tokens,
            "key_version": scheme.key_version,
        }
    }


def scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """The scheduler of an engine, synchronous or not as vLLM decided. Called by vLLM, in the engine's process."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.kvr = _serve  # type: ignore[attr-defined]
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncKeyedScheduler if is_async else _KeyedScheduler)(vllm_config=vllm_config, **kwargs)


def _serve(engine_core: Any, operation: str) -> Any:
    """What the worker's process may ask: `groups`, `snapshot`, `digest`, `statistics`, `evict_all_free`."""
    return getattr(engine_core.scheduler, f"kvr_{operation}")()


class _CountingPublisher(EventPublisher):
    """Counts what goes through to vLLM's publisher, whose sequence numbers count the same from 0."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self.num_published = 0

    def publish(self, events: EventBatch) -> None:
        self._publisher.publish(events)
        self.num_published += 1

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        return self._publisher.get_publisher_config()


class _KeyedPoolMixin:
    """A scheduler whose pool is ours."""

    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    kv_event_publisher: EventPublisher

    def __init__(self, vllm_config: VllmConfig, **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]
        config = vllm_config.additional_config[CONFIG_KEY]  # type: ignore[index]
        scheme = CacheScheme(config["model"], config["block_size_tokens"], config["key_version"])
        self._kvr_pool = KeyedBlockPool.adopt(self.kv_cache_manager, config["rule"], scheme)
        self._kvr_publisher = _CountingPublisher(self.kv_event_publisher)
        self.kv_event_publisher = self._kvr_publisher

    def add_request(self, request: Request) -> None:
        """As vLLM's; the blocks that the request will find count as just used from now on."""
        super().add_request(request)  # type: ignore[misc]
        self._kvr_pool.expect(request)

    def kvr_groups(self) -> list[tuple[str, int]]:
        """Kind and block size of each group of the cache."""
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        return [(get_kv_cache_spec_kind(spec).value, spec.block_size) for spec in specs]

    def kvr_snapshot(self) -> dict[str, Any]:
        """The pool's content at an exact place in the event stream: after the first `num_published` batches."""
        self._kvr_publish()
        hashes, keys = self._kvr_pool.snapshot()
        return {"num_published": self._kvr_publisher.num_published, "hashes": hashes, "keys": b"".join(keys)}

    def kvr_digest(self) -> dict[str, Any]:
        """A checksum of the same content: all keys, as big-endian numbers, exclusive-ored."""
        self._kvr_publish()
        _, keys = self._kvr_pool.snapshot()
        distinct = set(keys)
        digest = reduce(xor, (int.from_bytes(key, "big") for key in distinct), 0)
        return {
            "num_published": self._kvr_publisher.num_published,
            "num_keys": len(distinct),
            "digest": digest.to_bytes(16, "big"),
        }

    def kvr_statistics(self) -> dict[str, Any]:
        return self._kvr_pool.statistics()

    def kvr_evict_all_free(self) -> None:
        self._kvr_pool.evict_all_free()
        self._kvr_publish()

    def _kvr_publish(self) -> None:
        """vLLM publishes with a step only; what waits for one goes out now."""
        if events := self.kv_cache_manager.take_events():
            self._kvr_publisher.publish(KVEventBatch(ts=time.time(), events=cast(list[Any], events)))


class _KeyedScheduler(_KeyedPoolMixin, Scheduler):
    pass


class _AsyncKeyedScheduler(_KeyedPoolMixin, AsyncScheduler):
    pass
