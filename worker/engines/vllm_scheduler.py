"""The plugin that brings our block pool into vLLM's engine process, and the check that this vLLM is one we know.

vLLM is told the name of `scheduler` in this module (`scheduler_cls`) and calls it in the engine's process. The worker's
process asks it through `EngineCore.kvr`. What this relies on beyond vLLM's public interface is listed in `_SURFACE` and
`_ASSIGNED`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Sequence
from functools import reduce
from operator import xor
from typing import Any, cast

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, EventPublisher, KVEventBatch
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, get_kv_cache_spec_kind
from vllm.v1.request import Request, RequestStatus

from shared.errors import PinRefused, UnknownPin
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, CacheScheme
from worker.engines.vllm_plugin import PLUGIN
from worker.engines.vllm_pool import FreeQueue, KeyedBlockPool
from worker.pins import default_budget_blocks

QUALIFIED_NAME = f"{__name__}.scheduler"
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
    (BlockPool, "get_new_blocks", ("num_blocks",)),
    (BlockPool, "touch", ("blocks",)),
    (BlockPool, "free_blocks", ("ordered_blocks",)),
    (BlockPool, "get_cached_block", ("block_hash", "kv_cache_group_ids")),
    (BlockPool, "reset_prefix_cache", ()),
    (BlockPool, "_remove_cached_block_hashes", ("block",)),
    (BlockPool, "_emit_block_removed_events", ("block_hashes",)),
    (BlockPool, "_maybe_evict_cached_block", ("block",)),
    (BlockHashToBlockMap, "get_one_block", ("key",)),
    (BlockHashToBlockMap, "pop", ("key", "block_id")),
    (KVCacheBlock, "reset_hash", ()),
    (KVCacheCoordinator, "allocate_new_computed_blocks", ("request_id", "new_computed_blocks")),
    (KVCacheManager, "take_events", ()),
    (KVCacheManager, "reset_prefix_cache", ()),
    (EventPublisher, "publish", ("events",)),
    (AsyncMPClient, "call_utility_async", ("method",)),
    (Scheduler, "add_request", ("request",)),
    (Scheduler, "reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    (Scheduler, "_free_request", ("request", "delay_free_blocks")),
)
"""Owner, method and the first of its parameters, in order."""

_ASSIGNED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        BlockPool,
        (
            "blocks",
            "cached_block_hash_to_block",
            "enable_kv_cache_events",
            "free_block_queue",
            "hash_block_size",
            "kv_event_queue",
            "medium",
            "metrics_collector",
            "_reuse_watchers",
        ),
    ),
    (FreeKVCacheBlockQueue, ("num_free_blocks",)),
    (KVCacheManager, ("block_pool", "coordinator", "num_kv_cache_groups")),
    (KVCacheCoordinator, ("block_pool", "single_type_managers")),
    (SingleTypeKVCacheManager, ("block_pool",)),
    (Scheduler, ("kv_cache_config", "kv_cache_manager", "kv_event_publisher")),
    (EngineCore, ("scheduler",)),
    (
        Request,
        ("block_hashes", "num_prompt_tokens", "priority", "request_id", "sampling_params", "status"),
    ),
)
"""Owner and attributes that its `__init__` gives each instance."""


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
    for owner, attributes in _ASSIGNED:
        if missing := set(attributes) - _assigned_by_init(owner):
            return f"{owner.__name__}.__init__ does not assign {', '.join(sorted(missing))}"
    queue_methods = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    if missing := queue_methods - set(vars(FreeQueue)):
        return f"FreeKVCacheBlockQueue has {', '.join(sorted(missing))}, which our queue does not"
    if not isinstance(getattr(KVCacheBlock, "block_hash", None), property):
        return "KVCacheBlock.block_hash is no property"
    stored_fields = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "lora_name"}
    for parts_of, parts, expected_parts in (
        (BlockStored, BlockStored.__struct_fields__, stored_fields),
        (BlockRemoved, BlockRemoved.__struct_fields__, {"block_hashes", "medium", "group_idx"}),
        (KVCacheBlock, KVCacheBlock.__dataclass_fields__, {"block_id", "ref_cnt", "is_null", "pool"}),
        (KVCacheConfig, KVCacheConfig.__dataclass_fields__, {"num_blocks", "kv_cache_groups"}),
        (KVCacheGroupSpec, KVCacheGroupSpec.__dataclass_fields__, {"kv_cache_spec"}),
        (KVCacheSpec, KVCacheSpec.__dataclass_fields__, {"block_size"}),
        (SamplingParams, SamplingParams.__struct_fields__, {"extra_args"}),
        (RequestStatus, RequestStatus.__members__, {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}),
        # How a pin went travels in this one.
        (EngineCoreOutput, EngineCoreOutput.__struct_fields__, {"kv_transfer_params"}),
        (RequestOutput, inspect.signature(RequestOutput).parameters, {"kv_transfer_params"}),
    ):
        if missing := expected_parts - set(parts):
            return f"{parts_of.__name__} has no {', '.join(sorted(missing))}"
    return None


def _assigned_by_init(owner: Any) -> set[str]:
    """Attributes of `self` that a class's `__init__` assigns, by its source; none where that cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner.__init__)))
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def plugin_config(scheme: CacheScheme, rule: str, pin_budget_blocks: int | None) -> dict[str, Any]:
    """What goes into vLLM's `additional_config` for `scheduler` to find in the engine's process.

    Without a budget for pins the default for the pool is taken.
    """
    return {
        PLUGIN: {
            "rule": rule,
            "pin_budget_blocks": pin_budget_blocks,
            "model": scheme.model,
            "block_size_tokens": scheme.block_size_tokens,
            "key_version": scheme.key_version,
        }
    }


def scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """The scheduler of an engine, synchronous or not as vLLM decided. Called by vLLM, in the engine's process."""
    setattr(EngineCore, PLUGIN, _serve)
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncKeyedScheduler if is_async else _KeyedScheduler)(vllm_config=vllm_config, **kwargs)


def _serve(engine_core: Any, operation: str, arguments: Sequence[Any]) -> Any:
    """What the worker's process may ask: the methods of `_KeyedPoolMixin` that begin with `kvr_`."""
    return getattr(engine_core.scheduler, f"kvr_{operation}")(*arguments)


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
        config = vllm_config.additional_config[PLUGIN]  # type: ignore[index]
        scheme = CacheScheme(config["model"], config["block_size_tokens"], config["key_version"])
        budget = config["pin_budget_blocks"]
        if budget is None:
            blocks_of_longest_request = -(-vllm_config.model_config.max_model_len // scheme.block_size_tokens)
            # One of the blocks is vLLM's placeholder.
            budget = default_budget_blocks(self.kv_cache_config.num_blocks - 1, blocks_of_longest_request)
        self._kvr_pool = KeyedBlockPool.adopt(self.kv_cache_manager, config["rule"], scheme, pin_budget_blocks=budget)
        self._kvr_publisher = _CountingPublisher(self.kv_event_publisher)
        self.kv_event_publisher = self._kvr_publisher

    def add_request(self, request: Request) -> None:
        """As vLLM's; the blocks that the request will find count as just used from now on."""
        super().add_request(request)  # type: ignore[misc]
        self._kvr_pool.expect(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As vLLM's, and tells of it now, where vLLM tells with its next step only."""
        is_reset: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)  # type: ignore[misc]
        self._kvr_publish()
        return is_reset

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[Any, Any]:
        """As vLLM's; a finished request that asks for a pin gets it while its blocks are still held.

        How that went travels with the request's last output, in a field that vLLM passes on as it is.
        """
        outcome = self._kvr_pin_if_asked(request)
        transfer, encoder_transfer = super()._free_request(request, delay_free_blocks)  # type: ignore[misc]
        return (transfer if outcome is None else {**(transfer or {}), PLUGIN: outcome}), encoder_transfer

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

    def kvr_pin_budget(self) -> int:
        return self._kvr_pool.pin_budget_blocks

    def kvr_check_pin(self, name: str, joined_keys: bytes) -> str | None:
        """Why these full blocks cannot be kept under that name; None if they can."""
        keys = [
            BlockKey(joined_keys[start : start + KEY_SIZE_BYTES])
            for start in range(0, len(joined_keys), KEY_SIZE_BYTES)
        ]
        try:
            self._kvr_pool.check_pin(name, keys)
        except PinRefused as refused:
            return str(refused)
        return None

    def kvr_unpin(self, name: str) -> str | None:
        """Gives up a pin. Why it cannot; None if it is done."""
        try:
            self._kvr_pool.unpin(name)
        except UnknownPin as unknown:
            return str(unknown)
        return None

    def kvr_pins(self) -> list[tuple[str, int]]:
        """Name and number of blocks of each pin, oldest first."""
        return [(pin.name, len(pin.blocks)) for pin in self._kvr_pool.pins()]

    def _kvr_pin_if_asked(self, request: Request) -> dict[str, Any] | None:
        """Keep the prompt of a finished request that asks for it. How that went; None if it does not or was aborted."""
        params = request.sampling_params
        asked = ((params.extra_args if params is not None else None) or {}).get(PLUGIN)
        if asked is None:
            return None
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            return None
        try:
            return {"num_blocks": self._kvr_pool.pin(asked["pin"], request)}
        except PinRefused as refused:
            return {"refusal": str(refused)}

    def _kvr_publish(self) -> None:
        """vLLM publishes with a step only; what waits for one goes out now."""
        if events := self.kv_cache_manager.take_events():
            self._kvr_publisher.publish(KVEventBatch(ts=time.time(), events=cast(list[Any], events)))


class _KeyedScheduler(_KeyedPoolMixin, Scheduler):
    pass


class _AsyncKeyedScheduler(_KeyedPoolMixin, AsyncScheduler):
    pass
