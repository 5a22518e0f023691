"""The workers that this router can send to: membership, connections, bookings and the load that follows from them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import median_low

from router.policies.base import Load
from shared.directory.base import Directory, WorkerRecord
from shared.errors import AuthenticationFailed, DirectoryUnavailable, KvrouteError, WorkerLost
from shared.hashing import pack_tokens
from shared.transport.base import OnChange, WorkerClient
from shared.types import Instance, RequestId, Sampling, WorkerId, WorkerStatus

logger = logging.getLogger(__name__)

_NOMINAL_PREFILL_S_PER_TOKEN = 1e-4
"""Stands in until any worker has measured itself. Only ratios decide, so any positive number would do."""
_REST_S = 1.0
"""How long a worker that broke or answered busy is passed over when it names no time itself."""
_MAX_REST_S = 30.0
_MAX_FAILURES = 5
"""Failures in a row that make a worker suspect. One bad request fails a worker only as often as it is attempted."""
_PROBE_TIMEOUT_S = 10.0
_OVERLOOKED_AFTER = 32
"""A worker that none of this many sends for each worker went to counts as no slower than its peers: what it said of its
speed is old by then, and only a request can renew it. Counted in sends, so that fleets of all speeds do the same."""

Connect = Callable[[WorkerRecord, OnChange], WorkerClient]


@dataclass(slots=True, eq=False)
class Booking:
    """One request's claim on a worker, from the decision until its end."""

    request: RequestId
    worker: WorkerId
    instance: Instance
    client: WorkerClient
    uncached_tokens: int
    demand_blocks: int
    submit: int | None = None
    """The number of the submit on the worker's client, so that a status can tell whether it counts it."""
    has_first_token: bool = False


@dataclass(slots=True)
class _Member:
    record: WorkerRecord
    client: WorkerClient
    is_cache_aware: bool
    bookings: set[Booking] = field(default_factory=set)
    rest_until_s: float = 0.0
    last_booking: int = 0
    """The number of the last send that went to it, of all sends of this router."""
    probe: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Suspect:
    """What speaks against one life of a worker; once it has a delay it is open, with probes in place of traffic."""

    num_failures: int = 0
    """Failures since the last request that it finished."""
    delay_s: float = 0.0
    retry_at_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.delay_s > 0.0


class Fleet:
    """Owns membership, connections, bookings and suspicion.

    A worker joins when the directory names it and it can be reached. It leaves when its connection is gone, or when
    the directory names another life of it; a store that forgets or fails takes nobody away, since a connection that
    stands is better proof of life than a lease that the store has lost. With `only`, workers of other names are left
    to the deployments that started them.

    A worker that cannot be reached, or that broke `_MAX_FAILURES` requests in a row, is suspect: it gets a probe after
    growing pauses and nothing else until one succeeds. Refusals and busy answers are no failures.
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
        only: Container[WorkerId] | None = None,
        refresh_s: float = 1.0,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._parity_key = parity_key
        self._clock = clock
        self._on_change = on_change
        self._on_leave = on_leave
        self._only = only
        self._refresh_s = refresh_s
        self._members: dict[WorkerId, _Member] = {}
        self._suspects: dict[Instance, _Suspect] = {}
        self._num_booked = 0
        self._num_probes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_bookings(self) -> int:
        return sum(len(member.bookings) for member in self._members.values())

    @property
    def worker_to_instance(self) -> Mapping[WorkerId, Instance]:
        """Every member and the life of it that this router is connected to."""
        return {worker: member.client.instance for worker, member in self._members.items()}

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
            await _disconnect(member)
        self._members.clear()

    def state_to_count(self) -> dict[str, int]:
        """How many workers are in each state. Does not modify."""
        now = self._clock()
        states = Counter(self._state(member, now) for member in self._members.values())
        return {state: states[state] for state in ("ready", "away", "draining", "resting", "suspected")}

    def _state(self, member: _Member, now_s: float) -> str:
        status = member.client.status
        if not member.client.is_connected:
            return "away"
        if member.record.is_draining or (status is not None and status.is_draining):
            return "draining"
        if self._is_open(member.client.instance):
            return "suspected"
        return "resting" if member.rest_until_s > now_s else "ready"

    def loads(self) -> list[Load]:
        """Load of every worker that may be sent to now, by worker id. Does not modify."""
        now = self._clock()
        usable = [member for member in self._members.values() if self._state(member, now) == "ready"]
        measured = [
            status.prefill_s_per_token
            for status in (member.client.status for member in usable)
            if status is not None and status.prefill_s_per_token > 0.0
        ]
        typical = median_low(measured) if measured else _NOMINAL_PREFILL_S_PER_TOKEN
        overlooked_before = self._num_booked - _OVERLOOKED_AFTER * len(usable)
        return [
            _load(member, typical, is_overlooked=member.last_booking < overlooked_before)
            for member in sorted(usable, key=lambda member: member.record.info.worker)
        ]

    def book(self, load: Load, request: RequestId, *, uncached_tokens: int, demand_blocks: int) -> Booking:
        """Claim a place on a worker. Modifies; every booking must be released."""
        member = self._members[load.worker]
        booking = Booking(request, load.worker, load.instance, member.client, uncached_tokens, demand_blocks)
        member.bookings.add(booking)
        self._num_booked += 1
        member.last_booking = self._num_booked
        return booking

    def release(self, booking: Booking) -> None:
        """End a booking. Modifies; a worker that has left meanwhile is no error."""
        member = self._members.get(booking.worker)
        if member is not None:
            member.bookings.discard(booking)
        self._on_change()

    def rest(self, worker: WorkerId, retry_after_s: float | None) -> None:
        """Pass over a worker that answered busy, for a short while. Modifies."""
        if worker in self._members:
            delay_s = min(retry_after_s or _REST_S, _MAX_REST_S)
            member = self._members[worker]
            member.rest_until_s = max(member.rest_until_s, self._clock() + delay_s)
            asyncio.get_running_loop().call_later(delay_s, self._on_change)

    def note_failure(self, booking: Booking, error: Exception) -> None:
        """Count a broken connection or a failure of the engine against the worker. Modifies."""
        suspect = self._suspects.setdefault(booking.instance, _Suspect())
        suspect.num_failures += 1
        if suspect.num_failures >= _MAX_FAILURES and not suspect.is_open:
            logger.warning(
                "worker %s failed %s requests in a row (%s): it gets none until a probe succeeds",
                booking.worker,
                suspect.num_failures,
                error,
            )
            self._postpone(suspect)

    def note_finished(self, booking: Booking) -> None:
        """A request came to its end: what spoke against the worker is void, unless it waits for a probe. Modifies."""
        if not self._is_open(booking.instance):
            self._suspects.pop(booking.instance, None)

    async def refresh(self) -> None:
        """Bring membership in line with the directory and with the connections that stand. Modifies."""
        try:
            records = {
                record.info.worker: record
                for record in await self._directory.workers()
                if self._only is None or record.info.worker in self._only
            }
            known = {record.info.instance for record in records.values()} | set(self.worker_to_instance.values())
            self._suspects = {instance: suspect for instance, suspect in self._suspects.items() if instance in known}
        except DirectoryUnavailable:
            records = {}
        for worker, member in list(self._members.items()):
            record = records.get(worker)
            if record is not None and record.info.instance != member.record.info.instance:
                await self._leave(worker, "a new life of it has registered")
            elif member.client.is_lost:
                await self._leave(worker, "its connection is gone")
            elif record is not None:
                member.record = record
        joining = [
            record
            for worker, record in sorted(records.items())
            if worker not in self._members and self._may_try(record.info.instance)
        ]
        await asyncio.gather(*(self._join(record) for record in joining))
        for member in self._members.values():
            instance = member.client.instance
            if self._is_open(instance) and self._may_try(instance) and member.client.is_connected and not member.probe:
                member.probe = asyncio.create_task(self._probe(member), name=f"probe-{member.record.info.worker}")

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
        client = self._connect(record, self._on_change)
        try:
            await client.connect()
        except (WorkerLost, AuthenticationFailed) as error:
            await client.close()
            unreached = self._suspects.setdefault(instance, _Suspect())
            if not unreached.is_open:
                logger.warning(
                    "worker %s cannot be reached (%s): it is tried again after growing pauses", worker, error
                )
            self._postpone(unreached)
            return
        known = self._suspects.get(instance)
        if known is not None and known.num_failures < _MAX_FAILURES:
            # It answers, which ends its silence; the requests that it broke still count.
            known.delay_s = known.retry_at_s = 0.0
        is_cache_aware = record.info.parity_key == self._parity_key
        if not is_cache_aware:
            logger.error(
                "worker %s does not compute our block keys (its scheme: %s; tokenizer files may differ): "
                "it is used, but not for its cache",
                worker,
                record.info.scheme.namespace,
            )
        self._members[worker] = _Member(record, client, is_cache_aware, last_booking=self._num_booked)
        logger.info("worker %s joined (%s at %s)", worker, record.info.engine, record.info.address)
        self._on_change()

    async def _leave(self, worker: WorkerId, reason: str) -> None:
        member = self._members.pop(worker)
        logger.warning("worker %s left: %s", worker, reason)
        self._on_leave(worker)
        await _disconnect(member)
        self._on_change()

    async def _probe(self, member: _Member) -> None:
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
            self._postpone(self._suspects.setdefault(instance, _Suspect(_MAX_FAILURES)))
        else:
            logger.warning("worker %s answers again", worker)
            self._suspects.pop(instance, None)
            self._on_change()
        finally:
            member.probe = None

    def _postpone(self, suspect: _Suspect) -> None:
        suspect.delay_s = min(suspect.delay_s * 2, _MAX_REST_S) if suspect.is_open else _REST_S
        suspect.retry_at_s = self._clock() + suspect.delay_s

    def _is_open(self, instance: Instance) -> bool:
        suspect = self._suspects.get(instance)
        return suspect is not None and suspect.is_open

    def _may_try(self, instance: Instance) -> bool:
        suspect = self._suspects.get(instance)
        return suspect is None or suspect.retry_at_s <= self._clock()


async def _disconnect(member: _Member) -> None:
    if member.probe is not None:
        member.probe.cancel()
        await asyncio.gather(member.probe, return_exceptions=True)
    await member.client.close()


def _load(member: _Member, typical_prefill_s_per_token: float, *, is_overlooked: bool) -> Load:
    """What one worker has to do, as far as this router can know."""
    info, client = member.record.info, member.client
    status = client.status or _IDLE_STATUS
    unseen = [
        booking for booking in member.bookings if booking.submit is None or booking.submit > client.acknowledged_submit
    ]
    # Blocks are taken when prefill begins; until the first token a booking's demand may not show in the status.
    pending_blocks = sum(booking.demand_blocks for booking in member.bookings if not booking.has_first_token)
    prefill_s_per_token = status.prefill_s_per_token or typical_prefill_s_per_token
    if is_overlooked:
        prefill_s_per_token = min(prefill_s_per_token, typical_prefill_s_per_token)
    return Load(
        worker=info.worker,
        instance=client.instance,
        is_cache_aware=member.is_cache_aware,
        num_requests=status.num_running + status.num_waiting + len(unseen),
        max_num_seqs=info.max_num_seqs,
        queued_prefill_tokens=status.queued_prefill_tokens
        + sum(booking.uncached_tokens for booking in unseen if not booking.has_first_token),
        kv_used_blocks=min(status.kv_used_blocks + pending_blocks, info.num_blocks),
        kv_total_blocks=info.num_blocks,
        prefill_s_per_token=prefill_s_per_token,
        step_s=status.step_s,
        decode_s_per_seq=status.decode_s_per_seq,
        step_budget_tokens=status.step_budget_tokens,
        status_age_s=client.status_age_s if client.status is not None else 0.0,
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
