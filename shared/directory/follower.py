"""Loads workers from a store into a mirror and follows their event streams. Decides nothing about leases."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Set
from contextlib import aclosing
from dataclasses import dataclass

from shared.directory.feed import Entry, EntryId, Feed, Lease
from shared.directory.mirror import Copy, Keys, Mirror, in_parts
from shared.errors import DirectoryUnavailable
from shared.types import Epoch, EventBatch, WorkerId

logger = logging.getLogger(__name__)

DEFAULT_WAIT_S = 0.25
"""Longest wait of one read while nothing is published; a worker of its place that is loaded meanwhile may be shown only
after it."""
_WAIT_WHILE_LOADING_S = 0.02
_PAUSE_S = 0.1
"""Between reads that the store does not answer."""
_READS_TO_BE_SURE = 2
"""Reads of a stream after which it has been read once from beginning to end: one was under way."""
_LONGEST_STANDSTILL_S = 10.0
"""Behind the store for longer than this, a copy has missed what heartbeats have dropped from the stream by now."""
_MAX_LOADS_AT_ONCE = 4
_STEADY_S = 10.0
"""A copy that is followed for this long was no wasted load: heartbeats have dropped all that came while it lasted."""
_LONGEST_PAUSE_S = 60.0
"""Between two loads of a worker that come to nothing."""
_WASTED_LOADS_TO_WARN = 3
"""Two follow from a worker that restarts: one ends with its registration, one with its snapshot."""
_MAX_KEYS_PER_WORKER = 1 << 22
"""Far more than any pool of blocks; a set that holds more is not ours."""
_KEYS_PER_TURN = 512
"""Changes of the mirror after which the loop's other tasks have a turn: under a millisecond, mostly."""
_OVERTAKEN = (
    "its stream, which keeps some 10 s or 1000 batches, has lost what came next; this process needs more processor "
    "time, or a faster way to the store"
)
_UNREADABLE = "its stream cannot be read"
_NEW_EPOCH = "it has registered or sent a snapshot meanwhile"


@dataclass(slots=True, eq=False)
class _Followed:
    """One worker's copy and how far it has come."""

    copy: Copy
    place: str
    epoch: Epoch
    seq: int
    entry: EntryId
    shown_from_seq: int
    """Where the store stood when the scan ended: from there on the copy is as good as the store."""
    is_shown: bool = False
    behind: tuple[EntryId, int, float] | None = None
    """Where the copy was, after how many reads and when, as the store was first seen to be further than that."""
    num_reads: int = 0
    """Of this worker's stream."""


@dataclass(slots=True)
class _Loads:
    """How it goes with loading one worker."""

    num_wasted: int = 0
    """Loads in a row that came to nothing, or to a copy that did not last."""
    lasted_s: float = 0.0
    """The last one, without its pause."""
    ended_at_s: float = -math.inf
    is_told: bool = False
    oversized: Epoch | None = None
    """Under which the worker claims more blocks than any pool has: it is not mirrored before there is another one."""


class Follower:
    """Owns the loads under way and how far each stream is read.

    A load notes the end of the stream, scans the set and then follows the stream from there: each event sets or unsets
    one key, so any interleaving of scan and events ends right. Whatever does not fit (a gap, a trimmed stream, another
    epoch, an entry that is malformed) has that one worker loaded again. Loads of a worker that come to nothing follow
    one another at distances that grow with the time that they take, so that they take ever less of the store and of
    this process. Streams of one place are read together, those of different places side by side, so that no part of the
    store holds up another one. Counters only grow.
    """

    def __init__(self, feed: Feed, mirror: Mirror, *, rng: random.Random, wait_s: float = DEFAULT_WAIT_S) -> None:
        self._feed = feed
        self._mirror = mirror
        self._rng = rng
        self._wait_s = wait_s
        self._worker_to_followed: dict[WorkerId, _Followed] = {}
        self._place_to_workers: dict[str, set[WorkerId]] = defaultdict(set)
        self._place_to_task: dict[str, asyncio.Task[None]] = {}
        self._worker_to_load: dict[WorkerId, asyncio.Task[None]] = {}
        self._worker_to_loads: dict[WorkerId, _Loads] = {}
        self._loading: set[WorkerId] = set()
        """Those whose load is under way and does not pause."""
        self._load_permits = asyncio.Semaphore(_MAX_LOADS_AT_ONCE)
        self._has_dropped = asyncio.Event()
        self._cleaning: asyncio.Task[None] | None = None
        self._num_keys_this_turn = 0
        self.moved = asyncio.Event()
        """Set whenever a worker has come further; cleared by whoever waits for it."""
        self.num_loads = 0
        """Those that ended with a copy."""
        self.num_wasted_loads = 0
        """Those without one, and those with one that did not last."""
        self.num_keys_applied = 0
        self.num_faults = 0
        """Unexpected errors; the first is logged whole."""

    def start(self) -> None:
        """Take workers in from now on."""
        self._cleaning = asyncio.create_task(self._clean(), name="mirror-clean")

    async def close(self) -> None:
        """Stop. What the mirror holds stays."""
        tasks = [*self._place_to_task.values(), *self._worker_to_load.values()]
        tasks += [self._cleaning] if self._cleaning is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker at once, and what is known of its loads. Modifies; one that is not there is no error."""
        self._worker_to_loads.pop(worker, None)
        self._give_up(worker)

    def _give_up(self, worker: WorkerId) -> None:
        load = self._worker_to_load.pop(worker, None)
        if load is not None:
            load.cancel()
        followed = self._worker_to_followed.pop(worker, None)
        if followed is not None:
            self._place_to_workers[followed.place].discard(worker)
            self._drop(followed.copy)
        self.moved.set()

    def num_batches_behind(self, worker: WorkerId, lease: Lease) -> int:
        """How far the worker's copy is behind a store that showed `lease`; 0 for one that is not followed."""
        followed = self._worker_to_followed.get(worker)
        return max(0, lease.seq - followed.seq) if followed is not None and followed.epoch == lease.epoch else 0

    def is_level(self, worker: WorkerId, lease: Lease) -> bool:
        """Whether the worker is shown and has come as far as `lease` tells, or will not be mirrored under it."""
        followed = self._worker_to_followed.get(worker)
        if followed is None:
            return self._is_oversized(worker, lease)
        return followed.is_shown and followed.epoch == lease.epoch and followed.seq >= lease.seq

    def see(self, worker: WorkerId, lease: Lease) -> None:
        """Hold what the store tells of a worker against its copy: load it if it is new or has gone astray. Modifies."""
        followed = self._worker_to_followed.get(worker)
        if followed is None:
            if worker not in self._worker_to_load and not self._is_oversized(worker, lease):
                self._load(worker)
        elif self._has_gone_astray(followed, lease):
            self._reload(worker, _why_astray(followed, lease))
        else:
            self._settle(worker, followed)

    def _has_gone_astray(self, followed: _Followed, lease: Lease) -> bool:
        """Whether the stream will never lead the copy to where the store is.

        Entries may have been trimmed before they were read, or been added where nobody reads any more, by a store whose
        clock went back. A copy that is merely late goes on with each read, so what counts is standing still behind the
        store through whole reads. One that is *before* the store is right: the publisher will mend the store.
        """
        if lease.epoch == followed.epoch and lease.seq <= followed.seq:
            followed.behind = None
            return False
        now_s = asyncio.get_running_loop().time()
        if followed.behind is not None and followed.behind[0] == followed.entry:
            _, num_reads, since_s = followed.behind
            # Where leases can be read and streams cannot, no read will ever tell.
            return followed.num_reads >= num_reads + _READS_TO_BE_SURE or now_s >= since_s + _LONGEST_STANDSTILL_S
        followed.behind = followed.entry, followed.num_reads, now_s
        return False

    # Loading.

    def _reload(self, worker: WorkerId, reason: str) -> None:
        """Load a worker again whose copy has gone astray. Modifies."""
        followed = self._worker_to_followed[worker]
        self._give_up(worker)
        if self._settle(worker, followed):
            logger.info("the mirror's copy of worker %s is loaded again: %s", worker, reason)
        else:
            self._note_wasted(worker, reason)
        self._load(worker)

    def _settle(self, worker: WorkerId, followed: _Followed) -> bool:
        """Whether the load of this copy was worth its while; then those before it count no more. Modifies."""
        loads = self._loads_of(worker)
        if not followed.is_shown or asyncio.get_running_loop().time() < loads.ended_at_s + _STEADY_S:
            return False
        if loads.is_told:
            logger.warning("worker %s is mirrored again", worker)
        loads.num_wasted, loads.is_told = 0, False
        return True

    def _load(self, worker: WorkerId) -> None:
        self._worker_to_load[worker] = asyncio.create_task(self._run_load(worker), name=f"mirror-load-{worker}")

    def _loads_of(self, worker: WorkerId) -> _Loads:
        return self._worker_to_loads.setdefault(worker, _Loads())

    def _is_oversized(self, worker: WorkerId, lease: Lease) -> bool:
        loads = self._worker_to_loads.get(worker)
        return loads is not None and loads.oversized == lease.epoch

    async def _run_load(self, worker: WorkerId) -> None:
        """Load until it succeeds or there is nothing to load. Whoever looks at the leases next tries again."""
        try:
            while await self._load_after_pause(worker):
                self._note_wasted(worker, _NEW_EPOCH)
        except DirectoryUnavailable as error:
            self._note_wasted(worker, str(error))
        except Exception:
            self._note_fault(f"loading worker {worker}")
            self._note_wasted(worker, "an unexpected error")
        finally:
            if self._worker_to_load.get(worker) is asyncio.current_task():
                del self._worker_to_load[worker]

    async def _load_after_pause(self, worker: WorkerId) -> bool:
        """Load once, when it is this worker's turn; true if it is to be done again at once."""
        clock = asyncio.get_running_loop().time
        loads = self._loads_of(worker)
        if loads.num_wasted:
            pause_s = min(_LONGEST_PAUSE_S, loads.lasted_s * 2.0 ** min(loads.num_wasted - 1, 32))
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
        async with self._load_permits:
            begun_at_s = clock()
            self._loading.add(worker)
            try:
                return not await self._try_load(worker, loads)
            finally:
                self._loading.discard(worker)
                loads.ended_at_s = clock()
                loads.lasted_s = loads.ended_at_s - begun_at_s

    async def _try_load(self, worker: WorkerId, loads: _Loads) -> bool:
        """One pass over the set; false if the worker took a new epoch meanwhile."""
        begin = await self._feed.position(worker)
        if begin is None:
            return True
        copy = self._mirror.begin(worker, begin.lease.instance)
        is_loaded = False
        try:
            num_keys = 0
            async with aclosing(self._feed.scan(worker)) as pieces:
                async for keys in pieces:
                    num_keys += len(keys)
                    if num_keys > _MAX_KEYS_PER_WORKER:
                        level = logging.DEBUG if loads.oversized else logging.ERROR
                        logger.log(level, "worker %s claims over %s blocks: not mirrored", worker, _MAX_KEYS_PER_WORKER)
                        loads.oversized = begin.lease.epoch
                        self.moved.set()
                        return True
                    await self._apply(copy, stored=tuple(keys))
            end = await self._feed.position(worker)
            if end is None or end.lease.epoch != begin.lease.epoch:
                return end is None
            is_loaded = True
        finally:
            if not is_loaded:
                self._drop(copy)
        self.num_loads += 1
        place = self._feed.place(worker)
        self._worker_to_followed[worker] = _Followed(
            copy, place, begin.lease.epoch, begin.lease.seq, begin.last_entry, shown_from_seq=end.lease.seq
        )
        self._place_to_workers[place].add(worker)
        if place not in self._place_to_task:
            self._place_to_task[place] = asyncio.create_task(self._follow(place), name=f"mirror-follow-{place}")
        return True

    def _note_wasted(self, worker: WorkerId, reason: str) -> None:
        """Count a load that came to nothing; one warning tells of a worker to whom that happens again and again."""
        self.num_wasted_loads += 1
        loads = self._loads_of(worker)
        loads.num_wasted += 1
        is_news = loads.num_wasted >= _WASTED_LOADS_TO_WARN and not loads.is_told
        loads.is_told = loads.is_told or is_news
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "worker %s is not mirrored after %s attempts, the last of %.1f s, and is matched through the store; it is "
            "tried again with growing pauses: %s",
            worker,
            loads.num_wasted,
            loads.lasted_s,
            reason,
        )

    def _note_fault(self, what: str) -> None:
        level = logging.DEBUG if self.num_faults else logging.ERROR
        self.num_faults += 1
        logger.log(level, "%s failed", what, exc_info=True)

    # Following.

    async def _follow(self, place: str) -> None:
        """Read the streams of one place until nobody is left there."""
        workers = self._place_to_workers[place]
        while workers:
            try:
                shown = self._select(workers, is_shown=True)
                if len(shown) < len(workers):
                    await self._read(self._select(workers, is_shown=False), 0.0)
                    shown = self._select(workers, is_shown=True)
                if shown:
                    await self._read(shown, self._wait_at(place, are_all_shown=len(shown) == len(workers)))
            except DirectoryUnavailable as error:
                logger.debug("event streams cannot be read: %s", error)
                await asyncio.sleep(_PAUSE_S)
            except Exception:
                # A fault here must not end the following for good.
                self._note_fault("following event streams")
                await asyncio.sleep(_PAUSE_S)
        del self._place_to_workers[place], self._place_to_task[place]

    def _select(self, workers: Set[WorkerId], *, is_shown: bool) -> dict[WorkerId, _Followed]:
        worker_to_followed = self._worker_to_followed
        return {worker: followed for worker in workers if (followed := worker_to_followed[worker]).is_shown == is_shown}

    def _wait_at(self, place: str, *, are_all_shown: bool) -> float:
        """Short while there are workers that will be read together with these, and wait for this read to end."""
        is_awaited = not are_all_shown or any(self._feed.place(worker) == place for worker in self._loading)
        return min(self._wait_s, _WAIT_WHILE_LOADING_S) if is_awaited else self._wait_s

    async def _read(self, asked: Mapping[WorkerId, _Followed], wait_s: float) -> None:
        """Read once and take in what is new. A worker is shown only once it is among those that are read."""
        news = await self._feed.read({worker: followed.entry for worker, followed in asked.items()}, wait_s)
        for worker, entries in news.items():
            followed = asked[worker]
            for entry in entries:
                batch = self._next_batch(worker, followed, entry)
                if batch is None:
                    break
                await self._apply(followed.copy, batch.stored, batch.removed)
                followed.seq, followed.entry = batch.seq, entry.entry
        for worker, followed in asked.items():
            followed.num_reads += 1
            if followed.is_shown or self._worker_to_followed.get(worker) is not followed:
                continue
            if followed.seq >= followed.shown_from_seq:
                followed.is_shown = True
                self._mirror.show(followed.copy)
            elif worker not in news:
                # Its stream does not hold what it held when the scan ended.
                self._reload(worker, _OVERTAKEN)
        self.moved.set()

    def _next_batch(self, worker: WorkerId, followed: _Followed, entry: Entry) -> EventBatch | None:
        """The batch of an entry, if it is to be taken in; a worker whose entry does not fit is loaded again."""
        if self._worker_to_followed.get(worker) is not followed:
            return None  # it has been forgotten or loaded again meanwhile
        batch = entry.batch
        if batch is None:
            self._reload(worker, "an entry of its stream is malformed")
            return None
        if batch.holder.epoch != followed.epoch or batch.seq != followed.seq + 1:
            self._reload(worker, _NEW_EPOCH if batch.holder.epoch != followed.epoch else _OVERTAKEN)
            return None
        return batch

    async def _apply(self, copy: Copy, stored: Keys = (), removed: Keys = ()) -> None:
        """Take changes in, with a turn for others now and then."""
        for part_stored, part_removed in in_parts(stored, removed, _KEYS_PER_TURN):
            self._mirror.apply(copy, part_stored, part_removed)
            if self._is_turn_over(len(part_stored) + len(part_removed)):
                await asyncio.sleep(0)
        self.num_keys_applied += len(stored) + len(removed)

    def _is_turn_over(self, num_keys: int) -> bool:
        """Whether it is time for others, so many changes later. Modifies."""
        self._num_keys_this_turn += num_keys
        if self._num_keys_this_turn < _KEYS_PER_TURN:
            return False
        self._num_keys_this_turn = 0
        return True

    # Cleaning.

    def _drop(self, copy: Copy) -> None:
        self._mirror.drop(copy)
        self._has_dropped.set()

    async def _clean(self) -> None:
        while True:
            await self._has_dropped.wait()
            self._has_dropped.clear()
            try:
                while self._mirror.has_dropped:
                    self._mirror.clean(_KEYS_PER_TURN)
                    await asyncio.sleep(0)
            except Exception:
                # A fault here must not end the cleaning for good: it goes on with the next copy that is dropped.
                self._note_fault("cleaning the mirror")


def _why_astray(followed: _Followed, lease: Lease) -> str:
    """Why the stream does not lead a copy that stands still to where the store is."""
    if followed.epoch != lease.epoch:
        return _NEW_EPOCH
    is_read = followed.behind is not None and followed.num_reads > followed.behind[1]
    return _OVERTAKEN if is_read else _UNREADABLE
