"""What a doctor makes of what it sees: planted faults, moving targets, and what does not answer. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace

import pytest

from router.comparison import Comparison
from router.doctor import Doctor
from router.findings import Findings, WorkerFindings
from shared.directory.base import Reply, WorkerRecord
from shared.directory.memory import MemoryDirectory
from shared.directory.survey import Holding, ServerHealth
from shared.errors import DirectoryUnavailable, EngineError
from shared.messages import Inspection
from shared.transport.inspection import Inspected
from shared.types import BlockKey, WorkerId, WorkerInfo, WorkerStatus
from shared.vtime import run_virtual
from tests.support.stores import SCHEME, epoch, keys, worker_info

W1, W2 = WorkerId("w1"), WorkerId("w2")
PARITY_KEY = b"parity"
PAUSE_S = 1.0
ANSWER_S = 5.0
SERVER = ServerHealth(
    "store:6379",
    version="Redis 7.0.15",
    role="master",
    ping_p50_s=0.0001,
    used_memory_bytes=1 << 20,
    eviction_policy="noeviction",
    num_evicted=0,
    num_keys=8,
    num_clients=3,
    max_clients=10000,
    has_append_only_file=False,
    is_save_failing=False,
)
STATUS = WorkerStatus(1, 0, 0, 1, 100, 0.0, 0.0, 0.0, 100)


class FakeSurvey:
    """A store that is as healthy as told, over the directory of a ward."""

    def __init__(self, ward: Ward) -> None:
        self._ward = ward
        self.servers = [SERVER]
        self.left: list[WorkerId] = []
        self.may_scan = True
        self.is_down = False
        self.away: set[WorkerId] = set()
        """Workers whose server does not answer."""
        self.worker_to_spoilt: dict[WorkerId, tuple[str, ...]] = {}
        self.worker_to_foreign: dict[WorkerId, int] = {}
        self.num_staged: Callable[[], int] = lambda: 0
        self.discarded: list[WorkerId] = []

    async def health(self, workers: Iterable[WorkerId]) -> list[ServerHealth]:
        if self.is_down:
            raise DirectoryUnavailable("health: down")
        return self.servers

    async def holding(self, worker: WorkerId) -> Holding:
        if worker in self.away:
            raise DirectoryUnavailable("holding: no answer within 10 s")
        spoilt = self.worker_to_spoilt.get(worker, ())
        entry = self._ward.directory._live(worker)
        if entry is None or "meta" in spoilt:
            return Holding(None, None, frozenset(), 0, 0, spoilt)
        record = WorkerRecord(self._ward.patients[worker].info, epoch(1), 0)
        blocks = frozenset() if "blocks" in spoilt else frozenset(entry.resident)
        num_foreign = self.worker_to_foreign.get(worker, 0)
        return Holding(record, 4.5, blocks, num_foreign, self.num_staged(), spoilt)

    async def leftovers(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        if not self.may_scan:
            raise DirectoryUnavailable("leftovers: NOPERM")
        return list(self.left)

    async def reap(self, worker: WorkerId) -> int:
        if worker in self.away:
            raise DirectoryUnavailable("reap: no answer within 10 s")
        self.left.remove(worker)
        return 2

    async def discard(self, worker: WorkerId) -> int:
        self.discarded.append(worker)
        self.worker_to_spoilt.pop(worker, None)
        return 3


class FakeMirror:
    """Holds what the store holds, but for what tests change."""

    def __init__(self, ward: Ward) -> None:
        self._ward = ward
        self.change: Callable[[set[BlockKey]], Set[BlockKey]] = lambda held: held
        self.delay_s = 0.0
        self.num_starts = 0
        self.absent: set[WorkerId] = set()

    def start(self) -> None:
        self.num_starts += 1

    async def caught_up(self) -> None:
        assert self.num_starts == 1
        await asyncio.sleep(self.delay_s)

    def mirrored(self, worker: WorkerId) -> Set[BlockKey] | None:
        if worker in self.absent:
            return None
        entry = self._ward.directory._live(worker)
        return self.change(set(entry.resident)) if entry is not None else None


@dataclass
class Patient:
    """One worker, as it answers."""

    info: WorkerInfo
    engine: set[BlockKey]
    num_pending: int = 0
    lag_s: float = 0.0
    is_quiet: bool = True
    seq: int = 1
    error: Exception | None = None
    is_frozen: bool = False
    num_asked: int = 0
    before_answer: Callable[[], None] = lambda: None
    repairs: Callable[[], None] = lambda: None


@dataclass
class Ward:
    """The deployment that a doctor looks at."""

    directory: MemoryDirectory
    patients: dict[WorkerId, Patient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.survey = FakeSurvey(self)
        self.mirror = FakeMirror(self)

    def store(self, worker: WorkerId) -> set[BlockKey]:
        return self.directory._entry_of[worker].resident

    def doctor(self, *, has_mirror: bool = True, connect_error: str = "") -> Doctor:
        return Doctor(
            self.patients,
            self.survey,  # type: ignore[arg-type]
            self.mirror if has_mirror else None,
            self._inspect,
            parity_key=PARITY_KEY,
            connect_error=connect_error,
            pause_s=PAUSE_S,
            answer_s=ANSWER_S,
        )

    async def examine(self) -> Findings:
        return await self.doctor().examine()

    async def _inspect(self, info: WorkerInfo, is_repair: bool) -> Inspected:
        patient = self.patients[info.worker]
        patient.num_asked += 1
        await asyncio.sleep(0.01)
        if patient.is_frozen:
            await asyncio.sleep(3600.0)
        if patient.error is not None:
            raise patient.error
        if is_repair:
            patient.repairs()
        patient.before_answer()
        report = Inspection(
            1,
            len(patient.engine),
            epoch(1),
            patient.seq,
            len(patient.engine),
            0,
            patient.num_pending,
            patient.is_quiet,
            num_audits=7,
            num_drifts=2,
            lag_s=patient.lag_s,
        )
        return Inspected(report, frozenset(patient.engine), STATUS)


async def ward(*, num_blocks: int = 10, parity: bytes = PARITY_KEY) -> Ward:
    """Two workers that are well."""
    found = Ward(MemoryDirectory(SCHEME, asyncio.get_running_loop().time))
    for worker in (W1, W2):
        info = replace(worker_info(worker), parity_key=parity)
        assert await found.directory.register(info, epoch(1), 600.0) == Reply.OK
        found.patients[worker] = Patient(info, set(keys(range(num_blocks))))
        found.store(worker).update(keys(range(num_blocks)))
    return found


def problems_of(prepare: Callable[[Ward], None]) -> tuple[list[str], Findings, Ward]:
    async def scenario() -> tuple[list[str], Findings, Ward]:
        found = await ward()
        prepare(found)
        findings = await found.examine()
        assert findings.is_healthy == (not findings.problems)
        return findings.problems, findings, found

    return run_virtual(scenario())


def test_a_deployment_that_is_well_is_looked_at_once() -> None:
    problems, findings, found = problems_of(lambda found: None)
    assert problems == []
    assert found.patients[W1].num_asked == 1
    assert findings.workers[0] == WorkerFindings(
        W1,
        "ready",
        epoch=epoch(1),
        lease_left_s=4.5,
        parity="ok",
        num_running=1,
        num_resident=10,
        num_in_store=10,
        num_in_mirror=10,
        num_staged=0,
        num_foreign=0,
        is_mirrored=True,
        num_phantom=0,
        num_missing=0,
        num_mismatched=0,
        num_moving=0,
        num_looks=1,
        seq=1,
        store_seq=0,
        num_pending=0,
        lag_s=0.0,
        num_audits=7,
        num_drifts=2,
    )
    assert (findings.servers, findings.leftovers, findings.mirror_lag_s) == ([SERVER], [], pytest.approx(0.0, abs=1e-6))


def test_phantom_and_missing_blocks_are_told_apart_and_counted() -> None:
    def prepare(found: Ward) -> None:
        found.store(W1).update(keys([100, 101]))
        found.store(W1).difference_update(keys([3]))

    problems, findings, _ = problems_of(prepare)
    assert problems == [
        "w1: 2 phantom blocks, which the store shows and the engine does not hold",
        "w1: 1 missing block, which the engine holds and the store does not show",
    ]
    assert (findings.workers[0].num_looks, findings.workers[1].num_looks) == (3, 1)


@pytest.mark.parametrize("numbers", [[3], [100], [3, 100]])
def test_a_mirror_that_differs_from_the_store_is_told(numbers: list[int]) -> None:
    def prepare(found: Ward) -> None:
        found.mirror.change = lambda held: held ^ set(keys(numbers))

    problems, _, _ = problems_of(prepare)
    told = "1 block differs" if len(numbers) == 1 else "2 blocks differ"
    assert problems == [f"{worker}: {told} between the store and a mirror of it" for worker in (W1, W2)]


def test_a_mirror_that_never_stands_where_the_store_does_is_told() -> None:
    def prepare(found: Ward) -> None:
        found.mirror.delay_s = 60.0

    problems, findings, _ = problems_of(prepare)
    assert problems == ["mirror: does not stand where the store does within 5 s"]
    assert (findings.mirror_load_s, findings.mirror_lag_s) == (None, None)


def test_a_worker_that_the_mirror_never_shows_is_told_and_compared_with_the_store() -> None:
    problems, findings, _ = problems_of(lambda found: found.mirror.absent.add(W1))
    assert problems == ["w1: a mirror of the store does not show it, so that routers may not know what it holds"]
    assert [worker.num_in_mirror for worker in findings.workers] == [None, 10]
    assert [worker.num_phantom for worker in findings.workers] == [0, 0]


def test_a_worker_that_the_mirror_is_just_loading_is_no_fault() -> None:
    def prepare(found: Ward) -> None:
        found.mirror.absent.add(W1)

        def show() -> None:
            if found.patients[W1].num_asked == 2:
                found.mirror.absent.clear()

        found.patients[W1].before_answer = show

    problems, findings, _ = problems_of(prepare)
    assert (problems, findings.workers[0].num_looks) == ([], 2)


def test_keys_that_mean_something_else_are_told() -> None:
    async def scenario() -> tuple[list[str], list[str | None]]:
        findings = await (await ward(parity=b"another")).examine()
        return findings.problems, [worker.parity for worker in findings.workers]

    problems, parities = run_virtual(scenario())
    assert parities == ["mismatch", "mismatch"]
    assert problems[0] == (
        "w1: its block keys are not this router's: model, block size, tokenizer or chat template differ"
    )


def test_an_engine_that_is_declared_not_cache_aware_is_no_fault() -> None:
    async def scenario() -> tuple[list[str], str | None]:
        findings = await (await ward(parity=b"")).examine()
        return findings.problems, findings.workers[0].parity

    assert run_virtual(scenario()) == ([], "none")


def test_what_moves_between_two_looks_is_no_fault_and_is_said() -> None:
    def prepare(found: Ward) -> None:
        patient = found.patients[W1]

        def churn() -> None:
            # Each look finds a block that the store does not have yet, and one that it still has.
            patient.seq += 1
            patient.engine = set(keys(range(patient.seq, patient.seq + 10)))
            found.store(W1).clear()
            found.store(W1).update(keys(range(patient.seq - 1, patient.seq + 9)))

        patient.before_answer = churn

    problems, findings, _ = problems_of(prepare)
    assert problems == []
    assert (findings.workers[0].num_looks, findings.workers[0].num_phantom) == (2, 0)
    assert findings.workers[0].num_moving == 4


def test_a_fault_is_found_among_blocks_that_move() -> None:
    def prepare(found: Ward) -> None:
        patient = found.patients[W1]
        found.store(W1).update(keys([500]))

        def churn() -> None:
            patient.seq += 1
            patient.engine = set(keys(range(10))) ^ set(keys([patient.seq]))

        patient.before_answer = churn

    problems, findings, _ = problems_of(prepare)
    assert problems == ["w1: 1 phantom block, which the store shows and the engine does not hold"]
    assert findings.workers[0].num_moving


def test_a_publisher_that_does_not_get_through_is_told_and_one_that_does_is_not() -> None:
    def prepare(found: Ward) -> None:
        for patient in found.patients.values():
            patient.is_quiet, patient.num_pending, patient.lag_s = False, 5, 12.34
        moving = found.patients[W2]

        def publish() -> None:
            moving.seq += 1

        moving.before_answer = publish

    problems, findings, _ = problems_of(prepare)
    assert problems == ["w1: its publisher does not get through to the store with 5 changes, up to 12.3 s old"]
    assert [worker.is_stuck for worker in findings.workers] == [True, False]
    assert [worker.lag_s for worker in findings.workers] == [12.34, 12.34]


def loading(found: Ward, *, num_steps: int) -> None:
    """Let the first worker's snapshot come to the store in steps, one before each look; until then it holds nothing."""
    patient, store = found.patients[W1], found.store(W1)
    store.clear()
    patient.is_quiet, patient.lag_s = False, 1.0
    found.survey.num_staged = lambda: 0 if patient.is_quiet else min(patient.num_asked, num_steps) + 1

    def arrive() -> None:
        if patient.num_asked > num_steps:
            store.update(patient.engine)
            patient.is_quiet, patient.lag_s = True, 0.0

    patient.before_answer = arrive


def test_a_snapshot_that_comes_on_is_waited_for() -> None:
    problems, findings, found = problems_of(lambda found: loading(found, num_steps=4))
    assert (problems, findings.notes) == ([], [])
    assert (findings.workers[0].state, findings.workers[0].num_missing, findings.workers[0].lag_s) == ("ready", 0, 0.0)
    assert (findings.workers[0].num_looks, found.patients[W1].num_asked) == (5, 5)


def test_a_snapshot_that_comes_on_past_all_patience_is_loading_and_no_fault() -> None:
    problems, findings, _ = problems_of(lambda found: loading(found, num_steps=1000))
    assert problems == []
    assert findings.workers[0].state == "loading"
    assert not findings.workers[0].is_repairable
    (note,) = findings.notes
    assert note.startswith("w1: loading: ")
    assert note.endswith(" of 10 blocks have come to the store after 1.0 s")


def test_a_snapshot_that_stands_still_is_told() -> None:
    problems, findings, _ = problems_of(lambda found: (loading(found, num_steps=2), halt(found))[0])
    assert problems == [
        "w1: 10 missing blocks, which the engine holds and the store does not show",
        "w1: its publisher does not get through to the store with a snapshot, up to 1.0 s old",
    ]
    assert (findings.workers[0].state, findings.workers[0].is_repairable) == ("ready", True)


def halt(found: Ward) -> None:
    found.patients[W1].before_answer = lambda: None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EngineError("the engine died"), "the engine died"),
        (ConnectionRefusedError("nobody there"), "nobody there"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_a_worker_that_cannot_answer_is_silent_and_the_others_are_examined(error: Exception, words: str) -> None:
    def prepare(found: Ward) -> None:
        found.patients[W1].error = error

    problems, findings, _ = problems_of(prepare)
    assert problems == [f"w1: does not answer: {words}"]
    assert [worker.state for worker in findings.workers] == ["silent", "ready"]
    assert (findings.workers[0].num_phantom, findings.workers[0].lease_left_s) == (None, 4.5)


def test_a_worker_that_is_frozen_is_silent_after_a_while() -> None:
    def prepare(found: Ward) -> None:
        found.patients[W2].is_frozen = True

    problems, _, _ = problems_of(prepare)
    assert problems == ["w2: does not answer: no answer within 5 s"]


def test_a_worker_without_a_lease_is_told() -> None:
    def prepare(found: Ward) -> None:
        del found.directory._entry_of[W1]

    problems, findings, _ = problems_of(prepare)
    assert problems == ["w1: holds no lease"]
    assert findings.workers[0].num_looks == 3


def test_a_worker_that_takes_its_lease_again_meanwhile_is_well() -> None:
    async def scenario() -> None:
        found = await ward()
        entry = found.directory._entry_of.pop(W1)
        examining = asyncio.create_task(found.examine())
        await asyncio.sleep(1.5 * PAUSE_S)
        found.directory._entry_of[W1] = entry
        findings = await examining
        assert (findings.problems, findings.workers[0].num_in_store) == ([], 10)

    run_virtual(scenario())


def test_a_worker_whose_server_is_away_is_unknown_and_the_others_are_examined() -> None:
    def prepare(found: Ward) -> None:
        found.survey.away.add(W1)
        found.survey.servers = [SERVER, ServerHealth("store:6380", "health: no answer within 10 s")]
        found.store(W2).update(keys([100]))

    problems, findings, _ = problems_of(prepare)
    assert problems == [
        "store store:6380: does not answer: health: no answer within 10 s",
        "w1: nothing is known of it: holding: no answer within 10 s",
        "w2: 1 phantom block, which the store shows and the engine does not hold",
    ]
    assert [worker.state for worker in findings.workers] == ["unknown", "ready"]
    assert (findings.workers[0].lag_s, findings.workers[0].num_phantom) == (None, None)


@pytest.mark.parametrize("kind", ["blocks", "events", "staged"])
def test_a_spoilt_key_of_one_worker_is_told_and_has_its_engine_published_anew(kind: str) -> None:
    async def scenario() -> None:
        found = await ward()
        found.survey.worker_to_spoilt[W1] = (kind,)
        found.patients[W1].repairs = found.survey.worker_to_spoilt.clear
        doctor = found.doctor()
        findings = await doctor.examine()
        assert findings.problems[0] == f"w1: the store holds something else than it should under {kind}"
        assert findings.workers[1].problems() == []
        assert await doctor.repair(findings) == ["w1: publishes its engine's 10 blocks anew"]
        assert (await doctor.examine()).problems == []

    run_virtual(scenario())


def test_a_lease_that_nobody_can_read_is_dropped_by_a_repair() -> None:
    async def scenario() -> None:
        found = await ward()
        found.survey.worker_to_spoilt[W1] = ("meta",)
        doctor = found.doctor()
        findings = await doctor.examine()
        assert findings.problems == ["w1: the store holds something else than it should under meta"]
        told = "w1: dropped what cannot be read; it registers anew with its next heartbeat"
        assert await doctor.repair(findings) == [told]
        assert found.survey.discarded == [W1]
        assert (await doctor.examine()).problems == []

    run_virtual(scenario())


def test_values_that_can_be_no_block_are_told() -> None:
    problems, findings, _ = problems_of(lambda found: found.survey.worker_to_foreign.update({W1: 2}))
    assert problems == ["w1: 2 values in its set that can be no block"]
    assert findings.workers[0].is_repairable


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (
            replace(SERVER, max_memory_bytes=1 << 30, eviction_policy="allkeys-lru"),
            "throws out keys when it is full (allkeys-lru); set maxmemory-policy noeviction",
        ),
        (
            # All that is ours expires, so that this one takes ours first.
            replace(SERVER, max_memory_bytes=1 << 30, eviction_policy="volatile-ttl"),
            "throws out keys when it is full (volatile-ttl); set maxmemory-policy noeviction",
        ),
        (
            replace(SERVER, max_memory_bytes=1_000_000, used_memory_bytes=900_000),
            "has little memory left: it uses 900000 of 1000000 bytes",
        ),
        (replace(SERVER, num_clients=95, max_clients=100), "soon turns connections away: 95 of 100 clients"),
        (replace(SERVER, is_save_failing=True), "cannot save to its disk, and may take no writes until it can"),
        (replace(SERVER, role="slave"), "is a slave, not a primary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_store_that_will_not_do_is_told(server: ServerHealth, problem: str) -> None:
    def prepare(found: Ward) -> None:
        found.survey.servers = [server]

    assert problems_of(prepare)[0] == [f"store store:6379: {problem}"]


def test_what_the_store_has_against_being_used_is_told_beside_what_it_holds() -> None:
    async def scenario() -> None:
        found = await ward()
        findings = await found.doctor(connect_error="connect: OOM").examine()
        assert findings.problems == ["store: cannot be used: connect: OOM"]
        assert [worker.num_in_store for worker in findings.workers] == [10, 10]

    run_virtual(scenario())


@pytest.mark.parametrize(
    "server",
    [
        replace(SERVER, eviction_policy="allkeys-lru"),
        replace(SERVER, max_memory_bytes=1 << 30),
        ServerHealth("store:6379", ping_p50_s=0.1),
    ],
    ids=["a policy without a limit", "a limit without a policy", "nothing told"],
)
def test_a_store_that_never_evicts_is_well(server: ServerHealth) -> None:
    def prepare(found: Ward) -> None:
        found.survey.servers = [server]

    assert problems_of(prepare)[0] == []


def test_a_user_that_may_not_scan_is_told_nothing_of_leftovers() -> None:
    def prepare(found: Ward) -> None:
        found.survey.may_scan = False

    problems, findings, _ = problems_of(prepare)
    assert (problems, findings.leftovers) == ([], None)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_store_that_is_away_is_all_that_is_told(is_known: bool) -> None:
    def prepare(found: Ward) -> None:
        found.survey.is_down = not is_known
        found.survey.servers = [ServerHealth("store:6379", "health: down")]

    problems, findings, _ = problems_of(prepare)
    assert problems == ["store: does not answer: health: down"]
    assert [worker.state for worker in findings.workers] == ["unknown", "unknown"]
    assert (findings.mirror_load_s, findings.leftovers) == (None, None)


# Repair.


def test_a_repair_asks_those_that_differ_and_no_others() -> None:
    async def scenario() -> None:
        found = await ward()
        found.store(W1).update(keys([100]))
        found.survey.left = [WorkerId("gone")]

        def publish() -> None:
            found.store(W1).clear()
            found.store(W1).update(found.patients[W1].engine)

        found.patients[W1].repairs = publish
        doctor = found.doctor()
        findings = await doctor.examine()
        assert findings.problems == [
            "store: holds what nobody owns: gone",
            "w1: 1 phantom block, which the store shows and the engine does not hold",
        ]
        num_asked = found.patients[W2].num_asked
        assert await doctor.repair(findings) == [
            "gone: dropped 2 keys that nobody owned",
            "w1: publishes its engine's 10 blocks anew",
        ]
        assert found.patients[W2].num_asked == num_asked
        assert (await doctor.examine()).problems == []

    run_virtual(scenario())


def test_a_repair_that_does_not_arrive_is_told() -> None:
    async def scenario() -> None:
        found = await ward()
        found.store(W1).update(keys([100]))
        doctor = found.doctor()
        findings = await doctor.examine()
        found.patients[W1].error = ConnectionError("gone")
        assert await doctor.repair(findings) == ["w1: not repaired, since it does not answer: gone"]

    run_virtual(scenario())


def test_a_repair_of_what_has_gone_away_meanwhile_is_told_and_the_others_are_mended() -> None:
    async def scenario() -> None:
        found = await ward()
        for worker in (W1, W2):
            found.store(worker).update(keys([100]))
        doctor = found.doctor()
        findings = await doctor.examine()
        found.survey.away.update((W1, WorkerId("gone")))
        findings.leftovers = [WorkerId("gone")]
        assert await doctor.repair(findings) == [
            "gone: not dropped, since the store does not answer: reap: no answer within 10 s",
            "w1: not repaired, since the store does not answer: holding: no answer within 10 s",
            "w2: publishes its engine's 10 blocks anew",
        ]
        found.survey.away.clear()
        findings.leftovers = None
        del found.directory._entry_of[W1]
        assert (await doctor.repair(findings))[0] == "w1: not repaired, since it holds no lease"

    run_virtual(scenario())


def test_without_a_mirror_engines_and_store_are_compared() -> None:
    async def scenario() -> None:
        found = await ward()
        found.store(W1).update(keys([100]))
        findings = await found.doctor(has_mirror=False).examine()
        assert [(worker.num_phantom, worker.num_in_mirror) for worker in findings.workers] == [(1, None), (0, None)]

    run_virtual(scenario())


# Comparing.


def test_only_what_differs_at_every_look_lasts() -> None:
    comparison = Comparison()
    comparison.add(set(keys([1, 2])), set(keys([2, 3, 4])), set(keys([2, 3, 5])))
    assert (comparison.num_phantom, comparison.num_missing, comparison.num_mismatched) == (2, 1, 2)
    comparison.add(set(keys([1, 2, 4])), set(keys([2, 3, 4])), set(keys([2, 3, 4])))
    assert (comparison.num_phantom, comparison.num_missing, comparison.num_mismatched) == (1, 1, 0)
    assert (comparison.num_moving, comparison.is_clean) == (2, False)
    comparison.add(set(keys([2, 3, 4])), set(keys([2, 3, 4])), None)
    assert (comparison.num_phantom, comparison.num_missing, comparison.is_clean) == (0, 0, True)
    assert comparison.num_moving == 4


def test_a_block_that_changes_sides_between_looks_is_moving() -> None:
    comparison = Comparison()
    comparison.add(set(keys([1])), set(), None)
    comparison.add(set(), set(keys([1])), None)
    assert (comparison.is_clean, comparison.num_moving) == (True, 1)
