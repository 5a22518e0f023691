"""`kvroute doctor`: compares what the engines hold with the store and with a mirror, and has what differs mended.

Believes the engines. Publishes nothing itself: a repair is an order to a worker, which publishes its engine's account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from router.comparison import Comparison
from router.tables import counted
from shared.directory.base import Directory, WorkerRecord
from shared.directory.survey import ServerHealth, Survey
from shared.errors import DirectoryUnavailable, KvrouteError
from shared.transport.inspection import Inspected
from shared.types import BlockKey, WorkerId, WorkerInfo

DEFAULT_NUM_LOOKS = 3
"""Looks at a worker that differs: what is on its way has arrived between two of them."""


class MirrorCopy(Protocol):
    """A mirror of the store, as far as a doctor looks at it."""

    async def caught_up(self) -> None:
        """Return once every worker is in the mirror."""
        ...

    def mirrored(self, worker: WorkerId) -> Set[BlockKey] | None:
        """What the mirror has of one worker; `None` for a worker that it does not match."""
        ...


Inspect = Callable[[WorkerInfo, bool], Awaitable[Inspected]]
"""Asks one worker; with the flag, to publish its engine's account first. Raises `OSError` or `KvrouteError`."""


@dataclass(slots=True)
class WorkerFindings:
    """What was found about one worker. `None` is what could not be found out."""

    worker: WorkerId
    state: str
    """`ready`, `draining`, `silent` or `no lease`."""
    error: str = ""
    """Why it is silent."""
    epoch: str | None = None
    lease_left_s: float | None = None
    parity: str | None = None
    """`ok`, `mismatch`, or `none` for an engine that says itself that block keys do not describe its cache."""
    num_running: int | None = None
    num_resident: int | None = None
    """Blocks in the engine."""
    num_in_store: int | None = None
    num_in_mirror: int | None = None
    num_phantom: int | None = None
    num_missing: int | None = None
    num_mismatched: int | None = None
    num_moving: int | None = None
    num_looks: int = 0
    seq: int | None = None
    """Last batch that the publisher knows to be applied."""
    store_seq: int | None = None
    num_pending: int | None = None
    is_stuck: bool = False
    """Whether the publisher had something to tell at every look, and nothing moved between them."""
    num_audits: int | None = None
    num_drifts: int | None = None

    @property
    def is_repairable(self) -> bool:
        """Whether a snapshot of the engine's account may help."""
        return bool(self.num_phantom or self.num_missing or self.num_mismatched or self.is_stuck)

    def problems(self) -> list[str]:
        """What is wrong, each in one sentence."""
        found = []
        if self.state == "no lease":
            found.append("holds no lease")
        if self.state == "silent":
            found.append(f"does not answer: {self.error}")
        if self.parity == "mismatch":
            found.append("its block keys are not this router's: model, block size, tokenizer or chat template differ")
        if self.num_phantom:
            phantom = counted(self.num_phantom, "phantom block")
            found.append(f"{phantom}, which the store shows and the engine does not hold")
        if self.num_missing:
            missing = counted(self.num_missing, "missing block")
            found.append(f"{missing}, which the engine holds and the store does not show")
        if self.num_mismatched:
            differ = "1 block differs" if self.num_mismatched == 1 else f"{self.num_mismatched} blocks differ"
            found.append(f"{differ} between the store and a mirror of it")
        if self.is_stuck:
            found.append(f"its publisher does not get through to the store; {self.num_pending} changes wait")
        return [f"{self.worker}: {problem}" for problem in found]


@dataclass(slots=True)
class Findings:
    """What one examination has found."""

    workers: list[WorkerFindings] = field(default_factory=list)
    servers: list[ServerHealth] = field(default_factory=list)
    leftovers: list[WorkerId] | None = None
    """Ids without a lease that hold something for ever; `None` where this user may not look."""
    store_error: str = ""
    mirror_load_s: float | None = None
    mirror_lag_s: float | None = None
    """Until the mirror stood where the store did when it was asked, after all looks."""
    mirror_error: str = ""

    @property
    def problems(self) -> list[str]:
        found = []
        if self.store_error:
            found.append(f"store: does not answer: {self.store_error}")
        for server in self.servers:
            if server.may_evict:
                rule = server.eviction_policy
                found.append(f"store: throws out keys when it is full ({rule}); set maxmemory-policy noeviction")
            if server.role not in (None, "master"):
                found.append(f"store: the server is a {server.role}, not a primary")
        if self.leftovers:
            found.append(f"store: holds what nobody owns: {', '.join(self.leftovers)}")
        if self.mirror_error:
            found.append(f"mirror: {self.mirror_error}")
        return found + [problem for worker in self.workers for problem in worker.problems()]

    @property
    def is_healthy(self) -> bool:
        return not self.problems


class Doctor:
    """Examines the workers of one deployment, and has them repaired."""

    def __init__(
        self,
        workers: Iterable[WorkerId],
        directory: Directory,
        mirror: MirrorCopy | None,
        survey: Survey,
        inspect: Inspect,
        *,
        parity_key: bytes,
        pause_s: float,
        answer_s: float,
        num_looks: int = DEFAULT_NUM_LOOKS,
    ) -> None:
        """`pause_s` lies between two looks; `answer_s` is the longest wait for a worker, and for the mirror."""
        self._workers = list(workers)
        self._directory = directory
        self._mirror = mirror
        self._survey = survey
        self._inspect = inspect
        self._parity_key = parity_key
        self._pause_s = pause_s
        self._answer_s = answer_s
        self._num_looks = num_looks

    async def examine(self) -> Findings:
        """Look at everything. What does not answer is a finding, and no error."""
        findings = Findings()
        try:
            await self._directory.workers()
        except DirectoryUnavailable as error:
            findings.store_error = str(error)
            findings.workers = [WorkerFindings(worker, "unknown") for worker in self._workers]
            return findings
        findings.mirror_load_s = await self._await_mirror(findings)
        found = await asyncio.gather(*map(self._examine_worker, self._workers), return_exceptions=True)
        for worker, outcome in zip(self._workers, found, strict=True):
            if isinstance(outcome, DirectoryUnavailable):
                findings.store_error = str(outcome)
                findings.workers.append(WorkerFindings(worker, "unknown"))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                findings.workers.append(outcome)
        if not findings.store_error:
            findings.mirror_lag_s = await self._await_mirror(findings)
            await self._examine_store(findings)
        return findings

    async def repair(self, findings: Findings) -> list[str]:
        """Mend what was found, as far as it can be; what was done. Raises `DirectoryUnavailable`."""
        done = []
        for worker in findings.leftovers or ():
            num_keys = await self._survey.reap(worker)
            done.append(f"{worker}: dropped {counted(num_keys, 'key')} that nobody owned")
        worker_to_record = await self._records()
        for found in findings.workers:
            record = worker_to_record.get(found.worker)
            if record is None or not found.is_repairable:
                continue
            inspected, error = await self._ask(record, is_repair=True)
            if inspected is None:
                done.append(f"{found.worker}: not repaired, since it does not answer: {error}")
            else:
                done.append(f"{found.worker}: publishes its engine's {counted(len(inspected.keys), 'block')} anew")
        return done

    async def _examine_store(self, findings: Findings) -> None:
        try:
            findings.servers = await self._survey.health(self._workers)
            sizes = await self._survey.sizes(self._workers)
            for found in findings.workers:
                found.lease_left_s = sizes[found.worker].lease_left_s
        except DirectoryUnavailable as error:
            findings.store_error = str(error)
            return
        try:
            findings.leftovers = await self._survey.leftovers(self._workers)
        except DirectoryUnavailable:
            # A user with few rights may not scan; that is no fault of the store.
            findings.leftovers = None

    async def _await_mirror(self, findings: Findings) -> float | None:
        """How long the mirror takes to stand where the store stands; `None` past all patience."""
        if self._mirror is None:
            return None
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        try:
            async with asyncio.timeout(self._answer_s):
                await self._mirror.caught_up()
        except TimeoutError:
            findings.mirror_error = f"does not stand where the store does within {self._answer_s:g} s"
            return None
        return loop.time() - begin_s

    async def _records(self) -> dict[WorkerId, WorkerRecord]:
        return {record.info.worker: record for record in await self._directory.workers()}

    async def _examine_worker(self, worker: WorkerId) -> WorkerFindings:
        """Look at one worker until nothing differs, or several times. Raises `DirectoryUnavailable`."""
        comparison = Comparison()
        places: list[tuple[str, int, int, bool]] = []
        found = WorkerFindings(worker, "no lease")
        while comparison.num_looks < self._num_looks:
            if comparison.num_looks:
                await asyncio.sleep(self._pause_s)
            record = (await self._records()).get(worker)
            if record is None:
                return WorkerFindings(worker, "no lease")
            inspected, error = await self._ask(record)
            if inspected is None:
                return WorkerFindings(worker, "silent", error, parity=self._parity_of(record.info))
            store = await self._directory.resident(worker)
            mirror = self._mirror.mirrored(worker) if self._mirror is not None else None
            comparison.add(inspected.keys, store, mirror)
            found = self._describe(worker, record, inspected)
            found.num_in_store = len(store)
            found.num_in_mirror = None if mirror is None else len(mirror)
            report = inspected.report
            places.append((report.epoch, report.seq, report.num_pending, report.is_quiet))
            if comparison.is_clean and report.is_quiet:
                break
        found.num_looks = comparison.num_looks
        found.num_phantom, found.num_missing = comparison.num_phantom, comparison.num_missing
        found.num_mismatched, found.num_moving = comparison.num_mismatched, comparison.num_moving
        found.is_stuck = len(places) == self._num_looks and len(set(places)) == 1 and not places[0][3]
        return found

    def _describe(self, worker: WorkerId, record: WorkerRecord, inspected: Inspected) -> WorkerFindings:
        report, status = inspected.report, inspected.status
        is_draining = record.is_draining or (status is not None and status.is_draining)
        return WorkerFindings(
            worker,
            "draining" if is_draining else "ready",
            epoch=report.epoch,
            parity=self._parity_of(record.info),
            num_running=status.num_running if status is not None else None,
            num_resident=len(inspected.keys),
            seq=report.seq,
            store_seq=record.seq,
            num_pending=report.num_pending,
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
