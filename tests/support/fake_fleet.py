"""A fleet that answers at once by arithmetic, so that what is told of it can be checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.policies.base import Policy
from router.simulation import Arrival, FleetResult, FleetSpec, Outcome


def outcome(
    arrived_at_s: float = 0.0,
    ttft_s: float | None = 1.0,
    *,
    itl_s: float = 0.1,
    num_output_tokens: int = 11,
    num_prompt_tokens: int = 100,
    cached_tokens: int = 0,
    error: str | None = None,
) -> Outcome:
    """What became of one request; without a TTFT it got no token."""
    first_token_at_s = None if ttft_s is None else arrived_at_s + ttft_s
    return Outcome(
        arrived_at_s=arrived_at_s,
        bound_at_s=arrived_at_s + 0.5,
        first_token_at_s=first_token_at_s,
        finished_at_s=None if first_token_at_s is None else first_token_at_s + itl_s * (num_output_tokens - 1),
        worker=None if first_token_at_s is None else "w0",
        cached_tokens=cached_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        max_itl_s=itl_s,
        router=0,
        error=error,
    )


def result(*outcomes: Outcome, busy_s: tuple[float, ...] = (1.0,), makespan_s: float = 10.0) -> FleetResult:
    """What a simulation tells."""
    return FleetResult(
        outcomes=outcomes,
        makespan_s=makespan_s,
        busy_s=busy_s,
        num_requests=[len(outcomes)] * len(busy_s),
        num_refusals=0,
        num_block_events=0,
        num_evictions=7,
        num_preemptions=2,
        most_held=3,
    )


@dataclass(slots=True)
class FakeFleet:
    """Stands for `simulate`: each request takes a second of its worker; remembers what it was asked."""

    asked: list[tuple[FleetSpec, str, list[float]]] = field(default_factory=list)

    def __call__(self, spec: FleetSpec, policy: Policy, arrivals: Iterable[Arrival]) -> FleetResult:
        times_s = [arrival.at_s for arrival in arrivals]
        self.asked.append((spec, policy.name, times_s))
        busy_s = len(times_s) / spec.num_workers
        return result(*map(outcome, times_s), busy_s=(busy_s,) * spec.num_workers, makespan_s=busy_s)
