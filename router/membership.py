"""One worker as its router knows it: the connection, the claims on it, and whether it may be sent to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.bookings import Claims
from router.members import Member
from shared.directory.base import WorkerRecord
from shared.transport.base import WorkerClient

STATES = ("ready", "silent", "away", "draining", "resting", "suspected")


@dataclass(slots=True)
class Membership:
    """A worker of the fleet. The fleet alone writes to it."""

    record: WorkerRecord
    client: WorkerClient
    is_cache_aware: bool
    claims: Claims = field(default_factory=Claims)
    rest_until_s: float = 0.0
    last_booking: int = 0
    """The number of the last send that went to it, of all sends of this router."""
    probe: asyncio.Task[None] | None = None
    is_ending: bool = False
    """Whether it has said that its engine died; its connection may stand for a moment yet."""
    is_silent: bool = False
    """Whether its silence has been told of, and no word of it since."""
    state: str = "away"
    """As of the last roll call."""
    column: int | None = None
    """Its place among the loads, if it may be sent to."""

    def state_at(self, now_s: float, *, is_suspected: bool) -> str:
        """One of `STATES`; the first of several reasons not to send to it. Does not modify."""
        status = self.client.status
        if self.is_ending or not self.client.is_connected:
            return "away"
        if self.record.is_draining or (status is not None and status.is_draining):
            return "draining"
        if is_suspected:
            return "suspected"
        if self.rest_until_s > now_s:
            return "resting"
        return "silent" if self.client.num_silences else "ready"

    def seen(self, state: str, *, is_home: bool) -> Member:
        """As whoever watches sees it. Does not modify."""
        return Member(
            info=self.record.info,
            state=state,
            status=self.client.status,
            status_age_s=self.client.status_age_s,
            round_trip_s=self.client.round_trip_s,
            is_cache_aware=self.is_cache_aware,
            is_home=is_home,
            num_bookings=len(self.claims),
        )

    async def disconnect(self) -> None:
        """End probe and connection. Modifies."""
        if self.probe is not None:
            self.probe.cancel()
            await asyncio.gather(self.probe, return_exceptions=True)
        await self.client.close()
