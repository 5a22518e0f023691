"""Loads in columns: written one at a time as workers tell news or requests come and go, read as frozen snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from router.policies.base import Floats, Ints, Loads
from shared.types import Instance, WorkerId

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


@dataclass(frozen=True, slots=True)
class Column:
    """What does change, as told or counted last."""

    num_requests: int
    queued_prefill_tokens: int
    kv_used_blocks: int
    step_budget_tokens: int
    last_booking: int
    """The number of the last send that went to the worker, of all sends of this router."""
    measured_prefill_s_per_token: float
    """0.0 while nothing is measured."""
    step_s: float
    decode_s_per_seq: float
    round_trip_s: float
    status_at_s: float
    """When its last status came; infinite before the first, which makes it no older than the moment."""


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
        self._ints = np.zeros((5, len(workers)), dtype=np.int64)
        self._floats = np.zeros((5, len(workers)), dtype=np.float64)
        for array in (self._hashes, self._is_cache_aware, self._is_home, self._max_num_seqs, self._kv_total_blocks):
            array.flags.writeable = False
        self._snapshot: Loads | None = None
        self._status_at_s: Floats = self._floats[4]
        self._now_s = 0.0

    def write(self, at: int, column: Column, num_booked: int) -> None:
        """Replace one worker's column. Modifies. `num_booked` counts all sends of this router so far."""
        self._ints[:, at] = (
            column.num_requests,
            column.queued_prefill_tokens,
            column.kv_used_blocks,
            column.step_budget_tokens,
            column.last_booking,
        )
        self._floats[:, at] = (
            column.measured_prefill_s_per_token,
            column.step_s,
            column.decode_s_per_seq,
            column.round_trip_s,
            column.status_at_s,
        )
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
            num_requests, queued_prefill_tokens, kv_used_blocks, step_budget_tokens, last_bookings = ints
            measured, step_s, decode_s_per_seq, round_trip_s, self._status_at_s = floats
            prefill_s_per_token = self._prefill_s_per_token(measured, last_bookings)
        else:
            num_requests, queued_prefill_tokens = known.num_requests, known.queued_prefill_tokens
            kv_used_blocks, step_budget_tokens = known.kv_used_blocks, known.step_budget_tokens
            step_s, decode_s_per_seq, round_trip_s = known.step_s, known.decode_s_per_seq, known.round_trip_s
            prefill_s_per_token = known.prefill_s_per_token
        self._snapshot = Loads(
            workers=self._workers,
            instances=self._instances,
            hashes=self._hashes,
            is_cache_aware=self._is_cache_aware,
            is_home=self._is_home,
            num_requests=num_requests,
            max_num_seqs=self._max_num_seqs,
            queued_prefill_tokens=queued_prefill_tokens,
            kv_used_blocks=kv_used_blocks,
            kv_total_blocks=self._kv_total_blocks,
            step_budget_tokens=step_budget_tokens,
            prefill_s_per_token=prefill_s_per_token,
            step_s=step_s,
            decode_s_per_seq=decode_s_per_seq,
            round_trip_s=round_trip_s,
            status_age_s=np.maximum(now_s - self._status_at_s, 0.0),
        )
        return self._snapshot

    def _prefill_s_per_token(self, measured: Floats, last_bookings: Ints) -> Floats:
        """What workers have measured, and the typical speed for those that have not, or not of late."""
        overlooked_before = self._num_booked - _OVERLOOKED_AFTER * len(measured)
        if not len(measured) or (measured.min() > 0.0 and last_bookings.min() >= overlooked_before):
            return measured
        known = np.sort(measured[measured > 0.0])
        # The lower median: a speed that some worker really has.
        typical = known[(len(known) - 1) // 2] if len(known) else _NOMINAL_PREFILL_S_PER_TOKEN
        told = np.where(measured > 0.0, measured, typical)
        return np.where(last_bookings < overlooked_before, np.minimum(told, typical), told)
