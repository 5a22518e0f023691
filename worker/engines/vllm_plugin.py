"""What the worker's process asks the plugin in the engine's process, and what the answers mean.

Needs no vLLM: the plugin itself is `vllm_scheduler`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from shared.errors import EngineError, InvalidRequest, PinRefused, UnknownPin
from shared.hashing import KEY_SIZE_BYTES, block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.engines.base import EngineRequest, PinnedPrefix, PoolUse
from worker.engines.vllm_events import PoolSnapshot
from worker.engines.vllm_steps import StepMeter

PLUGIN = "kvr"
"""Our name in everything of vLLM's that has room for others: its configuration, its calls, its requests."""

_POOL_INTERVAL_S = 1.0

Ask = Callable[[str, Sequence[Any]], Awaitable[Any]]
"""Calls an operation of the plugin with arguments. Raises `EngineError` if the engine does not answer."""


class Plugin:
    """The plugin of one engine, as seen from the worker's process. Every call raises `EngineError` as `ask` does."""

    def __init__(self, ask: Ask, scheme: CacheScheme) -> None:
        self._ask = ask
        self._scheme = scheme

    async def groups(self) -> list[tuple[str, int]]:
        """Kind and block size of each group of the cache."""
        return [(kind, block_size_tokens) for kind, block_size_tokens in await self._ask("groups", ())]

    async def snapshot(self) -> PoolSnapshot:
        """What the pool holds, at an exact place in the event stream."""
        answer = await self._ask("snapshot", ())
        keys = answer["keys"]
        split = (BlockKey(keys[start : start + KEY_SIZE_BYTES]) for start in range(0, len(keys), KEY_SIZE_BYTES))
        return PoolSnapshot(answer["num_published"], dict(zip(answer["hashes"], split, strict=True)))

    async def digest(self) -> tuple[int, bytes]:
        """Number of resident keys and all of them exclusive-ored."""
        answer = await self._ask("digest", ())
        return answer["num_keys"], answer["digest"]

    async def statistics(self) -> dict[str, Any]:
        """See `KeyedBlockPool.statistics`."""
        statistics: dict[str, Any] = await self._ask("statistics", ())
        return statistics

    async def pool_use(self) -> PoolUse:
        """What lies in the pool's blocks."""
        statistics = await self.statistics()
        return PoolUse.of(statistics["num_pinned"], statistics["num_free"])

    async def evict_all_free(self) -> None:
        """Drop every cached block that no request or pin holds."""
        await self._ask("evict_all_free", ())

    async def pin_budget_blocks(self) -> int:
        """Most blocks that pins may hold together."""
        budget: int = await self._ask("pin_budget", ())
        return budget

    async def check_pin(self, name: str, request: EngineRequest) -> None:
        """Whether the full blocks of a request's prompt could be kept under `name` now.

        Raises:
            PinRefused: there is no full block, or the budget does not suffice.
            InvalidRequest: a token id is out of all range.
        """
        scheme = self._scheme
        try:
            packed = pack_tokens(request.token_ids)
        except OverflowError as error:
            raise InvalidRequest(f"pin {name!r}: {error}") from error
        keys = block_keys(
            packed, scheme.block_size_tokens, root_key(scheme, salt=request.salt, adapter=request.adapter)
        )
        if not keys:
            raise PinRefused(
                f"pin {name!r}: {len(request.token_ids)} tokens do not fill a block of {scheme.block_size_tokens}"
            )
        if (refusal := await self._ask("check_pin", (name, b"".join(keys)))) is not None:
            raise PinRefused(refusal)

    async def unpin(self, name: str) -> None:
        """Give up a pin. Raises `UnknownPin`."""
        if (refusal := await self._ask("unpin", (name,))) is not None:
            raise UnknownPin(refusal)

    async def pins(self) -> list[PinnedPrefix]:
        """What is kept, oldest first."""
        return [self._pinned(name, num_blocks) for name, num_blocks in await self._ask("pins", ())]

    def pin_outcome(self, name: str, transfer_params: dict[str, Any] | None) -> PinnedPrefix:
        """How a request went that asked for a pin with `pin_arguments`, as its last output tells.

        Raises:
            PinRefused: the budget did not suffice any more when the request had been computed.
            EngineError: the request ended without its blocks.
        """
        outcome = (transfer_params or {}).get(PLUGIN, {})
        if (refusal := outcome.get("refusal")) is not None:
            raise PinRefused(refusal)
        if (num_blocks := outcome.get("num_blocks")) is None:
            raise EngineError(f"pin {name!r}: its request ended before its blocks could be kept")
        return self._pinned(name, num_blocks)

    def _pinned(self, name: str, num_blocks: int) -> PinnedPrefix:
        return PinnedPrefix(name, num_blocks, num_blocks * self._scheme.block_size_tokens)


def pin_arguments(name: str) -> dict[str, Any]:
    """What a request's sampling parameters tell the plugin, so that it keeps the prompt under `name`."""
    return {PLUGIN: {"pin": name}}


class PoolWatch:
    """Asks the pool about itself about once a second while the engine works; owns the last answer and a task."""

    def __init__(self, plugin: Plugin, meter: StepMeter) -> None:
        self.use: PoolUse | None = None
        """`None` before the first answer."""
        self._plugin = plugin
        self._meter = meter
        self._task = asyncio.create_task(self._follow(), name="engine-pool-watch")

    def close(self) -> None:
        """Ask no more."""
        self._task.cancel()

    async def _follow(self) -> None:
        num_steps = -1
        # An engine that dies has others who tell of it.
        with suppress(EngineError):
            while True:
                if num_steps != self._meter.num_steps:
                    num_steps = self._meter.num_steps
                    self.use = await self._plugin.pool_use()
                await asyncio.sleep(_POOL_INTERVAL_S)
