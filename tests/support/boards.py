"""A pin board behind a store that fails on demand, and workers that follow it with engines of their own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shared.directory.pin_board import BoardId, PinBoard, PinSpec, PinState, Revision, Wanted, WorkerPins
from shared.errors import DirectoryUnavailable
from shared.telemetry import Readings
from shared.types import WorkerId
from tests.support.fakes import FakeEngine
from tests.support.stores import SCHEME, worker_info
from worker.engines.base import BlockChange
from worker.pinner import Pinner

LEASE_S = 5.0
HEARTBEAT_S = 1.0


class FlakyBoard:
    """Wraps a board: while `is_down` no call arrives, and at `loss_rate` calls take effect without an answer."""

    def __init__(self, inner: PinBoard, rng: random.Random | None = None) -> None:
        self.inner = inner
        self.is_down = False
        self.loss_rate = 0.0
        self.calls: list[str] = []
        self._rng = rng or random.Random(0)

    async def put(self, spec: PinSpec, ttl_s: float | None, *, replacing: Revision | None = None) -> bool:
        return bool(await self._call("put", spec, ttl_s, replacing=replacing))

    async def put_back(self, spec: PinSpec, ttl_s: float | None, board: BoardId) -> bool:
        return bool(await self._call("put_back", spec, ttl_s, board))

    async def remove(self, name: str, *, revision: Revision | None = None) -> bool:
        return bool(await self._call("remove", name, revision=revision))

    async def look(self) -> Wanted | None:
        found: Wanted | None = await self._call("look")
        return found

    async def follow(self, fresh: BoardId, kept: Iterable[str] = ()) -> Wanted:
        found: Wanted = await self._call("follow", fresh, kept)
        return found

    async def spec(self, name: str) -> PinSpec | None:
        found: PinSpec | None = await self._call("spec", name)
        return found

    async def report(self, worker: WorkerId, pins: WorkerPins, lease_s: float) -> None:
        await self._call("report", worker, pins, lease_s)

    async def reports(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerPins]:
        found: dict[WorkerId, WorkerPins] = await self._call("reports", workers)
        return found

    async def clear(self) -> None:
        await self._call("clear")

    def expose(self, readings: Readings) -> None:
        self.inner.expose(readings)

    async def close(self) -> None:
        """The board is its owner's to close."""

    async def _call(self, operation: str, *arguments: Any, **more: Any) -> Any:
        self.calls.append(operation)
        await asyncio.sleep(0)  # a call is never as atomic as a function
        if self.is_down:
            raise DirectoryUnavailable(f"{operation}: down")
        answer = await getattr(self.inner, operation)(*arguments, **more)
        if self._rng.random() < self.loss_rate:
            raise DirectoryUnavailable(f"{operation}: answer lost")
        return answer


@dataclass(slots=True)
class Follower:
    """One life of a worker that follows a board."""

    pinner: Pinner
    engine: FakeEngine

    @classmethod
    def start(
        cls,
        board: PinBoard,
        name: str = "w1",
        *,
        life: int = 1,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float | None = None,
        **more: Any,
    ) -> Follower:
        """A worker with an engine of 40 blocks, 20 of which may be pinned."""
        pinners: list[Pinner] = []

        def on_blocks(change: BlockChange) -> None:
            if change.is_reset:
                pinners[0].engine_was_reset()

        engine = FakeEngine(**{"scheme": SCHEME, "num_blocks": 40, "on_blocks": on_blocks, **more})
        info = replace(worker_info(name, life=life), num_blocks=engine.info.num_blocks)
        pinners.append(
            Pinner(
                board,
                engine,
                info,
                budget_blocks=engine.info.pin_budget_blocks,
                rng=random.Random(life),
                lease_s=5 * heartbeat_s if lease_s is None else lease_s,
                heartbeat_s=heartbeat_s,
            )
        )
        pinners[0].start()
        return cls(pinners[0], engine)

    @property
    def states(self) -> dict[str, PinState]:
        """What the worker says of each pin."""
        return {pin.name: pin.state for pin in self.pinner.pins.pins}

    async def held(self) -> dict[str, int]:
        """Blocks of each pin, in the engine's own words."""
        return {pin.name: pin.num_blocks for pin in await self.engine.pins()}
