"""One picture of a router at one moment: what the dashboard, `kvroute top` and tests look at.

Plain values in dataclasses, made when somebody asks. Decides nothing and keeps nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from router.decisions import Decision
from router.members import KvBlocks, Member
from router.prefix_groups import Group
from router.rates import Window
from router.service import Router
from router.watch import Watch
from shared import __version__
from shared.errors import DirectoryUnavailable
from shared.types import WorkerId

WINDOW_S = 10.0
"""What "now" means: long enough for percentiles, short enough to be seen to move."""
SHOWN_DECISIONS = 20
SHOWN_GROUPS = 12
MIRROR_SIZE, MIRROR_LAG = "blocks mirrored here", "batches that the mirror is behind"
_STORE_COUNTS = {
    "kvroute_store_misses": "calls without an answer",
    "kvroute_store_breaker_openings": "times passed over for missing",
    "kvroute_store_spared_matches": "matches not asked meanwhile",
    "kvroute_store_malformed": "values refused as none of ours",
    "kvroute_mirror_entries": MIRROR_SIZE,
    "kvroute_mirror_batches_behind": MIRROR_LAG,
    "kvroute_mirror_loads": "workers loaded into the mirror",
    "kvroute_mirror_stale_matches": "matches without the store",
    "kvroute_mirror_faults": "faults of the mirror",
}
"""What a directory counts of itself, in the words of the page."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker."""

    worker: str
    state: str
    engine: str
    eviction: str
    num_running: int | None
    """`None`, as all of these, before its first status."""
    num_waiting: int | None
    queued_prefill_tokens: int | None
    max_num_seqs: int
    num_bookings: int
    kv_blocks: KvBlocks | None
    kv_total_blocks: int
    hit_rate: float | None
    """Share of prompt tokens that its cache gave in the last minute or so; `None` where it has told of none."""
    hit_rate_tokens: float
    """Of how many prompt tokens, those of long ago counting less."""
    is_cache_untold: bool
    """Whether it has answered requests and told of none what its cache gave."""
    num_requests: int
    """Of this router, since it began."""
    status_age_s: float | None
    round_trip_s: float | None
    is_cache_aware: bool
    tells_blocks: bool
    """Whether it tells what it holds; if not, only this router's hints do."""
    is_home: bool


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One hot beginning of prompts, and who holds it."""

    name: str
    num_tokens: int
    num_blocks: int
    requests_per_min: float
    """Roughly: requests of long ago count less."""
    worker_to_blocks: dict[str, int] | None
    """Leading blocks that each worker holds, those without any left out; `None` where the directory is silent."""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """How the directory's store does, as this router sees it."""

    is_resting: bool
    """Whether it has missed so often that it is not asked for now."""
    num_degraded: int
    """Requests routed without it."""
    counts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that an operator should know of."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One batch job and how far it is."""

    id: str
    state: str
    """In OpenAI's words: `validating`, `in_progress`, `finalizing`, `completed`, `failed`, `cancelled`, `expired`."""
    num_rows: int
    num_done: int
    num_failed: int
    began_at: float
    """Wall clock, in seconds of the epoch."""


@dataclass(frozen=True, slots=True)
class RouterRow:
    """One router of several behind one address."""

    router: str
    uptime_s: float
    num_held: int
    num_under_way: int
    num_requests: int
    num_failovers: int
    now: Window
    is_store_resting: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it: of one router, or of several together."""

    taken_at: float
    """Wall clock, in seconds of the epoch."""
    version: str
    routers: tuple[RouterRow, ...]
    """Whose picture it is."""
    model: str
    policy: str
    block_size_tokens: int
    num_routers: int
    """Live routers of the same workers, those of other servers among them."""
    uptime_s: float
    num_held: int
    num_under_way: int
    num_requests: int
    """Ended since the router began."""
    num_failovers: int
    window_s: float
    now: Window
    history: tuple[Window, ...]
    """One window for about each second of the last five minutes, oldest first."""
    flags: tuple[Flag, ...]
    workers: tuple[WorkerRow, ...]
    groups: tuple[GroupRow, ...]
    decisions: tuple[Decision, ...]
    store: StoreHealth
    jobs: tuple[BatchJob, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values. Numbers that JSON has not are `None`."""
        told: dict[str, Any] = _plain(self)
        return told


@dataclass(slots=True)
class Viewpoint:
    """A router, and what else belongs in its picture."""

    router: Router
    jobs: Callable[[], Awaitable[Sequence[BatchJob]]] | None = None
    flags: list[Callable[[], Sequence[Flag]]] = field(default_factory=list)
    """Further things to tell of, each asked whenever somebody looks."""

    async def take(self, *, with_history: bool = True) -> Overview:
        """The picture as of now; the history of five minutes takes most of its time. Modifies only what ages."""
        router = self.router
        watch, fleet = router.watch, router.fleet
        members = fleet.members()
        watch.keep_only(fleet.worker_to_instance.keys())
        rates = watch.rates
        now = rates.window(rates.span(WINDOW_S))
        row = RouterRow(
            router=router.router,
            uptime_s=now.ends_at_s,
            num_held=len(router.queue),
            num_under_way=fleet.num_bookings,
            num_requests=router.metrics.num_ended,
            num_failovers=router.metrics.failovers.total(),
            now=now,
            is_store_resting=router.directory.is_resting,
        )
        return Overview(
            taken_at=time.time(),
            version=__version__,
            routers=(row,),
            model=router.scheme.model,
            policy=router.policy.name,
            block_size_tokens=router.scheme.block_size_tokens,
            num_routers=fleet.num_routers,
            uptime_s=row.uptime_s,
            num_held=row.num_held,
            num_under_way=row.num_under_way,
            num_requests=row.num_requests,
            num_failovers=row.num_failovers,
            window_s=WINDOW_S,
            now=row.now,
            history=tuple(map(rates.window, rates.spans(WINDOW_S))) if with_history else (),
            flags=(*_own_flags(router, members), *(flag for ask in self.flags for flag in ask())),
            workers=tuple(_worker_row(member, watch) for member in members),
            groups=tuple([await self._group_row(group) for group in watch.groups.hottest(SHOWN_GROUPS)]),
            decisions=tuple(watch.decisions.last(SHOWN_DECISIONS)),
            store=_store_health(router),
            jobs=() if self.jobs is None else tuple(await self.jobs()),
        )

    async def _group_row(self, group: Group) -> GroupRow:
        """Who holds a beginning, as the directory knows now: one match, like that of a request."""
        worker_to_instance = self.router.fleet.worker_to_instance
        worker_to_blocks: dict[str, int] | None = None
        try:
            found = await self.router.directory.match(group.keys, worker_to_instance)
            worker_to_blocks = {
                worker: match.num_blocks
                for worker, match in found.items()
                if match.num_blocks and match.instance == worker_to_instance.get(worker)
            }
        except DirectoryUnavailable:
            pass
        return GroupRow(
            name=group.name,
            num_tokens=group.num_blocks * self.router.scheme.block_size_tokens,
            num_blocks=group.num_blocks,
            requests_per_min=group.traffic_per_min,
            worker_to_blocks=worker_to_blocks,
        )


def _own_flags(router: Router, members: Sequence[Member]) -> list[Flag]:
    flags = []
    if router.directory.is_resting:
        flags.append(
            Flag("degraded", "The store does not answer: routing goes by the mirror as it stands, and by load.")
        )
    if not members:
        flags.append(Flag("no worker", "There is no worker: requests wait until one comes."))
    elif not any(member.state in ("ready", "silent") for member in members):
        flags.append(Flag("no worker ready", "No worker takes requests now: they wait until one does."))
    unaware = [member.info.worker for member in members if not member.is_cache_aware]
    if unaware:
        flags.append(
            Flag(
                "parity",
                f"Used, but not for its cache, since its blocks are not what block keys describe: {_listed(unaware)}.",
            )
        )
    mute = [member.info.worker for member in members if not member.info.tells_blocks]
    if mute:
        text = f"Publish no KV events, so that only what was sent there lately counts as held: {_listed(mute)}."
        flags.append(Flag("hints only", text))
    silent = [member.info.worker for member in members if member.state == "silent"]
    if silent:
        flags.append(Flag("silent", f"Connected, but hangs, and gets nothing new unless all do: {_listed(silent)}."))
    suspected = [member.info.worker for member in members if member.state == "suspected"]
    if suspected:
        flags.append(Flag("suspected", f"Failed several requests in a row and gets probes only: {_listed(suspected)}."))
    return flags


def _listed(workers: Sequence[WorkerId]) -> str:
    most = 8
    rest = f" and {len(workers) - most} more" if len(workers) > most else ""
    return ", ".join(workers[:most]) + rest


def _worker_row(member: Member, watch: Watch) -> WorkerRow:
    info, status = member.info, member.status
    tally = watch.worker_to_tally.get(info.worker)
    return WorkerRow(
        worker=info.worker,
        state=member.state,
        engine=info.engine,
        eviction=info.eviction,
        num_running=None if status is None else status.num_running,
        num_waiting=None if status is None else status.num_waiting,
        queued_prefill_tokens=None if status is None else status.queued_prefill_tokens,
        max_num_seqs=info.max_num_seqs,
        num_bookings=member.num_bookings,
        kv_blocks=member.kv_blocks,
        kv_total_blocks=info.num_blocks,
        hit_rate=None if tally is None else tally.hit_rate,
        hit_rate_tokens=0.0 if tally is None else tally.recent_tokens,
        is_cache_untold=tally is not None and tally.num_answered > 0 and tally.num_told_tokens == 0,
        num_requests=0 if tally is None else tally.num_requests,
        status_age_s=None if status is None else member.status_age_s,
        round_trip_s=member.round_trip_s if math.isfinite(member.round_trip_s) else None,
        is_cache_aware=member.is_cache_aware,
        tells_blocks=info.tells_blocks,
        is_home=member.is_home,
    )


def _store_health(router: Router) -> StoreHealth:
    counts = {text: router.metrics.value(name) for name, text in _STORE_COUNTS.items()}
    return StoreHealth(
        is_resting=router.directory.is_resting,
        num_degraded=router.metrics.num_directory_degraded,
        counts={text: value for text, value in counts.items() if value is not None},
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
