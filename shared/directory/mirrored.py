"""The directory as routers read it: matches from a mirror in memory, everything else from the store itself.

Owns what is known of leases, and the judgement about silence: whether workers are gone, or the store is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass

from shared.directory.base import Directory, Match, Reply, RouterPlace, WorkerRecord
from shared.directory.feed import Feed, Lease
from shared.directory.follower import DEFAULT_WAIT_S, Follower
from shared.directory.mirror import Mirror
from shared.errors import DirectoryUnavailable
from shared.types import BlockKey, Epoch, EventBatch, Instance, RouterId, WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE_S = 0.002
"""The store tells leases in milliseconds: a look right at the end of one may still find it."""


@dataclass(slots=True)
class _Known:
    """A lease as the store showed it last, and what speaks against believing that it is gone."""

    lease: Lease
    expires_at_s: float
    """By the loop's clock, at the latest: counted from before the store was asked, it is never too late."""
    is_store_suspect: bool = False
    """Whether the store has not told of the worker when it was last asked."""
    excused_until_s: float = -math.inf


class MirroredDirectory:
    """`Directory` that matches without asking the store, once it has loaded a worker; until then it asks for that one.

    A worker is forgotten when the store shows that its lease is gone. Only where the store itself was at fault since
    the worker was last seen (the canary that this reader keeps beside the lease could not be written, or was lost) does
    the worker get one more lease to come back in, and what is known of it is kept: a store that was frozen or comes
    back empty must not make routers blind. While the store does not tell of a worker it is not forgotten, since nothing
    can be known. All of this is judged worker by worker: a part of the store that fails excuses its own only.

    Call `start`, then `close`, which closes the wrapped directory too. `num_stale_matches` counts matches given from
    memory while the store did not answer, and only grows.
    """

    def __init__(
        self,
        inner: Directory,
        feed: Feed,
        *,
        refresh_s: float = 1.0,
        wait_s: float = DEFAULT_WAIT_S,
    ) -> None:
        self._inner = inner
        self._feed = feed
        self._refresh_s = refresh_s
        self._mirror = Mirror()
        self._follower = Follower(feed, self._mirror, wait_s=wait_s)
        self._worker_to_known: dict[WorkerId, _Known] = {}
        self._refreshing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_stale_matches = 0

    @property
    def is_resting(self) -> bool:
        """Whether the store does not answer; matches are given from memory then, as far as there is one."""
        return self._inner.is_resting

    @property
    def shown(self) -> KeysView[WorkerId]:
        """Workers that are matched from memory."""
        return self._mirror.shown

    @property
    def num_entries(self) -> int:
        """Pairs of a worker and a block that the mirror holds now."""
        return self._mirror.num_entries

    @property
    def num_loads(self) -> int:
        """Times that a worker was loaded from its set."""
        return self._follower.num_loads

    @property
    def num_keys_applied(self) -> int:
        """Changes taken in, by loading and by following."""
        return self._follower.num_keys_applied

    @property
    def num_batches_behind(self) -> int:
        """Batches of all workers that the mirror has yet to take in to be where the store was when last looked at."""
        return sum(
            self._follower.num_batches_behind(worker, known.lease) for worker, known in self._worker_to_known.items()
        )

    def start(self) -> None:
        """Load all workers and follow them from now on, in the background."""
        self._follower.start()
        self._task = asyncio.create_task(self._keep_fresh(), name="mirror-leases")

    async def caught_up(self) -> None:
        """Return once every worker is in the mirror, as far as the store stands at some moment after this call.

        Waits as long as it takes; put a deadline around it.
        """
        worker_to_goal: dict[WorkerId, Lease] = {}
        while True:
            self._follower.moved.clear()
            with contextlib.suppress(DirectoryUnavailable):
                leases = await self.refresh()
                # Where workers publish all the time, the store is always ahead again: a goal, once set, stays.
                worker_to_goal = {
                    worker: _nearer(worker_to_goal.get(worker, lease), lease) for worker, lease in leases.items()
                }
                if leases.keys() == self._worker_to_known.keys() and all(
                    self._follower.is_level(worker, goal) for worker, goal in worker_to_goal.items()
                ):
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._follower.moved.wait()

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        """As the protocol says. Asks the store only for workers that are not in the mirror.

        Raises `DirectoryUnavailable` only where the mirror has none of `workers`.
        """
        asked = workers if isinstance(workers, Collection) else list(workers)
        shown = self._mirror.shown
        missing = [worker for worker in asked if worker not in shown]
        if self._inner.is_resting:
            self.num_stale_matches += 1
        found = self._mirror.match(keys, asked)
        if missing and keys:
            try:
                found.update(await self._inner.match(keys, missing))
            except DirectoryUnavailable:
                if len(missing) == len(asked):
                    raise
        return found

    async def register(self, info: WorkerInfo, epoch: Epoch, lease_s: float) -> Reply:
        return await self._inner.register(info, epoch, lease_s)

    async def heartbeat(self, worker: WorkerId, epoch: Epoch, seq: int, lease_s: float) -> Reply:
        return await self._inner.heartbeat(worker, epoch, seq, lease_s)

    async def apply(self, batch: EventBatch) -> Reply:
        return await self._inner.apply(batch)

    async def stage(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, keys: Sequence[BlockKey]) -> Reply:
        return await self._inner.stage(worker, epoch, snapshot, keys)

    async def commit(self, worker: WorkerId, epoch: Epoch, snapshot: Epoch, num_keys: int) -> Reply:
        return await self._inner.commit(worker, epoch, snapshot, num_keys)

    async def set_draining(self, worker: WorkerId, epoch: Epoch, is_draining: bool) -> Reply:
        return await self._inner.set_draining(worker, epoch, is_draining)

    async def forget(self, worker: WorkerId, instance: Instance) -> Reply:
        return await self._inner.forget(worker, instance)

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        return await self._inner.announce_router(router, lease_s)

    async def workers(self) -> list[WorkerRecord]:
        return await self._inner.workers()

    async def resident(self, worker: WorkerId) -> set[BlockKey]:
        return await self._inner.resident(worker)

    def mirrored(self, worker: WorkerId) -> set[BlockKey] | None:
        """Every key that the mirror has of one worker; `None` if it has none of it. For tools and tests."""
        return self._mirror.resident(worker)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._follower.close()
        if not self._inner.is_resting:
            await self._feed.close()
        await self._inner.close()

    # Leases.

    async def _keep_fresh(self) -> None:
        while True:
            try:
                await self.refresh()
            except DirectoryUnavailable as error:
                logger.debug("leases cannot be read: %s", error)
                await asyncio.sleep(self._pause_s())
            except Exception:
                # A fault here must not end the watch over leases for good.
                logger.exception("refresh of the mirror failed")
                # Leases that nobody has looked at since have run out as it seems: that is no cause for haste.
                await asyncio.sleep(self._refresh_s)
            else:
                await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        """Until the next regular look, or until a lease runs out that nobody has extended so far."""
        now = asyncio.get_running_loop().time()
        ends_s = [
            known.expires_at_s
            for known in self._worker_to_known.values()
            if not known.is_store_suspect and now >= known.excused_until_s
        ]
        return min(self._refresh_s, max(min(ends_s, default=math.inf) - now, 0.0) + _SHORTEST_PAUSE_S)

    async def refresh(self) -> Mapping[WorkerId, Lease]:
        """Bring the mirror's membership in line with the store's leases, which it gives back. Modifies.

        Raises `DirectoryUnavailable` where the store tells of nobody, and forgets nobody then.
        """
        clock = asyncio.get_running_loop().time
        async with self._refreshing:
            asked_at_s = clock()
            try:
                found = await self._feed.look(self._worker_to_known)
            except DirectoryUnavailable:
                self._suspect_store_of(self._worker_to_known)
                raise
            self._suspect_store_of(self._worker_to_known.keys() - found.keys())
            now = clock()
            excused_until_s = now + self._longest_lease_s()
            for worker, standing in found.items():
                known, lease = self._worker_to_known.get(worker), standing.lease
                if known is not None and (known.is_store_suspect or not standing.is_canary_kept):
                    known.is_store_suspect, known.excused_until_s = False, excused_until_s
                if lease is not None:
                    if known is None:
                        known = self._worker_to_known[worker] = _Known(lease, math.inf)
                    known.lease, known.expires_at_s = lease, asked_at_s + lease.ttl_s
                    self._follower.see(worker, lease)
                elif known is not None and now >= known.excused_until_s:
                    del self._worker_to_known[worker]
                    self._follower.forget(worker)
            return {worker: standing.lease for worker, standing in found.items() if standing.lease is not None}

    def _suspect_store_of(self, workers: Iterable[WorkerId]) -> None:
        for worker in workers:
            self._worker_to_known[worker].is_store_suspect = True

    def _longest_lease_s(self) -> float:
        """What the leases known so far would have lasted: who is alive has come back by then."""
        ttls_s = [known.lease.ttl_s for known in self._worker_to_known.values() if known.lease.ttl_s < math.inf]
        return max(ttls_s, default=0.0)


def _nearer(goal: Lease, lease: Lease) -> Lease:
    """What to wait for, of what was seen of a worker before and now: no batch of an epoch that is over ever comes."""
    return goal if goal.epoch == lease.epoch and goal.seq <= lease.seq else lease
