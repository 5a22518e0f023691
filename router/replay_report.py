"""What a replay of one policy adds up to, as figures, as a table of several policies, and as JSON. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.batch_report import quantile
from router.simulation import FleetResult, Outcome
from router.tables import or_dash, table


@dataclass(frozen=True, slots=True)
class Slo:
    """When a request counts as served well."""

    ttft_s: float
    itl_s: float | None = None
    """Most that a request's own mean time between tokens may be; None: anything."""

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request was; what was refused or failed never is."""
        ttft_s, itl_s = _ttft_s(outcome), _itl_s(outcome)
        if outcome.error is not None or ttft_s is None or ttft_s > self.ttft_s:
            return False
        return self.itl_s is None or itl_s is None or itl_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy's figures, all of them simulated. Times are None where no request gave any."""

    policy: str
    num_requests: int
    num_rejected: int
    """Requests that got no whole answer, for whatever reason."""
    hit_ratio: float
    """Cached tokens over prompt tokens, of answered requests."""
    hit_share_of_bound: float
    """Cached tokens over what one endless cache could have served at best."""
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_mean_s: float | None
    """Over all tokens but the first of each answer."""
    itl_p99_s: float | None
    """Over answers, of each one's mean."""
    e2e_mean_s: float | None
    e2e_p99_s: float | None
    tokens_per_s: float
    """Prompt and answer together."""
    goodput_per_s: float
    """Requests within the service level."""
    goodput_share: float
    """Of all requests, those refused included."""
    busy_share: float
    """Of the workers' time, from the beginning to the last end."""
    load_imbalance: float
    """The busiest worker's busy time over the mean."""
    num_evictions: int
    num_preemptions: int
    held_p99_s: float | None
    """Time that a request waited in its router, for a worker to be about to have room."""
    most_held: int
    """Most requests that waited in routers at one time."""
    makespan_s: float


def report(policy: str, result: FleetResult, *, slo: Slo, possible_cached_tokens: int) -> PolicyReport:
    """The figures of one policy's run. `possible_cached_tokens` is the workload's."""
    answered = [outcome for outcome in result.outcomes if outcome.error is None]
    ttfts_s = [ttft_s for outcome in answered if (ttft_s := _ttft_s(outcome)) is not None]
    itls_s = [itl_s for outcome in answered if (itl_s := _itl_s(outcome)) is not None]
    e2es_s = [outcome.finished_at_s - outcome.arrived_at_s for outcome in answered if outcome.finished_at_s is not None]
    held_s = [outcome.bound_at_s - outcome.arrived_at_s for outcome in answered if outcome.bound_at_s is not None]
    cached_tokens = sum(outcome.cached_tokens for outcome in answered)
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in answered)
    output_tokens = sum(outcome.num_output_tokens for outcome in answered)
    decode_s = sum(itl_s * (outcome.num_output_tokens - 1) for outcome in answered if (itl_s := _itl_s(outcome)))
    num_between = sum(outcome.num_output_tokens - 1 for outcome in answered if _itl_s(outcome) is not None)
    num_good = sum(map(slo.is_met, result.outcomes))
    return PolicyReport(
        policy=policy,
        num_requests=len(result.outcomes),
        num_rejected=len(result.outcomes) - len(answered),
        hit_ratio=_ratio(cached_tokens, prompt_tokens),
        hit_share_of_bound=_ratio(cached_tokens, possible_cached_tokens),
        ttft_mean_s=_mean(ttfts_s),
        ttft_p50_s=quantile(ttfts_s, 0.5),
        ttft_p90_s=quantile(ttfts_s, 0.9),
        ttft_p99_s=quantile(ttfts_s, 0.99),
        itl_mean_s=decode_s / num_between if num_between else None,
        itl_p99_s=quantile(itls_s, 0.99),
        e2e_mean_s=_mean(e2es_s),
        e2e_p99_s=quantile(e2es_s, 0.99),
        tokens_per_s=_ratio(prompt_tokens + output_tokens, result.makespan_s),
        goodput_per_s=_ratio(num_good, result.makespan_s),
        goodput_share=_ratio(num_good, len(result.outcomes)),
        busy_share=_ratio(sum(result.busy_s), len(result.busy_s) * result.makespan_s),
        load_imbalance=_ratio(max(result.busy_s) * len(result.busy_s), sum(result.busy_s)),
        num_evictions=result.num_evictions,
        num_preemptions=result.num_preemptions,
        held_p99_s=quantile(held_s, 0.99),
        most_held=result.most_held,
        makespan_s=result.makespan_s,
    )


def ttfts_s(result: FleetResult) -> list[float]:
    """Time to first token of each answered request, least first."""
    return sorted(
        ttft_s for outcome in result.outcomes if outcome.error is None and (ttft_s := _ttft_s(outcome)) is not None
    )


_ROWS: tuple[tuple[str, Callable[[PolicyReport], str]], ...] = (
    ("requests answered", lambda found: f"{found.num_requests - found.num_rejected}"),
    ("rejected", lambda found: f"{found.num_rejected}"),
    ("hit ratio", lambda found: f"{found.hit_ratio:.1%}"),
    ("share of the endless cache's hits", lambda found: f"{found.hit_share_of_bound:.1%}"),
    ("TTFT mean", lambda found: _seconds(found.ttft_mean_s)),
    ("TTFT p50", lambda found: _seconds(found.ttft_p50_s)),
    ("TTFT p90", lambda found: _seconds(found.ttft_p90_s)),
    ("TTFT p99", lambda found: _seconds(found.ttft_p99_s)),
    ("time between tokens, mean", lambda found: _milliseconds(found.itl_mean_s)),
    ("time between tokens, p99 of answers", lambda found: _milliseconds(found.itl_p99_s)),
    ("whole answer, mean", lambda found: _seconds(found.e2e_mean_s)),
    ("whole answer, p99", lambda found: _seconds(found.e2e_p99_s)),
    ("tokens/s (prompt and answer)", lambda found: f"{found.tokens_per_s:,.0f}"),
    ("within the service level", lambda found: f"{found.goodput_share:.1%}"),
    ("requests/s within it", lambda found: f"{found.goodput_per_s:.3f}"),
    ("workers busy", lambda found: f"{found.busy_share:.1%}"),
    ("busiest worker over the mean", lambda found: f"{found.load_imbalance:.3f}"),
    ("blocks evicted", lambda found: f"{found.num_evictions:,}"),
    ("preemptions", lambda found: f"{found.num_preemptions:,}"),
    ("held in a router, p99", lambda found: _seconds(found.held_p99_s)),
    ("most held in routers", lambda found: f"{found.most_held:,}"),
    ("makespan", lambda found: f"{found.makespan_s:,.1f} s"),
)


def report_text(reports: Sequence[PolicyReport]) -> str:
    """All policies side by side, for people."""
    head = ["simulated", *(found.policy for found in reports)]
    return table([head, *([name, *map(cell, reports)] for name, cell in _ROWS)])


def report_json(found: PolicyReport, common: Mapping[str, Any]) -> str:
    """One policy as one JSON line, with what is `common` to all of a replay."""
    figures = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(found).items()}
    return json.dumps({"policy": figures.pop("policy"), "simulated": True, **common, **figures})


def _ttft_s(outcome: Outcome) -> float | None:
    return None if outcome.first_token_at_s is None else outcome.first_token_at_s - outcome.arrived_at_s


def _itl_s(outcome: Outcome) -> float | None:
    """A request's mean time between two tokens; None where its answer has no two."""
    if outcome.first_token_at_s is None or outcome.finished_at_s is None or outcome.num_output_tokens < 2:
        return None
    return (outcome.finished_at_s - outcome.first_token_at_s) / (outcome.num_output_tokens - 1)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _seconds(value: float | None) -> str:
    return or_dash(None if value is None else f"{value:.3f} s")


def _milliseconds(value: float | None) -> str:
    return or_dash(None if value is None else f"{1e3 * value:.1f} ms")
