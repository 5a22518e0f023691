"""Requests' claims on workers, and what of them no status tells yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import KvrouteError
from shared.transport.base import DeltaStream, WorkerClient
from shared.types import Instance, RequestId, WorkerId


@dataclass(slots=True, eq=False, repr=False)
class Booking:
    """One request's claim on a worker, from the decision until its end."""

    request: RequestId
    worker: WorkerId
    instance: Instance
    client: WorkerClient
    claims: Claims
    """Where it counts while it is live."""
    uncached_tokens: int
    demand_blocks: int
    submit: int | None = None
    """The number of the submit on the worker's client, so that a status can tell whether it counts it."""
    movable: DeltaStream | None = None
    """What it reads, for as long as it may be given up here and go on elsewhere."""
    _has_first_token: bool = field(default=False, init=False)

    @property
    def has_first_token(self) -> bool:
        """Told to the fleet, which counts it: `Fleet.note_first_token`."""
        return self._has_first_token


class Claims:
    """This router's bookings on one worker.

    `unseen` ones are in no status so far; `pending` ones have no first token. The three sums are kept as bookings come
    and go, and equal what adding up the live bookings would give.
    """

    def __init__(self) -> None:
        self.unseen_tokens = 0
        """Uncached tokens of the bookings that are unseen and pending."""
        self.pending_blocks = 0
        """Demand of the pending ones: blocks are taken when prefill begins, which a status may not show yet."""
        self._live: set[Booking] = set()
        self._unseen: set[Booking] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    def add(self, booking: Booking) -> None:
        """Count a new booking. Modifies."""
        self._live.add(booking)
        self._unseen.add(booking)
        self.unseen_tokens += booking.uncached_tokens
        self.pending_blocks += booking.demand_blocks

    def note_first_token(self, booking: Booking) -> None:
        """Its prefill is over. Modifies; to be told twice, or after the end, changes no sum."""
        if booking in self._live and not booking._has_first_token:
            self.pending_blocks -= booking.demand_blocks
            if booking in self._unseen:
                self.unseen_tokens -= booking.uncached_tokens
        booking._has_first_token = True

    def note_seen(self, last_submit: int) -> None:
        """A status tells of all submits up to this one. Modifies."""
        seen = [booking for booking in self._unseen if booking.submit is not None and booking.submit <= last_submit]
        for booking in seen:
            self._see(booking)

    def remove(self, booking: Booking) -> None:
        """End a booking. Modifies; one that has ended already is no error."""
        if booking not in self._live:
            return
        if booking in self._unseen:
            self._see(booking)
        if not booking._has_first_token:
            self.pending_blocks -= booking.demand_blocks
        self._live.discard(booking)

    def give_up(self, error: KvrouteError) -> int:
        """Have what may go on elsewhere do so, with `error`; how many that are. They end as ever, in their own time."""
        moved = sorted((one for one in self._live if one.movable is not None), key=lambda booking: booking.submit or 0)
        for booking in moved:
            stream, booking.movable = booking.movable, None
            assert stream is not None, "only what is movable has been picked"
            stream.give_up(error)
        return len(moved)

    def _see(self, booking: Booking) -> None:
        self._unseen.discard(booking)
        if not booking._has_first_token:
            self.unseen_tokens -= booking.uncached_tokens
