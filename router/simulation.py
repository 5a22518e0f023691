"""A whole fleet in one process and in virtual time: real routers, directory, mirrors, publishers and block pools.

The second composition root, beside `launch`. Only the model is missing: simulated engines take the time that a latency
profile says, and connections are calls that arrive late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.policies.base import Policy
from worker.engines.profiles import LatencyProfile


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Since the beginning of the simulation; never before the arrival before it."""
    token_ids: bytes
    """Prompt, as `hashing.pack_tokens` gives it."""
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The fleet to simulate. Limits that are not given are those of the profile."""

    num_workers: int
    profile: LatencyProfile | str
    """A profile, or the name or file of one."""
    num_routers: int = 1
    block_size_tokens: int = 64
    num_blocks: int | None = None
    """KV blocks of each worker."""
    max_num_seqs: int | None = None
    step_budget_tokens: int | None = None
    eviction: str = "adaptive"
    status_interval_s: float = 0.1
    """Time between two statuses of a worker that has nothing urgent to tell."""
    lag_s: float = 0.0
    """One way between a router and a worker, and from a worker's publisher to a router's mirror."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one arrival. Times are seconds since the beginning of the simulation."""

    arrived_at_s: float
    bound_at_s: float | None
    """When the router sent it to the worker that answered."""
    first_token_at_s: float | None
    """When the router had the first token, as all times here are the router's."""
    finished_at_s: float | None
    worker: str | None
    cached_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_itl_s: float
    """Longest time between two tokens; 0.0 where there are fewer than two."""
    router: int
    error: str | None = None
    """Name of the error that ended it, `Overloaded` for instance."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """All that a simulation tells."""

    outcomes: Sequence[Outcome]
    """In order of arrivals."""
    makespan_s: float
    """From the beginning to the last end."""
    busy_s: Sequence[float]
    """Time in steps, by worker."""
    num_requests: Sequence[int]
    """Requests that each worker was sent."""
    num_block_events: int
    """Keys that workers told to have stored or removed."""
    num_evictions: int
    """Keys that lost a copy to an allocation, on all workers."""
    num_preemptions: int
    most_held: int
    """Most requests that routers held at one moment, of those looked at ten times a second."""


def simulate(spec: FleetSpec, policy: Policy, arrivals: Iterable[Arrival]) -> FleetResult:
    """Run `arrivals`, dealt to the routers in turn, to their end. Takes them one by one, as their time comes."""
    raise NotImplementedError
