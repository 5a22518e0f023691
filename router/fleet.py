"""The workers that this router can send to: membership, connections, bookings and the load that follows from them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from router.bookings import Booking
from router.loads import Fixed, LoadTable, column_of
from router.members import Member
from router.membership import STATES, Membership
from router.policies.base import Loads
from router.suspicion import Suspicion
from shared.directory.base import Directory, RouterPlace, WorkerRecord
from shared.errors import AuthenticationFailed, DirectoryUnavailable, EngineDied, KvrouteError, WorkerLost, WorkerSilent
from shared.hashing import pack_tokens
from shared.transport.base import OnChange, WorkerClient
from shared.types import Instance, RequestId, RouterId, Sampling, WorkerId

logger = logging.getLogger(__name__)

_REST_S = 1.0
"""How long a worker that broke or answered busy is passed over when it names no time itself."""
_MAX_REST_S = 30.0
_PROBE_TIMEOUT_S = 10.0
_ROUTER_LEASE_REFRESHES = 3.0
"""A router that has not been heard of for so many refreshes is not counted by its peers any more."""

Connect = Callable[[WorkerRecord, OnChange], WorkerClient]


class Fleet:
    """Owns membership, connections, bookings and suspicion.

    A worker joins when the directory names it and it can be reached. It leaves when its connection is gone, or when
    the directory names another life of it; a store that forgets or fails takes nobody away, since a connection that
    stands is better proof of life than a lease that the store has lost. With `only`, workers of other names are left
    to the deployments that started them.

    A worker that has fallen silent gets nothing new, unless all have; if it stays so, what it has under way moves. Its
    next word ends that. One that cannot be reached, or that broke `MAX_FAILURES` requests in a row, is suspect: it gets
    a probe after growing pauses and nothing else until one succeeds. Refusals and busy answers are no failures.
    """

    def __init__(
        self,
        directory: Directory,
        connect: Connect,
        *,
        parity_key: bytes,
        clock: Callable[[], float],
        on_change: OnChange,
        on_leave: Callable[[WorkerId], None],
        router: RouterId | None = None,
        only: Container[WorkerId] | None = None,
        refresh_s: float = 1.0,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._parity_key = parity_key
        self._clock = clock
        self._on_change = on_change
        self._on_leave = on_leave
        self._router = router
        self._only = only
        self._refresh_s = refresh_s
        self._members: dict[WorkerId, Membership] = {}
        self._records: dict[WorkerId, WorkerRecord] = {}
        """Who lives, as the directory has told last."""
        self._worker_to_instance: Mapping[WorkerId, Instance] | None = None
        self._max_model_len_tokens = 0
        """Of the members of `_worker_to_instance`."""
        self._table = LoadTable()
        self._is_roll_due = True
        """Whether who may be sent to has changed since the last roll call."""
        self._unwritten: set[WorkerId] = set()
        """Workers with news that their columns do not show yet."""
        self._suspicion = Suspicion(clock)
        self._place = RouterPlace()
        self._homes: frozenset[WorkerId] = frozenset()
        self._num_booked = 0
        self._num_probes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_bookings(self) -> int:
        return sum(len(member.claims) for member in self._members.values())

    @property
    def worker_to_instance(self) -> Mapping[WorkerId, Instance]:
        """Every member and the life of it that this router is connected to. The same object until that changes."""
        if self._worker_to_instance is None:
            self._worker_to_instance = {worker: member.client.instance for worker, member in self._members.items()}
            lengths = (member.record.info.max_model_len_tokens for member in self._members.values())
            self._max_model_len_tokens = max(lengths, default=0)
        return self._worker_to_instance

    @property
    def max_model_len_tokens(self) -> int | None:
        """The longest context among the members; `None` while there is none."""
        return self._max_model_len_tokens if self.worker_to_instance else None

    @property
    def num_routers(self) -> int:
        """Live routers of these workers, this one among them."""
        return self._place.num_routers

    async def start(self) -> None:
        """Join the workers that the directory names now, and follow it from then on."""
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="fleet")

    async def close(self) -> None:
        """Cancel what is under way and disconnect from everybody."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for member in list(self._members.values()):
            await member.disconnect()
        self._members.clear()
        self._worker_to_instance = None
        self._unwritten.clear()
        self._is_roll_due = True

    def state_to_count(self) -> dict[str, int]:
        """How many workers are in each state. Does not modify."""
        now = self._clock()
        states = Counter(self._state(member, now) for member in self._members.values())
        return {state: states[state] for state in STATES}

    def members(self) -> list[Member]:
        """Every worker, by id, for whoever watches. Does not modify."""
        now_s = self._clock()
        return [
            member.seen(self._state(member, now_s), is_home=worker in self._homes)
            for worker, member in sorted(self._members.items())
        ]

    def _state(self, member: Membership, now_s: float) -> str:
        return member.state_at(now_s, is_suspected=self._suspicion.is_open(member.client.instance))

    def loads(self) -> Loads:
        """Loads of the workers that may be sent to now, by worker id. Costs next to nothing where nothing has changed.

        Modifies no more than the columns that are due.
        """
        now_s = self._clock()
        for worker in self._unwritten:
            self._check_state(self._members[worker], now_s)
        if self._is_roll_due:
            self._call_roll()
        for worker in self._unwritten:
            member = self._members[worker]
            if member.column is not None:
                column = column_of(member.record.info, member.client, member.claims, member.last_booking, now_s)
                self._table.write(member.column, column, self._num_booked)
        self._unwritten.clear()
        return self._table.snapshot(now_s)

    def book(self, worker: WorkerId, request: RequestId, *, uncached_tokens: int, demand_blocks: int) -> Booking:
        """Claim a place on a worker. Modifies; every booking must be released."""
        member = self._members[worker]
        client, claims = member.client, member.claims
        booking = Booking(request, worker, client.instance, client, claims, uncached_tokens, demand_blocks)
        claims.add(booking)
        self._num_booked += 1
        member.last_booking = self._num_booked
        self._unwritten.add(worker)
        return booking

    def note_first_token(self, booking: Booking) -> None:
        """A request's prefill is over: its worker has it in hand now, and tells of it itself. Modifies."""
        booking.claims.note_first_token(booking)
        self._take_change(booking)

    def release(self, booking: Booking) -> None:
        """End a booking. Modifies; a worker that has left meanwhile is no error."""
        booking.claims.remove(booking)
        self._take_change(booking)

    def _take_change(self, booking: Booking) -> None:
        member = self._members.get(booking.worker)
        if member is not None and member.claims is booking.claims:
            self._unwritten.add(booking.worker)
        self._on_change()

    def _call_roll(self) -> None:
        """Take stock of who may be sent to, and give each its column."""
        now = self._clock()
        self._is_roll_due = False
        members = [member for _, member in sorted(self._members.items())]
        for member in members:
            member.state, member.column = self._state(member, now), None
        ready = [member for member in members if member.state == "ready"]
        if not ready and not any(member.state == "resting" for member in members):
            # Where all are silent the fault may be on this side, and there is nobody to go to in their place.
            ready = [member for member in members if member.state == "silent"]
        for column, member in enumerate(ready):
            member.column = column
        self._table.reset([self._fixed(member) for member in ready])
        self._unwritten = {member.record.info.worker for member in ready}

    def _fixed(self, member: Membership) -> Fixed:
        info = member.record.info
        return Fixed(
            worker=info.worker,
            instance=member.client.instance,
            is_cache_aware=member.is_cache_aware,
            is_home=info.worker in self._homes,
            max_num_seqs=info.max_num_seqs,
            kv_total_blocks=info.num_blocks,
        )

    def _take_news(self, worker: WorkerId) -> None:
        """A worker's connection tells of a change. Whether it may still be sent to is looked at with the next loads."""
        member = self._members.get(worker)
        if member is not None:
            self._unwritten.add(worker)
            if member.client.num_silences:
                self._note_silence(member)
            elif member.is_silent and member.client.is_connected:
                member.is_silent = False
                logger.warning("worker %s speaks again", worker)
        self._on_change()

    def _note_silence(self, member: Membership) -> None:
        """A worker has kept silent once more: what would come to it goes elsewhere, and then what it has under way."""
        worker, num_silences = member.record.info.worker, member.client.num_silences
        if not member.is_silent:
            member.is_silent = True
            logger.warning("worker %s has fallen silent: it gets nothing new until it speaks again", worker)
        if num_silences > 1 and any(self._state(other, self._clock()) == "ready" for other in self._members.values()):
            num_moved = member.claims.give_up(WorkerSilent(f"worker {worker} has fallen silent"))
            if num_moved:
                logger.warning("worker %s is silent still: %s requests of it go elsewhere", worker, num_moved)

    def _check_state(self, member: Membership, now_s: float) -> None:
        self._is_roll_due |= self._state(member, now_s) != member.state

    def rest(self, worker: WorkerId, retry_after_s: float | None) -> None:
        """Pass over a worker that answered busy, for a short while. Modifies."""
        if worker in self._members:
            delay_s = min(retry_after_s or _REST_S, _MAX_REST_S)
            member = self._members[worker]
            rest_until_s = self._clock() + delay_s
            if rest_until_s > member.rest_until_s:
                member.rest_until_s = rest_until_s
                asyncio.get_running_loop().call_later(delay_s, self._end_rest, member, rest_until_s)
            self._is_roll_due = True

    def _end_rest(self, member: Membership, rest_until_s: float) -> None:
        # A timer may come a moment early by the clock.
        if member.rest_until_s == rest_until_s:
            member.rest_until_s = 0.0
            self._is_roll_due = True
            self._on_change()

    def note_failure(self, booking: Booking, error: Exception) -> None:
        """Count a broken connection or a failure of the engine against the worker. Modifies."""
        member = self._members.get(booking.worker)
        if isinstance(error, EngineDied) and member is not None and member.claims is booking.claims:
            member.is_ending = self._is_roll_due = True
        num_failures = self._suspicion.note_failure(booking.instance)
        if num_failures:
            logger.warning(
                "worker %s failed %s requests in a row (%s): it gets none until a probe succeeds",
                booking.worker,
                num_failures,
                error,
            )
            self._is_roll_due = True

    def note_finished(self, booking: Booking) -> None:
        """A request came to its end: what spoke against the worker is void, unless it waits for a probe. Modifies."""
        self._suspicion.note_finished(booking.instance)

    async def refresh(self) -> None:
        """Bring membership in line with the directory and with the connections that stand. Modifies."""
        try:
            listed = await self._directory.workers()
            await self._take_place([record.info.worker for record in listed])
            self._records = {
                record.info.worker: record
                for record in listed
                if self._only is None or record.info.worker in self._only
            }
            known = {record.info.instance for record in self._records.values()} | set(self.worker_to_instance.values())
            self._suspicion.keep(known)
        except DirectoryUnavailable:
            # Whoever answers at the address that was told last lives still.
            pass
        records = self._records
        for worker, member in list(self._members.items()):
            record = records.get(worker)
            if record is not None and record.info.instance != member.record.info.instance:
                await self._leave(worker, "a new life of it has registered")
            elif member.client.is_lost:
                # Its lease may stand for a while yet: that it cannot be reached again is no news then.
                self._suspicion.note_left(member.client.instance)
                await self._leave(worker, "its connection is gone")
            elif record is not None:
                member.record = record
        joining = [
            record
            for worker, record in sorted(records.items())
            if worker not in self._members and self._suspicion.may_try(record.info.instance)
        ]
        if joining:
            await asyncio.gather(*(self._join(record) for record in joining))
        now_s = self._clock()
        for member in self._members.values():
            self._check_awareness(member)
            self._check_state(member, now_s)
            instance = member.client.instance
            if (
                self._suspicion.is_open(instance)
                and self._suspicion.may_try(instance)
                and member.client.is_connected
                and not member.probe
            ):
                member.probe = asyncio.create_task(self._probe(member), name=f"probe-{member.record.info.worker}")

    async def _take_place(self, names: Sequence[WorkerId]) -> None:
        """Tell the other routers of this one, and hear where it stands: which workers are its homes follows."""
        place = self._place
        if self._router is not None:
            place = await self._directory.announce_router(self._router, _ROUTER_LEASE_REFRESHES * self._refresh_s)
        # The order of all workers is the same for all routers.
        homes = frozenset(sorted(names)[place.rank :: place.num_routers])
        self._is_roll_due |= (place, homes) != (self._place, self._homes)
        self._place, self._homes = place, homes

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self.refresh()
            except Exception:
                # A fault here must not end the following of the directory for good.
                logger.exception("refresh of the fleet failed")

    async def _join(self, record: WorkerRecord) -> None:
        worker, instance = record.info.worker, record.info.instance
        client = self._connect(record, partial(self._take_news, worker))
        try:
            await client.connect()
        except (WorkerLost, AuthenticationFailed) as error:
            await client.close()
            if self._suspicion.note_unreached(instance):
                logger.warning(
                    "worker %s cannot be reached (%s): it is tried again after growing pauses", worker, error
                )
            return
        self._suspicion.note_reached(instance)
        is_cache_aware = record.info.parity_key == self._parity_key
        if not is_cache_aware:
            logger.error(
                "worker %s does not compute our block keys (its scheme: %s; tokenizer files may differ): "
                "it is used, but not for its cache",
                worker,
                record.info.scheme.namespace,
            )
        self._members[worker] = Membership(record, client, is_cache_aware, last_booking=self._num_booked)
        self._worker_to_instance = None
        self._is_roll_due = True
        logger.info("worker %s joined (%s at %s)", worker, record.info.engine, record.info.address)
        self._on_change()

    async def _leave(self, worker: WorkerId, reason: str) -> None:
        member = self._members.pop(worker)
        self._worker_to_instance = None
        logger.warning("worker %s left: %s", worker, reason)
        self._is_roll_due = True
        self._unwritten.discard(worker)
        self._on_leave(worker)
        await member.disconnect()
        self._on_change()

    def _check_awareness(self, member: Membership) -> None:
        """Use a worker for its cache no more once its engine has told of other blocks than it announced. Loud once."""
        status = member.client.status
        if member.is_cache_aware and status is not None and not status.is_cache_aware:
            member.is_cache_aware = False
            self._is_roll_due = True
            logger.error(
                "worker %s has other blocks than it announced (its own log says which): it is used, but not for its "
                "cache",
                member.record.info.worker,
            )
            self._on_change()

    async def _probe(self, member: Membership) -> None:
        """Have a suspect worker compute one token."""
        worker, instance = member.record.info.worker, member.client.instance
        self._num_probes += 1
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                deltas = member.client.submit(
                    RequestId(f"probe-{self._num_probes}"), 1, pack_tokens([0]), Sampling(max_tokens=1)
                )
                async with aclosing(deltas):
                    async for _ in deltas:
                        pass
        except (KvrouteError, TimeoutError) as error:
            logger.debug("probe of worker %s failed: %s", worker, error)
            self._suspicion.note_probe(instance, is_well=False)
        else:
            logger.warning("worker %s answers again", worker)
            self._suspicion.note_probe(instance, is_well=True)
            self._is_roll_due = True
            self._on_change()
        finally:
            member.probe = None
