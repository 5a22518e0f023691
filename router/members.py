"""Workers of a fleet as those see them who watch it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.types import WorkerInfo, WorkerStatus


@dataclass(frozen=True, slots=True)
class Member:
    """One worker at one moment, as one router knows it."""

    info: WorkerInfo
    state: str
    """One of `membership.STATES`."""
    status: WorkerStatus | None
    """`None` before its first frame."""
    status_age_s: float
    round_trip_s: float
    is_cache_aware: bool
    is_home: bool
    num_bookings: int
    """Requests of this router that are with it."""

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """How its KV blocks are used; `None` before its first frame."""
        return None if self.status is None else KvBlocks.of(self.status)


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """A worker's KV blocks by what they are good for. Each block counts once."""

    pinned: int
    running: int
    """Held by requests under way, and not pinned."""
    shared: int
    """Cached, idle, and used by two requests or more."""
    private: int
    """Cached, idle, and used by one request."""
    free: int
    """Without anything that a request could find."""

    @classmethod
    def of(cls, status: WorkerStatus) -> KvBlocks:
        """As a status tells. A pool that does not tell classes has all that it caches as private."""
        num_pinned = min(status.kv_pinned_blocks or 0, status.kv_used_blocks)
        num_idle = max(0, status.kv_total_blocks - status.kv_used_blocks)
        num_shared = min(status.kv_shared_blocks or 0, num_idle)
        if status.kv_private_blocks is None:
            num_private = max(0, status.num_resident_blocks - status.kv_used_blocks)
        else:
            num_private = status.kv_private_blocks
        num_private = min(num_private, num_idle - num_shared)
        return cls(
            pinned=num_pinned,
            running=status.kv_used_blocks - num_pinned,
            shared=num_shared,
            private=num_private,
            free=num_idle - num_shared - num_private,
        )
