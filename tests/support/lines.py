"""A rack whose workers can fall silent to its router while their connections stand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.service import Router
from shared.types import WorkerId
from tests.support.channels import FaultyConnect
from tests.support.rack import Rack, rack


@dataclass
class Lines:
    """Workers, a router, and the connections in between."""

    workers: Rack
    router: Router
    worker_to_connect: dict[WorkerId, FaultyConnect]

    def freeze(self, *workers: WorkerId) -> None:
        """Let the router hear nothing more of these."""
        for worker in workers:
            self.worker_to_connect[worker].channel.stall()

    def thaw(self, *workers: WorkerId) -> None:
        """Let the router hear them again, and what they have told meanwhile."""
        for worker in workers:
            self.worker_to_connect[worker].channel.flow()

    def busy(self) -> WorkerId:
        """The one worker whose engine has something to do."""
        slots = self.workers.worker_to_slot
        (busy,) = [worker for worker, slot in slots.items() if slot.engine.num_live]
        return busy


@asynccontextmanager
async def lines_to(
    num_workers: int, policy: str = "cost", *, max_attempts: int = 3, **engine: object
) -> AsyncIterator[Lines]:
    """A router over fake engines with the given properties."""
    async with rack(num_workers, **engine) as workers:
        connects: dict[WorkerId, FaultyConnect] = {}
        for worker, slot in workers.worker_to_slot.items():
            connects[worker] = FaultyConnect(slot.host.open_local)
            slot.host.open_local = connects[worker]  # type: ignore[method-assign]
        async with workers.router(policy, max_attempts=max_attempts) as router:
            yield Lines(workers, router, connects)
