"""One picture of several routers behind one address, whichever of their processes is looked at.

Each process tells its own share; here they become one. Percentiles come from everybody's counts, since those of single
routers cannot be added.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from router.overview import (
    MIRROR_LAG,
    MIRROR_SIZE,
    SHOWN_DECISIONS,
    SHOWN_GROUPS,
    WINDOW_S,
    Flag,
    GroupRow,
    Overview,
    StoreHealth,
    Viewpoint,
    WorkerRow,
)
from router.rates import Rates, Span, Window
from router.sibling_words import Place

logger = logging.getLogger(__name__)

SHARE, SHARE_WITH_HISTORY = "share", "share-with-history"
"""Under which names a process tells its share."""
_SAME_TIME_S = 1.5
"""Samples are a second apart: of two routers' those count as of one time that are no farther from each other."""
_WORST_LAST = ("ready", "draining", "resting", "silent", "away", "suspected")
_LARGEST = (MIRROR_SIZE, MIRROR_LAG)
"""Counts that each router has of the same thing, so that they are not added up."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process tells of itself."""

    overview: Overview
    """Without its history."""
    now: Span
    history: tuple[Span, ...]


Row = TypeVar("Row")
Name = TypeVar("Name")
_SHARE: TypeAdapter[Share] = TypeAdapter(Share)


async def own_share(viewpoint: Viewpoint, *, with_history: bool) -> Share:
    """This process's share as of now."""
    rates = viewpoint.router.watch.rates
    history = tuple(rates.spans(WINDOW_S)) if with_history else ()
    return Share(await viewpoint.take(with_history=False), rates.span(WINDOW_S), history)


def encoded(share: Share) -> bytes:
    """A share as it goes to another process."""
    return orjson.dumps(share)


async def take_joined(viewpoint: Viewpoint, place: Place, *, with_history: bool) -> Overview:
    """The picture of all processes, jobs as this one sees them. One that does not answer is missing, with a flag."""
    own = await own_share(viewpoint, with_history=with_history)
    told = await place.ask_others(SHARE_WITH_HISTORY if with_history else SHARE)
    shares, missing = [own], []
    for number, raw in sorted(told.items()):
        share = None if raw is None else _read(number, raw)
        if share is None:
            missing.append(number)
        else:
            shares.append(share)
    return joined(shares, viewpoint.router.watch.rates, missing)


def _read(number: int, raw: bytes) -> Share | None:
    try:
        return _SHARE.validate_json(raw)
    except ValidationError as error:
        logger.error("what server process %s tells of itself cannot be read: %s", number, error)
        return None


def joined(shares: Sequence[Share], rates: Rates, missing: Sequence[int] = ()) -> Overview:
    """One picture of several shares; what is of no router in particular is the first one's."""
    views = [share.overview for share in shares]
    flags = list(dict.fromkeys(flag for view in views for flag in view.flags))
    flags += [
        Flag("router missing", f"Server process {number} does not answer: its share is missing.") for number in missing
    ]
    decisions = sorted((one for view in views for one in view.decisions), key=lambda one: -one.decided_at)
    return replace(
        views[0],
        routers=tuple(sorted((row for view in views for row in view.routers), key=lambda row: row.router)),
        num_routers=max(view.num_routers for view in views),
        uptime_s=max(view.uptime_s for view in views),
        num_held=sum(view.num_held for view in views),
        num_under_way=sum(view.num_under_way for view in views),
        num_requests=sum(view.num_requests for view in views),
        num_failovers=sum(view.num_failovers for view in views),
        now=rates.window(*(share.now for share in shares)),
        history=tuple(_history(shares, rates)),
        flags=tuple(flags),
        workers=tuple(_joined_rows(views, lambda view: view.workers, lambda row: row.worker, _worker)),
        groups=tuple(_groups(views)),
        decisions=tuple(decisions[:SHOWN_DECISIONS]),
        store=_store([view.store for view in views]),
    )


def _history(shares: Sequence[Share], rates: Rates) -> Iterable[Window]:
    """Windows at the times of the router that remembers most, with what the others counted about then."""
    longest, *others = sorted((share.history for share in shares), key=len, reverse=True)
    other_to_times = [[span.ends_at_s for span in history] for history in others]
    for span in longest:
        together = [span]
        for history, times in zip(others, other_to_times, strict=True):
            place = bisect_left(times, span.ends_at_s)
            near = history[max(0, place - 1) : place + 1]
            if near:
                nearest = min(near, key=lambda other: abs(other.ends_at_s - span.ends_at_s))
                if abs(nearest.ends_at_s - span.ends_at_s) <= _SAME_TIME_S:
                    together.append(nearest)
        yield rates.window(*together)


def _joined_rows(
    views: Sequence[Overview],
    rows_of: Callable[[Overview], Sequence[Row]],
    name_of: Callable[[Row], Name],
    join: Callable[[list[Row]], Row],
) -> list[Row]:
    """Rows of the same name as one, in the order in which they are first met."""
    name_to_rows: dict[Name, list[Row]] = {}
    for view in views:
        for row in rows_of(view):
            name_to_rows.setdefault(name_of(row), []).append(row)
    return [join(rows) for rows in name_to_rows.values()]


def _worker(rows: list[WorkerRow]) -> WorkerRow:
    """A worker as the router sees it that heard of it last, in the worst of all states that routers see it in."""
    latest = min(rows, key=lambda row: float("inf") if row.status_age_s is None else row.status_age_s)
    num_tokens = sum(row.hit_rate_tokens for row in rows)
    num_cached = sum((row.hit_rate or 0.0) * row.hit_rate_tokens for row in rows)
    return replace(
        latest,
        state=max((row.state for row in rows), key=_WORST_LAST.index),
        num_bookings=sum(row.num_bookings for row in rows),
        hit_rate=num_cached / num_tokens if num_tokens else None,
        hit_rate_tokens=num_tokens,
        is_cache_untold=any(row.is_cache_untold for row in rows) and not num_tokens,
        num_requests=sum(row.num_requests for row in rows),
        is_cache_aware=all(row.is_cache_aware for row in rows),
        is_home=any(row.is_home for row in rows),
    )


def _groups(views: Sequence[Overview]) -> list[GroupRow]:
    def join(rows: list[GroupRow]) -> GroupRow:
        told = [row.worker_to_blocks for row in rows if row.worker_to_blocks is not None]
        return replace(
            rows[0],
            requests_per_min=sum(row.requests_per_min for row in rows),
            worker_to_blocks=told[0] if told else None,
        )

    rows = _joined_rows(views, lambda view: view.groups, lambda row: (row.name, row.num_blocks), join)
    return sorted(rows, key=lambda row: -row.requests_per_min * row.num_blocks)[:SHOWN_GROUPS]


def _store(stores: Sequence[StoreHealth]) -> StoreHealth:
    pairs = sorted((name, value) for store in stores for name, value in store.counts.items())
    counts = {
        name: (max if name in _LARGEST else sum)(value for _, value in found)
        for name, found in groupby(pairs, key=lambda pair: pair[0])
    }
    return StoreHealth(
        is_resting=any(store.is_resting for store in stores),
        num_degraded=sum(store.num_degraded for store in stores),
        counts={name: counts[name] for store in stores for name in store.counts},
    )
