"""Loads in columns: written one at a time as workers tell news or requests come and go, read as frozen snapshots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from router.bookings import Claims
from router.policies.base import UNLIMITED_BLOCKS, Floats, Ints, Loads
from shared.transport.base import WorkerClient
from shared.types import Instance, WorkerId, WorkerInfo, WorkerStatus

_NOMINAL_PREFILL_S_PER_TOKEN = 1e-4
"""Stands in until any worker has measured itself. Only ratios decide, so any positive number would do."""
_OVERLOOKED_AFTER = 32
"""A worker that none of this many sends for each worker went to counts as no slower than its peers: what it said of its
speed is old by then, and only a request can renew it. Counted in sends, so that fleets of all speeds do the same."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What does not change about a worker while it is in the table."""

    worker: WorkerId
    instance: Instance
    is_cache_aware: bool
    is_home: bool
    max_num_seqs: int
    kv_total_blocks: int


Count = TypeVar("Count")
Time = TypeVar("Time")


class Column(NamedTuple, Generic[Count, Time]):
    """What does change, as told or counted last: numbers of things, then times. Of one worker, or of all in arrays."""

    num_requests: Count
    num_waiting: Count
    queued_prefill_tokens: Count
    kv_used_blocks: Count
    kv_demand_blocks: Count
    num_resident_blocks: Count
    step_budget_tokens: Count
    free_blocks: Count
    last_booking: Count
    """The number of the last send that went to the worker, of all sends of this router."""
    measured_prefill_s_per_token: Time
    """0.0 while nothing is measured."""
    step_s: Time
    decode_s_per_seq: Time
    round_trip_s: Time
    status_at_s: Time
    """When its last status came; infinite before the first, which makes it no older than the moment."""
    queued_prefill_s: Time
    step_budget_s: Time
    decode_s: Time
    busy_step_s: Time
    fullness: Time


_NUM_INTS = Column._fields.index("measured_prefill_s_per_token")


class LoadTable:
    """Owns the columns of the workers that may be sent to. A snapshot once given never changes."""

    def __init__(self) -> None:
        self._num_booked = 0
        self.reset(())

    def reset(self, workers: Sequence[Fixed]) -> None:
        """Begin anew with these workers, in this order, all columns zero. Modifies."""
        self._workers = tuple(fixed.worker for fixed in workers)
        self._instances = tuple(fixed.instance for fixed in workers)
        self._hashes = np.array([xxh3_64_intdigest(fixed.worker.encode()) for fixed in workers], dtype=np.uint64)
        self._is_cache_aware = np.array([fixed.is_cache_aware for fixed in workers], dtype=np.bool_)
        self._is_home = np.array([fixed.is_home for fixed in workers], dtype=np.bool_)
        self._max_num_seqs = np.array([fixed.max_num_seqs for fixed in workers], dtype=np.int64)
        self._kv_total_blocks = np.array([fixed.kv_total_blocks for fixed in workers], dtype=np.int64)
        self._ints = np.zeros((_NUM_INTS, len(workers)), dtype=np.int64)
        self._floats = np.zeros((len(Column._fields) - _NUM_INTS, len(workers)), dtype=np.float64)
        self._nominal_speeds = np.full(len(workers), _NOMINAL_PREFILL_S_PER_TOKEN)
        for array in (
            self._hashes,
            self._is_cache_aware,
            self._is_home,
            self._max_num_seqs,
            self._kv_total_blocks,
            self._nominal_speeds,
        ):
            array.flags.writeable = False
        self._snapshot: Loads | None = None
        self._read: Column[Ints, Floats] = Column(*self._ints, *self._floats)
        """The columns as the last snapshot read them, and the speeds that follow."""
        self._speeds = self._find_speeds(self._read)
        self._now_s = 0.0

    def write(self, at: int, column: Column[int, float], num_booked: int) -> None:
        """Replace one worker's column. Modifies. `num_booked` counts all sends of this router so far."""
        self._ints[:, at] = column[:_NUM_INTS]
        self._floats[:, at] = column[_NUM_INTS:]
        self._num_booked = num_booked
        self._snapshot = None

    def snapshot(self, now_s: float) -> Loads:
        """The loads as they stand. Costs next to nothing where nothing was written since the last one."""
        known = self._snapshot
        if known is not None and now_s == self._now_s:
            return known
        self._now_s = now_s
        if known is None:
            ints, floats = self._ints.copy(), self._floats.copy()
            floats.flags.writeable = ints.flags.writeable = False
            self._read = Column(*ints, *floats)
            self._speeds = self._find_speeds(self._read)
        read, (prefill_s_per_token, queued_prefill_s, step_budget_s) = self._read, self._speeds
        self._snapshot = Loads(
            workers=self._workers,
            instances=self._instances,
            hashes=self._hashes,
            is_cache_aware=self._is_cache_aware,
            is_home=self._is_home,
            num_requests=read.num_requests,
            num_waiting=read.num_waiting,
            max_num_seqs=self._max_num_seqs,
            queued_prefill_tokens=read.queued_prefill_tokens,
            kv_used_blocks=read.kv_used_blocks,
            kv_demand_blocks=read.kv_demand_blocks,
            kv_total_blocks=self._kv_total_blocks,
            num_resident_blocks=read.num_resident_blocks,
            step_budget_tokens=read.step_budget_tokens,
            prefill_s_per_token=prefill_s_per_token,
            step_s=read.step_s,
            decode_s_per_seq=read.decode_s_per_seq,
            round_trip_s=read.round_trip_s,
            status_age_s=np.maximum(now_s - read.status_at_s, 0.0),
            queued_prefill_s=queued_prefill_s,
            step_budget_s=step_budget_s,
            decode_s=read.decode_s,
            busy_step_s=read.busy_step_s,
            fullness=read.fullness,
            free_blocks=read.free_blocks,
        )
        return self._snapshot

    def _find_speeds(self, read: Column[Ints, Floats]) -> tuple[Floats, Floats, Floats]:
        """Prefill time of a token, of what is queued and of a step: as measured, or where a worker has not measured its
        own, or not of late, as is typical."""
        measured = read.measured_prefill_s_per_token
        num_known = np.count_nonzero(measured > 0.0)
        overlooked_before = self._num_booked - _OVERLOOKED_AFTER * len(measured)
        if num_known == len(measured) and (
            not num_known or read.last_booking[read.last_booking.argmin()] >= overlooked_before
        ):
            return measured, read.queued_prefill_s, read.step_budget_s
        if num_known:
            known = measured[measured > 0.0]
            known.sort()
            # The lower median: a speed that some worker really has.
            typical = known[(len(known) - 1) // 2]
            told = np.where(measured > 0.0, measured, typical)
            speeds = np.where(read.last_booking < overlooked_before, np.minimum(told, typical), told)
        else:
            # Some engines never tell a speed.
            speeds = self._nominal_speeds
        return speeds, read.queued_prefill_tokens * speeds, read.step_s + read.step_budget_tokens * speeds


def column_of(
    info: WorkerInfo, client: WorkerClient, claims: Claims, last_booking: int, now_s: float
) -> Column[int, float]:
    """What one worker has to do, as far as this router can know. Modifies the claims: what its status tells is seen."""
    claims.note_seen(client.acknowledged_submit)
    status = client.status or _IDLE_STATUS
    num_requests = status.num_running + status.num_waiting + claims.num_unseen
    queued_prefill_tokens = status.queued_prefill_tokens + claims.unseen_tokens
    # Prefills take their blocks as they go: what all routers' accepted ones have still to take, the worker has told.
    accepted_blocks = -(-status.queued_prefill_tokens // info.scheme.block_size_tokens)
    kv_demand_blocks = status.kv_used_blocks + accepted_blocks + claims.unseen_blocks
    kv_used_blocks = min(kv_demand_blocks, info.num_blocks)
    decode_s = num_requests * status.decode_s_per_seq
    return Column(
        num_requests=num_requests,
        num_waiting=status.num_waiting + claims.num_unseen,
        queued_prefill_tokens=queued_prefill_tokens,
        kv_used_blocks=kv_used_blocks,
        kv_demand_blocks=kv_demand_blocks,
        num_resident_blocks=status.num_resident_blocks,
        step_budget_tokens=status.step_budget_tokens,
        free_blocks=info.num_blocks - kv_used_blocks if num_requests else UNLIMITED_BLOCKS,
        last_booking=last_booking,
        measured_prefill_s_per_token=status.prefill_s_per_token,
        step_s=status.step_s,
        decode_s_per_seq=status.decode_s_per_seq,
        round_trip_s=client.round_trip_s,
        status_at_s=math.inf if client.status is None else now_s - client.status_age_s,
        queued_prefill_s=queued_prefill_tokens * status.prefill_s_per_token,
        step_budget_s=status.step_s + status.step_budget_tokens * status.prefill_s_per_token,
        decode_s=decode_s,
        busy_step_s=status.step_s + decode_s,
        fullness=max(kv_used_blocks / info.num_blocks, num_requests / info.max_num_seqs),
    )


_IDLE_STATUS = WorkerStatus(
    num_running=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    kv_used_blocks=0,
    kv_total_blocks=0,
    prefill_s_per_token=0.0,
    step_s=0.0,
    decode_s_per_seq=0.0,
    step_budget_tokens=0,
)
"""What a worker that has just joined is taken for until its first frame."""
