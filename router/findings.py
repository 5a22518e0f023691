"""What a doctor has found, and what is wrong with it in words. Pure data: asks nobody."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.tables import counted
from shared.directory.survey import ServerHealth
from shared.types import WorkerId


@dataclass(slots=True)
class WorkerFindings:
    """What was found about one worker. `None` is what could not be found out."""

    worker: WorkerId
    state: str
    """`ready`, `draining`, `loading` (a snapshot is on its way to the store), `silent`, `no lease`, or `unknown`."""
    error: str = ""
    """Why it is silent, or why nothing is known of it."""
    epoch: str | None = None
    lease_left_s: float | None = None
    parity: str | None = None
    """`ok`, `mismatch`, or `none` for an engine that says itself that block keys do not describe its cache."""
    num_running: int | None = None
    num_resident: int | None = None
    """Blocks in the engine."""
    num_in_store: int | None = None
    num_in_mirror: int | None = None
    num_staged: int | None = None
    """Blocks of a snapshot that have come to the store so far."""
    num_foreign: int | None = None
    """Members of its set in the store that are no block keys."""
    spoilt: tuple[str, ...] = ()
    """What the store holds of it that is not what it should be: `meta`, `blocks`, `events`, `staged`."""
    is_mirrored: bool | None = None
    """Whether a mirror of the store shows it; routers match by such mirrors."""
    num_phantom: int | None = None
    num_missing: int | None = None
    num_mismatched: int | None = None
    num_moving: int | None = None
    num_looks: int = 0
    seq: int | None = None
    """Last batch that the publisher knows to be applied."""
    store_seq: int | None = None
    num_pending: int | None = None
    lag_s: float | None = None
    """How long its oldest change has waited that the store is not known to have, by the worker's own clock; 0 without
    one."""
    is_stuck: bool = False
    """Whether the publisher had something to tell at every look, and nothing moved between them."""
    num_audits: int | None = None
    num_drifts: int | None = None

    @property
    def is_repairable(self) -> bool:
        """Whether a snapshot of the engine's account may help."""
        if self.state == "loading":
            return False
        return bool(
            self.num_phantom
            or self.num_missing
            or self.num_mismatched
            or self.num_foreign
            or self.spoilt
            or self.is_stuck
            or self.is_mirrored is False
        )

    def problems(self) -> list[str]:
        """What is wrong, each in one sentence."""
        found = []
        if self.state == "unknown":
            found.append(f"nothing is known of it: {self.error}")
        if self.state == "no lease" and not self.spoilt:
            found.append("holds no lease")
        if self.state == "silent":
            found.append(f"does not answer: {self.error}")
        if self.parity == "mismatch":
            found.append("its block keys are not this router's: model, block size, tokenizer or chat template differ")
        if self.spoilt:
            found.append(f"the store holds something else than it should under {', '.join(self.spoilt)}")
        # What a snapshot is about to replace is no fault, as long as the snapshot comes on.
        if self.state != "loading":
            found += self._differences()
        return [f"{self.worker}: {problem}" for problem in found]

    def _differences(self) -> list[str]:
        found = []
        if self.num_phantom:
            phantom = counted(self.num_phantom, "phantom block")
            found.append(f"{phantom}, which the store shows and the engine does not hold")
        if self.num_missing:
            missing = counted(self.num_missing, "missing block")
            found.append(f"{missing}, which the engine holds and the store does not show")
        if self.num_foreign:
            found.append(f"{counted(self.num_foreign, 'value')} in its set that can be no block")
        if self.num_mismatched:
            differ = "1 block differs" if self.num_mismatched == 1 else f"{self.num_mismatched} blocks differ"
            found.append(f"{differ} between the store and a mirror of it")
        if self.is_mirrored is False:
            found.append("a mirror of the store does not show it, so that routers may not know what it holds")
        if self.is_stuck:
            waiting = counted(self.num_pending, "change") if self.num_pending else "a snapshot"
            age = "" if self.lag_s is None else f", up to {self.lag_s:.1f} s old"
            found.append(f"its publisher does not get through to the store with {waiting}{age}")
        return found

    def note(self) -> str:
        """What is to be known and no fault; empty if there is nothing."""
        if self.state != "loading":
            return ""
        lag = "" if self.lag_s is None else f" after {self.lag_s:.1f} s"
        return f"{self.worker}: loading: {self.num_staged} of {self.num_resident} blocks have come to the store{lag}"


@dataclass(slots=True)
class Findings:
    """What one examination has found."""

    workers: list[WorkerFindings] = field(default_factory=list)
    servers: list[ServerHealth] = field(default_factory=list)
    leftovers: list[WorkerId] | None = None
    """Ids without a lease that hold something for ever; `None` where this user may not look."""
    store_error: str = ""
    """Why it does not answer at all."""
    connect_error: str = ""
    """What it has against being used, though all of it answers."""
    mirror_load_s: float | None = None
    mirror_lag_s: float | None = None
    """Until the mirror stood where the store did when it was asked, after all looks."""
    mirror_error: str = ""

    @property
    def problems(self) -> list[str]:
        found = []
        if self.store_error:
            found.append(f"store: does not answer: {self.store_error}")
        if self.connect_error:
            found.append(f"store: cannot be used: {self.connect_error}")
        for server in self.servers:
            found += [f"store {server.name}: {problem}" for problem in _problems_of(server)]
        if self.leftovers:
            found.append(f"store: holds what nobody owns: {', '.join(self.leftovers)}")
        if self.mirror_error:
            found.append(f"mirror: {self.mirror_error}")
        # Of a store that is away as a whole it is enough to say so once.
        told = [worker for worker in self.workers if not (self.store_error and worker.state == "unknown")]
        return found + [problem for worker in told for problem in worker.problems()]

    @property
    def notes(self) -> list[str]:
        return [note for worker in self.workers if (note := worker.note())]

    @property
    def is_healthy(self) -> bool:
        return not self.problems


def _problems_of(server: ServerHealth) -> list[str]:
    if server.error:
        return [f"does not answer: {server.error}"]
    found = []
    if server.may_evict:
        found.append(f"throws out keys when it is full ({server.eviction_policy}); set maxmemory-policy noeviction")
    if server.is_nearly_full:
        found.append(f"has little memory left: it uses {server.used_memory_bytes} of {server.max_memory_bytes} bytes")
    if server.is_nearly_out_of_clients:
        found.append(f"soon turns connections away: {server.num_clients} of {server.max_clients} clients")
    if server.is_save_failing:
        found.append("cannot save to its disk, and may take no writes until it can")
    if server.role not in (None, "master"):
        found.append(f"is a {server.role}, not a primary")
    return found
