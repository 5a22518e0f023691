"""`kvroute replay`: what a fleet would do with a trace, in virtual time, under one policy after another.

Checks everything before anything is simulated. Prints nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router import fields
from router.generated import GENERATORS, generated_lines
from router.policies import make_policy
from router.policies.base import Policy
from router.replay_report import PolicyReport, Slo, report, ttfts_s
from router.simulation import Arrival, FleetResult, FleetSpec, simulate
from router.tables import counted
from router.traces import Tokenise, TraceRequest, parse_trace, read_trace
from router.workload import Workload, arrival_times_s, select
from shared.config import Settings
from shared.errors import ConfigError
from worker.engines.profiles import LatencyProfile, load_profile

DEFAULT_GENERATED_REQUESTS = 1000
_SATURATING_REQUESTS_PER_WORKER = 64
"""With so many for each worker, what they differ in evens out; more would only take longer."""
_MIN_SATURATING_REQUESTS = 1000

Simulate = Callable[[FleetSpec, Policy, Iterable[Arrival]], FleetResult]
Watch = Callable[[str, Workload], Iterable[Arrival]]
"""Lets somebody see a workload go by, under a name."""


def _unwatched(name: str, workload: Workload) -> Iterable[Arrival]:
    return workload


class ReplayOptions(BaseModel):
    """What `kvroute replay` takes beside the settings. Field names are the flags' names with underscores."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    trace: str = Field(min_length=1)
    policies: str = "cost"
    routers: int = Field(1, ge=1, le=256)
    rate: float | None = Field(None, gt=0)
    load: float | None = Field(None, gt=0)
    spread: bool = False
    cache_blocks: int | None = Field(None, ge=2)
    max_prompt_tokens: int | None = Field(None, ge=1)
    skip: int = Field(0, ge=0)
    limit: int | None = Field(None, ge=1)
    slo_ttft_s: float = Field(2.0, gt=0)
    slo_itl_s: float | None = Field(None, gt=0)
    lag_s: float = Field(0.0, ge=0)
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay that is checked and ready to run."""

    spec: FleetSpec
    """With no limit left to the profile."""
    num_blocks: int
    profile_name: str
    policies: tuple[str, ...]
    workload: Workload
    possible_cached_tokens: int
    slo: Slo
    saturated_rate_per_s: float | None
    """What the load is a multiple of; None where no load was asked for."""

    def facts(self) -> dict[str, Any]:
        """What all policies of the replay have in common, for JSON."""
        spec = self.spec
        return {
            "num_workers": spec.num_workers,
            "num_routers": spec.num_routers,
            "profile": self.profile_name,
            "block_size_tokens": spec.block_size_tokens,
            "num_blocks": self.num_blocks,
            "max_num_seqs": spec.max_num_seqs,
            "step_budget_tokens": spec.step_budget_tokens,
            "eviction": spec.eviction,
            "lag_s": spec.lag_s,
            "seed": spec.seed,
            "rate_per_s": _rounded(self.workload.rate_per_s),
            "saturated_rate_per_s": _rounded(self.saturated_rate_per_s),
            "num_prompt_tokens": self.workload.num_prompt_tokens,
            "possible_cached_tokens": self.possible_cached_tokens,
            "slo_ttft_s": self.slo.ttft_s,
            "slo_itl_s": self.slo.itl_s,
        }

    def text(self) -> str:
        """The replay in one line, for people."""
        spec, rate_per_s = self.spec, self.workload.rate_per_s
        arriving = "all at once" if rate_per_s is None else f"{rate_per_s:.2f} a second"
        if rate_per_s is not None and self.saturated_rate_per_s is not None:
            arriving += f" ({rate_per_s / self.saturated_rate_per_s:.2f} of what saturates round_robin)"
        return (
            f"{counted(len(self.workload), 'request')}, {arriving}; "
            f"{counted(spec.num_workers, 'worker')} ({self.profile_name}, {self.num_blocks:,} KV blocks of "
            f"{spec.block_size_tokens} tokens, {spec.eviction}); {counted(spec.num_routers, 'router')}, "
            f"lag {spec.lag_s:g} s; seed {spec.seed}"
        )


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy's figures, its times to first token, least first, and how long the simulation took."""

    report: PolicyReport
    ttfts_s: Sequence[float]
    wall_s: float


def read_options(own: Mapping[str, Any]) -> ReplayOptions:
    """The command's arguments, checked one by one. Raises `ConfigError` that names flag and value."""
    given = {name: value for name, value in own.items() if value is not None}
    try:
        options = ReplayOptions(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_describe, error.errors()))) from None
    if options.rate is not None and options.load is not None:
        raise ConfigError("--rate, --load: they exclude each other")
    return options


def policy_texts(given: str) -> tuple[str, ...]:
    """The policies named, each of which can be made. Raises `ConfigError`."""
    texts = tuple(text.strip() for text in given.split(","))
    for number, text in enumerate(texts):
        make_policy(text)
        if text in texts[:number]:
            raise ConfigError(f"--policy: {text} is named twice")
    return texts


def prepare(
    options: ReplayOptions,
    settings: Settings,
    tokenise: Tokenise | None,
    watch: Watch = _unwatched,
    *,
    run: Simulate = simulate,
) -> Replay:
    """Read and check everything that a replay needs. With a load, measures what saturates the fleet.

    Raises:
        ConfigError: an option, the profile or the trace is at fault.
    """
    policies = policy_texts(options.policies)
    profile = load_profile(settings.profile)
    num_blocks = _num_blocks(options, settings.block_size, profile)
    spec = _fleet(options, settings, profile, num_blocks)
    requests = select(
        _requests(options, settings.seed, tokenise),
        options.trace,
        num_blocks=num_blocks,
        block_size_tokens=spec.block_size_tokens,
        skip=options.skip,
        limit=DEFAULT_GENERATED_REQUESTS if options.limit is None and _is_generated(options) else options.limit,
        max_prompt_tokens=options.max_prompt_tokens,
    )
    saturated_per_s = saturated_rate_per_s(spec, requests, watch, run=run) if options.load is not None else None
    rate_per_s = options.rate if saturated_per_s is None else saturated_per_s * (options.load or 1.0)
    rng = random.Random(settings.seed)
    workload = Workload(requests, arrival_times_s(requests, rate_per_s=rate_per_s, is_spread=options.spread, rng=rng))
    return Replay(
        spec,
        num_blocks,
        profile.name,
        policies,
        workload,
        workload.possible_cached_tokens(spec.block_size_tokens),
        Slo(options.slo_ttft_s, options.slo_itl_s),
        saturated_per_s,
    )


def saturated_rate_per_s(
    spec: FleetSpec, requests: Sequence[TraceRequest], watch: Watch = _unwatched, *, run: Simulate = simulate
) -> float:
    """Requests a second that this fleet serves under round robin while every worker always has some waiting.

    Measured with the first requests of the trace, all of them there at the beginning, over the workers' busy time: the
    idle end of those that are done first does not count.

    Raises:
        ConfigError: none of them was answered.
    """
    num_requests = max(_MIN_SATURATING_REQUESTS, _SATURATING_REQUESTS_PER_WORKER * spec.num_workers)
    workload = Workload(requests, [0.0] * len(requests)).at_once(num_requests)
    # One router without lag: what the workers can do does not depend on them.
    result = run(
        replace(spec, num_routers=1, lag_s=0.0), make_policy("round_robin"), watch("measuring what saturates", workload)
    )
    busy_s = sum(result.busy_s)
    num_answered = sum(outcome.error is None for outcome in result.outcomes)
    if not num_answered or not busy_s:
        raise ConfigError("--load: the fleet answers none of the trace's first requests under round robin")
    return num_answered * spec.num_workers / busy_s


def run_policies(
    replay: Replay, watch: Watch, clock: Callable[[], float], *, run: Simulate = simulate
) -> Iterator[PolicyRun]:
    """Simulate one policy after another on the same arrivals. `clock` times the simulation itself."""
    for policy in replay.policies:
        started_at_s = clock()
        result = run(replay.spec, make_policy(policy), watch(policy, replay.workload))
        wall_s = clock() - started_at_s
        figures = report(
            policy,
            result,
            slo=replay.slo,
            possible_cached_tokens=replay.possible_cached_tokens,
        )
        yield PolicyRun(figures, ttfts_s(result), wall_s)


def _num_blocks(options: ReplayOptions, block_size_tokens: int, profile: LatencyProfile) -> int:
    """KV blocks of each worker."""
    if options.cache_blocks is not None:
        return options.cache_blocks
    if profile.kv_capacity_tokens is None:
        raise ConfigError(f"--cache-blocks: needed, since profile {profile.name} does not tell how many blocks fit")
    return max(1, profile.kv_capacity_tokens // block_size_tokens)


def _fleet(options: ReplayOptions, settings: Settings, profile: LatencyProfile, num_blocks: int) -> FleetSpec:
    if settings.eviction == "stock":
        raise ConfigError("--eviction: stock is vLLM's own pool, which is not simulated: lru does the same")
    return FleetSpec(
        num_workers=settings.workers,
        num_routers=options.routers,
        profile=profile,
        block_size_tokens=settings.block_size,
        num_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs if "max_num_seqs" in settings.model_fields_set else profile.max_num_seqs,
        step_budget_tokens=profile.step_budget_tokens,
        eviction=settings.eviction,
        lag_s=options.lag_s,
        seed=settings.seed,
    )


def _requests(options: ReplayOptions, seed: int, tokenise: Tokenise | None) -> Iterator[TraceRequest]:
    if _is_generated(options):
        return parse_trace(generated_lines(options.trace, seed), options.trace)
    return read_trace(Path(options.trace), tokenise)


def _is_generated(options: ReplayOptions) -> bool:
    return options.trace in GENERATORS


def _describe(detail: Any) -> str:
    name = str(detail["loc"][0]).replace("_", "-")
    flag = {"trace": "TRACE", "policies": "--policy"}.get(name, f"--{name}")
    return f"{flag}: invalid value {fields.brief(detail['input'])}: {detail['msg']}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
