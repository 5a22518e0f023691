"""The runs of the routing benchmark: what each one simulates, where finished ones are kept, what is tried of peers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

from router.generated import GENERATORS, generated_lines
from router.policies import make_policy
from router.replay import saturated_rate_per_s
from router.replay_report import Slo, report
from router.simulation import FleetSpec, simulate
from router.traces import TraceRequest, parse_trace, read_trace
from router.workload import Workload, arrival_times_s, select
from tests.support.traces import trace_path

MOONCAKE = "mooncake"
MOONCAKE_SAYING_LENGTHS = "mooncake_saying_lengths"
"""The same requests, each asking for no more tokens than its answer has."""
WORKLOADS = (MOONCAKE, MOONCAKE_SAYING_LENGTHS, *GENERATORS)
NUM_WORKERS = 16
PROFILE = "13b-a100"
BLOCK_SIZE_TOKENS = 64
MAX_PROMPT_TOKENS = 16_384
SLO = Slo(2.0)
SEVERAL_ROUTERS_LAG_S = 0.1
"""Of fleets with several routers; one router has none."""

Knobs = Mapping[str, Sequence[str]]
_GRIDS: Mapping[str, Sequence[Knobs]] = MappingProxyType(
    {
        "dynamo": (
            {"prefill_load_scale": ("0.5", "1", "2", "4")},
            {
                "prefill_load_scale": ("1", "2"),
                "queue_threshold": ("1", "4"),
                "queue_policy": ("fcfs", "wspt"),
            },
            {"selection_policy": ("lmetric",)},
        ),
        "llm_d": (
            {"prefix_weight": ("1", "2", "3", "5", "8")},
            {"prefix_weight": ("2", "4"), "active_request_weight": ("2",)},
            {"prefix_weight": ("1", "2", "4"), "kv_utilization_weight": ("0",), "active_request_weight": ("0", "2")},
        ),
        "llm_d_affinity": (
            {"affinity_threshold": ("0.2", "0.5", "0.8"), "max_ttft_penalty_ms": ("1000", "4000", "18000")},
            {"affinity_threshold": ("0.2", "0.5"), "load_scorer": ("active_request",)},
        ),
        "sglang": (
            {"cache_threshold": ("0.1", "0.3", "0.5", "0.8")},
            {
                "cache_threshold": ("0.1", "0.3", "0.5"),
                "balance_abs_threshold": ("2", "8"),
                "balance_rel_threshold": ("1.2",),
            },
        ),
        "ray_prefix": (
            {"imbalanced_threshold": ("2", "5", "10", "inf"), "match_rate_threshold": ("0.1", "0.3", "0.5")},
        ),
    }
)
"""Peers with what is tried of each: the knobs that their projects document, around their defaults."""
PEERS = tuple(_GRIDS)


@dataclass(frozen=True, slots=True)
class Cell:
    """A situation that policies are compared in."""

    workload: str
    """A name of `WORKLOADS`."""
    num_blocks: int
    num_routers: int
    load: float


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. Its fields say all that decides its figures, but for the code itself."""

    workload: str
    num_blocks: int
    num_routers: int
    load: float | None
    """None: measures what saturates the fleet."""
    half: str
    """`tune`: the trace's first requests; `measure`: the next ones, as many."""
    num_requests: int
    seed: int
    """Draws where within its tick each arrival lies and what policies draw; of a made-up trace, the trace as well."""
    policy: str

    @property
    def key(self) -> str:
        """What a finished run is known by."""
        return json.dumps(asdict(self))


Figures = dict[str, Any]
"""The fields of a `PolicyReport`, or `saturated_rate_per_s` alone."""


class Results:
    """Finished runs, one JSON line each in a file that is appended to, where there is one.

    A torn last line is run again. Runs of other code count, and are counted in `num_outdated`.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._key_to_figures: dict[str, Figures] = {}
        self._code = code_fingerprint()
        self.num_outdated = 0
        if path is not None and path.exists():
            *lines, torn = path.read_bytes().split(b"\n")
            os.truncate(path, path.stat().st_size - len(torn))
            for row in map(json.loads, lines):
                self._key_to_figures[json.dumps(row["run"])] = row["figures"]
                self.num_outdated += row["code"] != self._code

    def __contains__(self, run: Run) -> bool:
        return run.key in self._key_to_figures

    def __getitem__(self, run: Run) -> Figures:
        return self._key_to_figures[run.key]

    def add(self, run: Run, figures: Figures) -> None:
        """Keep one finished run. Modifies the file."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": asdict(run), "figures": figures, "code": self._code}) + "\n")
        self._key_to_figures[run.key] = figures


def code_fingerprint() -> str:
    """Stands for the product's source as it is."""
    root = Path(__file__).parents[2]
    paths = sorted(path for room in ("router", "shared", "worker") for path in (root / room).rglob("*.py"))
    return blake2b(b"".join(path.read_bytes() for path in paths), digest_size=8).hexdigest()


def grid(peer: str) -> list[str]:
    """A peer with each of its knobs' values that are tried, its defaults first."""
    texts = [peer]
    for knobs in _GRIDS[peer]:
        for values in product(*knobs.values()):
            texts.append(":".join([peer, *(f"{name}={value}" for name, value in zip(knobs, values, strict=True))]))
    return texts


def saturation(run: Run) -> Run:
    """The run that tells what `run`'s load is a multiple of."""
    return Run(run.workload, run.num_blocks, 1, None, run.half, run.num_requests, 0, "round_robin")


def run_one(run: Run, saturated_per_s: float | None) -> Figures:
    """The figures of one run. Everything but what saturates the fleet needs to know that."""
    spec = FleetSpec(
        num_workers=NUM_WORKERS,
        profile=PROFILE,
        num_routers=run.num_routers,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        num_blocks=run.num_blocks,
        lag_s=0.0 if run.num_routers == 1 else SEVERAL_ROUTERS_LAG_S,
        seed=run.seed,
    )
    # A made-up trace is the seed's own.
    window = (run.workload, run.half, run.num_requests, run.seed if run.workload in GENERATORS else 0, run.num_blocks)
    requests = _requests(*window)
    if saturated_per_s is None or run.load is None:
        return {"saturated_rate_per_s": saturated_rate_per_s(spec, requests)}
    rng = random.Random(run.seed)
    rate_per_s = run.load * saturated_per_s
    workload = Workload(requests, arrival_times_s(requests, rate_per_s=rate_per_s, is_spread=True, rng=rng))
    result = simulate(spec, make_policy(run.policy), workload)
    return asdict(report(run.policy, result, slo=SLO, possible_cached_tokens=_possible(*window)))


def run_all(
    runs: Iterable[Run],
    results: Results,
    num_processes: int,
    say: Callable[[str], None],
    execute: Callable[[Run, float | None], Figures] = run_one,
) -> None:
    """Run those that are not finished yet, each after what tells its load. Modifies `results`."""
    left = [run for run in dict.fromkeys(runs) if run not in results]
    jobs = [(run, None if run.load is None else results[saturation(run)]["saturated_rate_per_s"]) for run in left]
    for number, (run, figures) in enumerate(_executed(execute, jobs, num_processes), start=1):
        results.add(run, figures)
        where = f"{run.workload} {run.num_blocks} blocks, {run.num_routers} routers, load {run.load}, {run.half}"
        told = f"{figures['ttft_mean_s']:.3f} s" if figures.get("ttft_mean_s") else f"{figures}"
        say(f"{number}/{len(left)}: {where}, seed {run.seed}, {run.policy}: {told}")


def _executed(
    execute: Callable[[Run, float | None], Figures], jobs: Sequence[tuple[Run, float | None]], num_processes: int
) -> Iterator[tuple[Run, Figures]]:
    """Finished runs as they end."""
    if num_processes == 1:
        yield from ((run, execute(run, rate_per_s)) for run, rate_per_s in jobs)
        return
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        future_to_run = {pool.submit(execute, run, rate_per_s): run for run, rate_per_s in jobs}
        try:
            yield from ((future_to_run[future], future.result()) for future in as_completed(future_to_run))
        finally:
            pool.shutdown(cancel_futures=True)


def trace_requests(workload: str, seed: int) -> Iterator[TraceRequest]:
    """All requests of a workload; the seed draws those of a made-up one."""
    if workload in GENERATORS:
        return parse_trace(generated_lines(workload, seed), workload)
    trace = read_trace(trace_path())
    if workload == MOONCAKE_SAYING_LENGTHS:
        return (replace(request, max_tokens=request.num_output_tokens) for request in trace)
    return trace


@cache
def _requests(workload: str, half: str, num_requests: int, seed: int, num_blocks: int) -> list[TraceRequest]:
    return select(
        trace_requests(workload, seed),
        workload,
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        skip=0 if half == "tune" else num_requests,
        limit=num_requests,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
    )


@cache
def _possible(workload: str, half: str, num_requests: int, seed: int, num_blocks: int) -> int:
    requests = _requests(workload, half, num_requests, seed, num_blocks)
    return Workload(requests, [0.0] * len(requests)).possible_cached_tokens(BLOCK_SIZE_TOKENS)
