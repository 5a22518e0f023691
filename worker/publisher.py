"""Keeps the directory's copy of one worker's resident set right, whatever happens to the store or to calls to it.

Sole owner of the resident set as published, its epoch and its sequence number. Never waits for the store on the
engine's side, and never raises into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Set

from shared.directory.base import MAX_KEYS_PER_CALL, Directory, Reply
from shared.errors import DirectoryUnavailable, WorkerIdTaken
from shared.types import BlockKey, Epoch, EventBatch, Holder, WorkerInfo
from worker.alarm import Alarm
from worker.backlog import Backlog, Commit, Pending
from worker.engines.base import BlockChange

logger = logging.getLogger(__name__)

DEFAULT_TICK_S = 0.01
"""How long changes are gathered before they are sent: an engine step or two; longer makes routers guess more."""
DEFAULT_MAX_PENDING_KEYS = 1 << 16
"""Changes kept for a store that does not answer; past this a snapshot costs less than the backlog."""
_FIRST_BACKOFF_S = 0.05


class Publisher:
    """Publishes one worker's block changes in order, and mends whatever the store says is wrong.

    One task makes all calls, one at a time. A call without an answer is repeated with the same content, since it may
    have taken effect; the store takes a repeat for a no-op. What the store refuses is mended by a snapshot: after
    `GAP` under the current registration, after `UNKNOWN` or `STALE` under a new one. After a fault of our own, or an
    answer that makes no sense, everything starts over with a new registration. Only a live owner of the id ends it.

    Invariant: what the store holds, changed by the batch under way and then by the pending changes, is `resident`;
    or a snapshot is planned.
    """

    def __init__(
        self,
        directory: Directory,
        info: WorkerInfo,
        *,
        rng: random.Random,
        lease_s: float = 5.0,
        heartbeat_s: float = 1.0,
        tick_s: float = DEFAULT_TICK_S,
        max_pending_keys: int = DEFAULT_MAX_PENDING_KEYS,
        on_evicted: Callable[[str], None] | None = None,
    ) -> None:
        self._directory = directory
        self._info = info
        self._rng = rng
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._tick_s = tick_s
        self._max_pending_keys = max_pending_keys
        self._on_evicted = on_evicted
        self._task: asyncio.Task[None] | None = None
        self._alarm = Alarm()
        self._resident: set[BlockKey] = set()
        self._pending = Pending()
        self._backlog = Backlog()
        self._batch: EventBatch | None = None
        """The batch under way: sent, but not known to be applied."""
        self._snapshot_cause: str | None = None
        """Why a snapshot is planned; it contains every change up to the moment it is taken."""
        self._commit: Commit | None = None
        self._is_staging = False
        self._is_registered = False
        self._epoch = self._new_epoch()
        self._seq = 0
        self._is_draining = False
        self._told_draining = False
        self._has_told_draining = False
        self._next_heartbeat_s = 0.0
        self._num_setbacks = 0
        self._num_faults = 0
        """Unexpected errors since publishing last went well for the time of a lease, which sees every kind of call."""
        self._faulted_at_s = 0.0
        self._pause_s = 0.0
        self._lost_at_s: float | None = None
        self.is_evicted = False
        self.num_batches = 0
        self.num_block_events = 0
        self.num_snapshots: Counter[str] = Counter()
        """Snapshots made, by cause."""
        self.num_dropped = 0
        """Changes that waited for the store and were then left to a snapshot."""

    @property
    def resident(self) -> Set[BlockKey]:
        """What the engine holds by its own account: what the directory shows after quiet. Not to be changed."""
        return self._resident

    @property
    def num_pending(self) -> int:
        """Changes that the store is not known to have; what a planned snapshot will bring is not counted."""
        batch = self._batch
        return len(self._pending) + (len(batch.stored) + len(batch.removed) if batch is not None else 0)

    @property
    def lag_s(self) -> float:
        """How long the oldest change has waited that the store is not known to have; 0 without one."""
        return self._backlog.lag_s(asyncio.get_running_loop().time())

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def seq(self) -> int:
        """Number of the last batch known to be applied."""
        return self._seq

    @property
    def is_quiet(self) -> bool:
        """Whether the store is known to hold exactly `resident`, as far as calls tell."""
        is_settled = self._is_registered and self._told_draining == self._is_draining and not self._is_staging
        return is_settled and not (self._pending or self._batch or self._snapshot_cause or self._commit)

    async def start(self) -> None:
        """Register and publish from now on. With the store down, registering is tried on in the background.

        Raises `WorkerIdTaken` if another process holds the id.
        """
        try:
            if not await self._register():
                raise WorkerIdTaken(await self._describe_taken())
        except DirectoryUnavailable as error:
            self._note_loss(error)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"publisher of {self._info.worker}")

    async def stop(self) -> None:
        """Publish no more and forget the worker, if the store answers; else its lease runs out. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        self._alarm.close()
        self._is_registered = False
        try:
            await self._directory.forget(self._info.worker, self._info.instance)
        except DirectoryUnavailable as error:
            logger.warning("worker %s leaves without a word, its lease will run out: %s", self._info.worker, error)

    def set_draining(self, is_draining: bool) -> None:
        """Tell routers, from now on and over any restart of the store, whether the worker takes new requests."""
        self._is_draining = is_draining
        self._alarm.note()

    def replace(self, resident: Set[BlockKey], cause: str) -> None:
        """Take the engine's own account of what it holds in place of all that was told, and publish it. Modifies."""
        self._resident = set(resident)
        self._plan_snapshot(cause)
        self._alarm.note()

    def on_blocks(self, change: BlockChange) -> None:
        """Take one change of the engine's resident set, to be published with the next batch. Never waits or raises."""
        self.num_block_events += len(change.stored) + len(change.removed)
        if change.is_reset:
            self._resident.clear()
            self._plan_snapshot("reset")
        # Engines that keep account of what they told tell nothing twice: one question of the set answers for all keys.
        resident, stored, removed = self._resident, change.stored, change.removed
        if not resident.isdisjoint(stored):
            stored = tuple([key for key in stored if key not in resident])
        resident.update(stored)
        self._pending.update(dict.fromkeys(stored, True))
        if not resident.issuperset(removed):
            removed = tuple([key for key in removed if key in resident])
        resident.difference_update(removed)
        self._pending.update(dict.fromkeys(removed, False))
        if self._pending:
            self._backlog.gather(asyncio.get_running_loop().time())
        if self._snapshot_cause is not None:
            self._pending.clear()
        elif len(self._pending) > self._max_pending_keys:
            self._plan_snapshot("overflow")
        self._alarm.note()

    # The one task that talks to the store.

    async def _run(self) -> None:
        while not self.is_evicted:
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            else:
                await self._wait_for_news()
            try:
                await self._advance()
            except DirectoryUnavailable as error:
                self._note_loss(error)
            except Exception:
                self._start_over()
            else:
                self._note_recovery()

    async def _wait_for_news(self) -> None:
        """Until the next heartbeat, or until changes have been gathered for a tick."""
        now_s = asyncio.get_running_loop().time()
        until_s = max(now_s, self._next_heartbeat_s)
        gather_s = min(self._tick_s, until_s - now_s)
        if self.is_quiet:
            await self._alarm.wait(until_s, gather_s)
        else:
            await asyncio.sleep(gather_s)

    async def _advance(self) -> None:
        """Do all that is to be done now. Ends early after a refusal, which leaves the mending planned."""
        if not self._is_registered and not await self._register():
            self._evict(await self._describe_taken())
            return
        if self._told_draining != self._is_draining and not await self._tell_draining():
            return
        is_last = False
        while not is_last:
            if self._is_heartbeat_due() and not await self._heartbeat_as_due():
                return
            if self._commit is not None:
                is_accepted = await self._finish_snapshot(self._commit)
            elif self._snapshot_cause is not None:
                is_accepted = await self._stage_snapshot(self._snapshot_cause)
            elif self._batch is not None or self._pending:
                # What does not fill a batch may grow for another tick, but what is here now is sent.
                is_last = self._batch is None and len(self._pending) <= MAX_KEYS_PER_CALL
                is_accepted = await self._send_batch()
            else:
                return
            if not is_accepted:
                return

    async def _register(self) -> bool:
        """Take the id; false if another process holds it.

        A repeat after a lost answer uses the same epoch. If the lost call takes effect late, it empties the set and
        starts its batches anew, which the next batch or heartbeat finds as a gap.
        """
        reply = await self._directory.register(self._info, self._epoch, self._lease_s)
        if reply is Reply.TAKEN:
            return False
        self._is_registered = True
        self._told_draining = False
        self._seq = 0
        self._next_heartbeat_s = asyncio.get_running_loop().time() + self._heartbeat_s
        return self._accept(reply)

    async def _tell_draining(self) -> bool:
        is_draining = self._is_draining
        reply = await self._directory.set_draining(self._info.worker, self._epoch, is_draining)
        if not self._accept(reply):
            return False
        self._told_draining = is_draining
        self._has_told_draining = True
        return True

    async def _heartbeat_as_due(self) -> bool:
        """Extend the lease; false if the store refuses."""
        if self._batch is not None or self._commit is not None:
            # The store may have it, and tells only with the repeat that comes next; one that is full takes this alone.
            return self._accept(await self._heartbeat(), expected=(Reply.GAP, Reply.STALE))
        if not self._accept(await self._heartbeat()):
            return False
        # Nothing fences a late repeat of a word about draining, or of the registration that clears it.
        return not self._has_told_draining or await self._tell_draining()

    def _is_heartbeat_due(self) -> bool:
        return asyncio.get_running_loop().time() >= self._next_heartbeat_s

    async def _heartbeat(self) -> Reply:
        reply = await self._directory.heartbeat(self._info.worker, self._epoch, self._seq, self._lease_s)
        self._next_heartbeat_s = asyncio.get_running_loop().time() + self._heartbeat_s
        return reply

    async def _send_batch(self) -> bool:
        if self._batch is None:
            stored, removed = self._pending.take(MAX_KEYS_PER_CALL)
            self._backlog.send(asyncio.get_running_loop().time(), is_all=not self._pending)
            self._batch = EventBatch(Holder(self._info.worker, self._epoch), self._seq + 1, stored, removed)
        batch = self._batch
        if not self._accept(await self._directory.apply(batch)):
            return False
        self._seq = batch.seq
        self._batch = None
        self._backlog.arrive(is_all=self._snapshot_cause is None)
        self.num_batches += 1
        return True

    async def _stage_snapshot(self, cause: str) -> bool:
        """Stage everything that is resident now. Whatever ends this early leaves the snapshot planned."""
        keys = list(self._resident)
        snapshot = self._new_epoch()
        self._pending.clear()
        self._backlog.send(asyncio.get_running_loop().time())
        self._batch = None  # the snapshot contains it, and its epoch ends with the commit
        self._snapshot_cause = None
        self._is_staging, is_staged = True, False
        try:
            for start in range(0, len(keys), MAX_KEYS_PER_CALL):
                chunk = keys[start : start + MAX_KEYS_PER_CALL]
                if not self._accept(await self._directory.stage(self._info.worker, self._epoch, snapshot, chunk)):
                    return False
                # A batch given up for this snapshot may have been applied or not: `GAP` tells nothing new.
                if self._is_heartbeat_due() and not self._accept(await self._heartbeat(), expected=(Reply.GAP,)):
                    return False
            is_staged = True
        finally:
            self._is_staging = False
            if not is_staged:
                self._plan_snapshot(cause)
        self._commit = Commit(snapshot, len(keys), cause)
        return True

    async def _finish_snapshot(self, commit: Commit) -> bool:
        reply = await self._directory.commit(self._info.worker, self._epoch, commit.snapshot, commit.num_keys)
        if not self._accept(reply):
            return False
        self._epoch, self._seq = commit.snapshot, 0
        self._commit = None
        self._backlog.arrive(is_all=self._snapshot_cause is None)
        self.num_snapshots[commit.cause] += 1
        return True

    # What answers and their absence mean.

    def _accept(self, reply: Reply, *, expected: Collection[Reply] = ()) -> bool:
        """Whether the store took the call, or refused it as was to be expected; if not, plan the mending."""
        if reply is Reply.OK or reply in expected:
            self._num_setbacks, self._pause_s = 0, 0.0
            return True
        self._batch = None
        self._commit = None
        self._plan_snapshot(reply.lower())
        if reply is not Reply.GAP:
            self._is_registered = False
            self._epoch = self._new_epoch()
        self._note_loss(f"the store answers {reply} and gets a snapshot")
        if reply is Reply.UNKNOWN:
            # A store that came back empty says this to all workers at once.
            self._pause_s = self._rng.uniform(0.0, self._heartbeat_s / 2)
        return False

    def _plan_snapshot(self, cause: str) -> None:
        self._snapshot_cause = cause
        self.num_dropped += len(self._pending)
        self._pending.clear()
        self._backlog.send(asyncio.get_running_loop().time())

    def _set_back(self) -> None:
        """Wait before the next call, longer after each setback in a row."""
        longest_s = min(self._heartbeat_s, _FIRST_BACKOFF_S * 2 ** min(self._num_setbacks, 16))
        self._num_setbacks += 1
        self._pause_s = longest_s * self._rng.uniform(0.5, 1.0)

    def _note_loss(self, cause: DirectoryUnavailable | str) -> None:
        """One line for all that goes wrong until the store has everything again."""
        self._set_back()
        if self._lost_at_s is None:
            self._lost_at_s = asyncio.get_running_loop().time()
            logger.warning("worker %s cannot publish, its changes are kept: %s", self._info.worker, cause)

    def _start_over(self) -> None:
        """After an unexpected error nothing is sure, but that the worker's requests need no directory."""
        if not self._num_faults:
            logger.exception("worker %s starts publishing over", self._info.worker)
        self._batch = None
        self._commit = None
        self._plan_snapshot("fault")
        self._is_registered = False
        self._epoch = self._new_epoch()
        # What works in between, as registering may, makes the pauses no shorter.
        self._num_setbacks = self._num_faults
        self._num_faults += 1
        self._faulted_at_s = asyncio.get_running_loop().time()
        self._set_back()

    def _note_recovery(self) -> None:
        if self._lost_at_s is None and not self._num_faults:
            return
        now_s = asyncio.get_running_loop().time()
        # A store that is full answers heartbeats and refuses what is to be told: that is no end of the loss.
        has_told = self._is_registered and not (self._batch or self._snapshot_cause or self._commit)
        if self._lost_at_s is not None and has_told:
            logger.warning("worker %s publishes again after %.1f s", self._info.worker, now_s - self._lost_at_s)
            self._lost_at_s = None
        if self._num_faults and now_s >= self._faulted_at_s + self._lease_s and self.is_quiet:
            logger.warning("worker %s publishes again after %s faults", self._info.worker, self._num_faults)
            self._num_faults = 0

    def _evict(self, reason: str) -> None:
        self.is_evicted = True
        self._is_registered = False
        self._plan_snapshot("evicted")  # keeps changes from piling up
        logger.error("worker %s is evicted from the directory: %s", self._info.worker, reason)
        if self._on_evicted is not None:
            self._on_evicted(reason)

    async def _describe_taken(self) -> str:
        own = self._info
        holder = "another process"
        with contextlib.suppress(DirectoryUnavailable):
            for record in await self._directory.workers():
                if record.info.worker == own.worker:
                    holder = f"{record.info.address} (instance {record.info.instance})"
        return f"worker id {own.worker} is held by {holder}; refused {own.address} (instance {own.instance})"

    def _new_epoch(self) -> Epoch:
        # The instance is mixed in since two lives of a worker may be handed equally seeded generators.
        return Epoch(f"{self._rng.getrandbits(128) ^ int(self._info.instance, 16):032x}")
