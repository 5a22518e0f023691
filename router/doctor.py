"""`kvroute doctor`: compares what the engines hold with the store and with a mirror, and has what differs mended.

Believes the engines. Publishes nothing itself: a repair is an order to a worker, which publishes its engine's account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set
from typing import NamedTuple, Protocol

from router.comparison import Comparison
from router.findings import Findings, WorkerFindings
from router.tables import counted
from shared.directory.base import WorkerRecord
from shared.directory.survey import Holding, Survey
from shared.errors import DirectoryUnavailable, KvrouteError
from shared.transport.inspection import Inspected
from shared.types import BlockKey, Epoch, WorkerId, WorkerInfo

DEFAULT_NUM_LOOKS = 3
"""Looks at a worker that differs: what is on its way has arrived between two of them."""


class MirrorCopy(Protocol):
    """A mirror of the store, as far as a doctor looks at it."""

    def start(self) -> None:
        """Follow the store from now on. Called once, after the store has answered."""
        ...

    async def caught_up(self) -> None:
        """Return once every worker is in the mirror."""
        ...

    def mirrored(self, worker: WorkerId) -> Set[BlockKey] | None:
        """What the mirror has of one worker; `None` for a worker that it does not match."""
        ...


class _Place(NamedTuple):
    """Where a publisher stands: equal at several looks, it does not come on."""

    epoch: Epoch
    seq: int
    num_pending: int
    is_quiet: bool
    num_staged: int


Inspect = Callable[[WorkerInfo, bool], Awaitable[Inspected]]
"""Asks one worker; with the flag, to publish its engine's account first. Raises `OSError` or `KvrouteError`."""


class Doctor:
    """Examines the workers of one deployment, and has them repaired."""

    def __init__(
        self,
        workers: Iterable[WorkerId],
        survey: Survey,
        mirror: MirrorCopy | None,
        inspect: Inspect,
        *,
        parity_key: bytes,
        connect_error: str = "",
        pause_s: float,
        answer_s: float,
        num_looks: int = DEFAULT_NUM_LOOKS,
    ) -> None:
        """`connect_error` is what the store answered to whoever would use it; empty if all is well.

        `pause_s` lies between two looks; `answer_s` is the longest wait for a worker, and for the mirror.
        """
        self._workers = list(workers)
        self._survey = survey
        self._mirror = mirror
        self._is_mirror_started = False
        self._inspect = inspect
        self._parity_key = parity_key
        self._connect_error = connect_error
        self._pause_s = pause_s
        self._answer_s = answer_s
        self._num_looks = num_looks

    async def examine(self) -> Findings:
        """Look at everything. What does not answer is a finding, and no error."""
        findings = Findings()
        await self._examine_store(findings)
        if findings.store_error:
            findings.workers = [WorkerFindings(worker, "unknown", findings.store_error) for worker in self._workers]
            return findings
        if not findings.connect_error and await self._can_be_followed():
            findings.mirror_load_s = await self._await_mirror(findings)
        mirror = self._mirror if findings.mirror_load_s is not None else None
        findings.workers = list(await asyncio.gather(*(self._examine_worker(one, mirror) for one in self._workers)))
        if mirror is not None:
            findings.mirror_lag_s = await self._await_mirror(findings)
        return findings

    async def repair(self, findings: Findings) -> list[str]:
        """Mend what was found, as far as it can be; what was done of it and what was not."""
        done = [f"{worker}: {await self._drop_leftover(worker)}" for worker in findings.leftovers or ()]
        for found in findings.workers:
            if found.is_repairable:
                done.append(f"{found.worker}: {await self._repair_worker(found.worker)}")
        return done

    async def _drop_leftover(self, worker: WorkerId) -> str:
        try:
            return f"dropped {counted(await self._survey.reap(worker), 'key')} that nobody owned"
        except DirectoryUnavailable as error:
            return f"not dropped, since the store does not answer: {error}"

    async def _repair_worker(self, worker: WorkerId) -> str:
        try:
            held = await self._survey.holding(worker)
            if held.record is None and held.spoilt:
                # Nobody can read where the worker listens, but the worker itself reads what becomes of its lease.
                await self._survey.discard(worker)
                return "dropped what cannot be read; it registers anew with its next heartbeat"
        except DirectoryUnavailable as error:
            return f"not repaired, since the store does not answer: {error}"
        if held.record is None:
            return "not repaired, since it holds no lease"
        inspected, reason = await self._ask(held.record, is_repair=True)
        if inspected is None:
            return f"not repaired, since it does not answer: {reason}"
        return f"publishes its engine's {counted(len(inspected.keys), 'block')} anew"

    async def _examine_store(self, findings: Findings) -> None:
        try:
            findings.servers = await self._survey.health(self._workers)
        except DirectoryUnavailable as error:
            findings.store_error = str(error)
            return
        if all(server.error for server in findings.servers):
            findings.store_error, findings.servers = findings.servers[0].error, []
            return
        if not any(server.error for server in findings.servers):
            findings.connect_error = self._connect_error
        try:
            findings.leftovers = await self._survey.leftovers(self._workers)
        except DirectoryUnavailable:
            # A user with few rights may not scan, and a server of several may be away: that is told elsewhere.
            findings.leftovers = None

    async def _can_be_followed(self) -> bool:
        """Whether a mirror can come to stand where the store does: it never does at a stream that stays none."""
        for num_looks in range(self._num_looks):
            if num_looks:
                await asyncio.sleep(self._pause_s)
            held = await asyncio.gather(*map(self._survey.holding, self._workers), return_exceptions=True)
            if not any(isinstance(one, Holding) and "events" in one.spoilt for one in held):
                return True
        return False

    async def _await_mirror(self, findings: Findings) -> float | None:
        """How long the mirror takes to stand where the store stands; `None` past all patience."""
        if self._mirror is None:
            return None
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        if not self._is_mirror_started:
            self._is_mirror_started = True
            self._mirror.start()
        if not await self._is_level(self._mirror):
            findings.mirror_error = f"does not stand where the store does within {self._answer_s:g} s"
            return None
        return clock() - begin_s

    async def _is_level(self, mirror: MirrorCopy) -> bool:
        """Whether the mirror comes to where the store stands now, within the time that one has for it."""
        try:
            async with asyncio.timeout(self._answer_s):
                await mirror.caught_up()
        except TimeoutError:
            return False
        return True

    async def _examine_worker(self, worker: WorkerId, mirror: MirrorCopy | None) -> WorkerFindings:
        """Look at one worker until nothing differs, or several times; longer while it is loading and comes on."""
        clock = asyncio.get_running_loop().time
        gives_up_at_s = clock() + self._answer_s
        comparison = Comparison()
        places: list[_Place | None] = []
        was_mirrored = False
        num_absences = 0
        while True:
            found, place, is_done = await self._look(worker, mirror, comparison)
            num_absences += place is None
            places.append(place)
            was_mirrored |= found.is_mirrored is True
            recent = places[-self._num_looks :]
            is_standing = len(recent) == self._num_looks and len(set(recent)) == 1
            is_coming_on = found.state == "loading" and not is_standing and clock() < gives_up_at_s
            is_enough = max(comparison.num_looks, num_absences) >= self._num_looks
            if is_done or (is_enough and not is_coming_on):
                break
            await asyncio.sleep(self._pause_s)
            if mirror is not None and not found.is_mirrored and not await self._is_level(mirror):
                mirror = None
        found.num_looks = len(places)
        if comparison.num_looks:
            found.num_phantom, found.num_missing = comparison.num_phantom, comparison.num_missing
            found.num_mismatched, found.num_moving = comparison.num_mismatched, comparison.num_moving
        found.is_mirrored = None if found.is_mirrored is None else was_mirrored
        found.is_stuck = is_standing and not (place is None or place.is_quiet)
        if found.is_stuck and found.state == "loading":
            found.state = "ready"
        return found

    async def _look(
        self, worker: WorkerId, mirror: MirrorCopy | None, comparison: Comparison
    ) -> tuple[WorkerFindings, _Place | None, bool]:
        """One look: what was seen, where the publisher stood, and whether another look would tell nothing more."""
        try:
            held = await self._survey.holding(worker)
            if held.record is None:
                return _without_lease(worker, held), None, False
            inspected, reason = await self._ask(held.record)
            if inspected is None:
                found = WorkerFindings(worker, "silent", reason, parity=self._parity_of(held.record.info))
                found.lease_left_s, found.spoilt = held.lease_left_s, held.spoilt
                return found, None, True
            # Once more: read before the engine, the store would lack all that came about in between.
            held = await self._survey.holding(worker)
        except DirectoryUnavailable as error:
            return WorkerFindings(worker, "unknown", str(error)), None, True
        if held.record is None:
            return _without_lease(worker, held), None, False
        mirrored = mirror.mirrored(worker) if mirror is not None else None
        comparison.add(inspected.keys, held.blocks, mirrored)
        report = inspected.report
        found = self._describe(worker, held, held.record, inspected)
        if mirror is not None:
            found.is_mirrored = mirrored is not None
            found.num_in_mirror = None if mirrored is None else len(mirrored)
        place = _Place(report.epoch, report.seq, report.num_pending, report.is_quiet, held.num_staged)
        is_well = comparison.is_clean and report.is_quiet and not (held.spoilt or held.num_foreign)
        return found, place, is_well and found.is_mirrored is not False

    def _describe(self, worker: WorkerId, held: Holding, record: WorkerRecord, inspected: Inspected) -> WorkerFindings:
        report, status = inspected.report, inspected.status
        if held.num_staged and not report.is_quiet:
            state = "loading"
        elif record.is_draining or (status is not None and status.is_draining):
            state = "draining"
        else:
            state = "ready"
        return WorkerFindings(
            worker,
            state,
            epoch=report.epoch,
            lease_left_s=held.lease_left_s,
            parity=self._parity_of(record.info),
            num_running=status.num_running if status is not None else None,
            num_resident=len(inspected.keys),
            num_in_store=len(held.blocks),
            num_staged=held.num_staged,
            num_foreign=held.num_foreign,
            spoilt=held.spoilt,
            seq=report.seq,
            store_seq=record.seq,
            num_pending=report.num_pending,
            lag_s=report.lag_s,
            num_audits=report.num_audits,
            num_drifts=report.num_drifts,
        )

    async def _ask(self, record: WorkerRecord, *, is_repair: bool = False) -> tuple[Inspected | None, str]:
        """What a worker answers, or why it does not."""
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._inspect(record.info, is_repair), ""
        except TimeoutError:
            return None, f"no answer within {self._answer_s:g} s"
        except (OSError, KvrouteError) as error:
            return None, str(error) or type(error).__name__

    def _parity_of(self, info: WorkerInfo) -> str:
        if not info.parity_key:
            return "none"
        return "ok" if info.parity_key == self._parity_key else "mismatch"


def _without_lease(worker: WorkerId, held: Holding) -> WorkerFindings:
    """A store that has just come back empty has its leases again after a heartbeat: another look may find one."""
    return WorkerFindings(worker, "no lease", lease_left_s=held.lease_left_s, spoilt=held.spoilt)
