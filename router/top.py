"""The picture of a router in a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 110
_SHOWN_DECISIONS = 8
_SHOWN_ID_CHARS = 18
"""The end of a request's id, where ids differ."""
_BAR_CHARS = 24
_POOL = (
    ("pinned", "#", "magenta"),
    ("running", "=", "blue"),
    ("shared", "s", "cyan"),
    ("private", "p", "yellow"),
    ("free", ".", "bright_black"),
)
"""Kinds of blocks: a letter each, so that nobody needs to see colours."""
_GOOD_STATES = ("ready",)


def picture(state: Mapping[str, Any]) -> RenderableType:
    """An `Overview` as `to_json` gives it, as tables."""
    legend = "  ".join(f"{mark} {kind}" for kind, mark, _ in _POOL).replace("running", "in use")
    flags = [_flag(flag) for flag in state["flags"]]
    parts: list[RenderableType] = [_head(state), *flags, "", _workers(state), Text(legend, style="bright_black")]
    if len(state["routers"]) > 1:
        parts += ["", _routers(state)]
    if state["groups"]:
        parts += ["", _groups(state)]
    if state["decisions"]:
        parts += ["", _decisions(state)]
    if state["jobs"]:
        parts += ["", _jobs(state)]
    return Group(*parts)


def plain_text(state: Mapping[str, Any]) -> str:
    """The same without colours, of one width."""
    stream = io.StringIO()
    Console(file=stream, width=_PLAIN_WIDTH, color_system=None, highlight=False).print(picture(state))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _head(state: Mapping[str, Any]) -> Text:
    now = state["now"]
    store = "store does not answer" if state["store"]["is_resting"] else "store answers"
    text = Text()
    text.append(f"kvroute {state['version']}", style="bold")
    text.append(f"  {state['model']}  policy {state['policy']}  {_whose(state['routers'])}  {store}\n")
    text.append(
        f"{_figure(now['requests_per_s'])} req/s  {_figure(now['output_tokens_per_s'], 0)} tok/s  "
        f"TTFT p50 {_time(now['ttft_p50_s'])} p95 {_time(now['ttft_p95_s'])}  "
        f"ITL p50 {_time(now['itl_p50_s'])} p95 {_time(now['itl_p95_s'])}\n"
    )
    text.append(
        f"from cache {_share(now['cached_share'])} (matched {_share(now['matched_share'])}, "
        f"possible {_share(now['possible_share'])})  under way {state['num_under_way']}  held {state['num_held']}  "
        f"ended {state['num_requests']}  failovers {state['num_failovers']}"
    )
    return text


def _whose(routers: Sequence[Mapping[str, Any]]) -> str:
    return str(routers[0]["router"]) if len(routers) == 1 else f"{len(routers)} routers"


def _flag(flag: Mapping[str, str]) -> Text:
    return Text(f"! {flag['name']}: {flag['text']}", style="bold yellow")


class _Pool:
    """A worker's KV blocks: each kind by its letter, in proportion, and how many are in use of how many.

    The letters get what the number leaves of the width; what there is at all has one at least, while there is room.
    """

    def __init__(self, blocks: Mapping[str, int] | None, num_blocks: int) -> None:
        self._blocks = blocks
        self._num_blocks = num_blocks
        self._used = "-" if blocks is None else f"{num_blocks - blocks['free']:,}/{num_blocks:,}"

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = len(self._used) if self._blocks is None else _BAR_CHARS + 1 + len(self._used)
        return Measurement(len(self._used), widest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text(no_wrap=True, overflow="ellipsis")
        if self._blocks is not None:
            num_left = max(0, min(_BAR_CHARS, options.max_width - 1 - len(self._used)))
            shares = {kind: num_left * self._blocks[kind] / self._num_blocks for kind, _, _ in _POOL}
            for kind, mark, style in _POOL:
                num_chars = min(num_left, max(round(shares[kind]), int(self._blocks[kind] > 0)))
                if kind == _POOL[-1][0]:
                    num_chars = num_left
                text.append(mark * num_chars, style=style)
                num_left -= num_chars
            text.append(" " if text else "")
        yield text.append(self._used)


_Cell = str | Text | _Pool


def _table(head: Sequence[str], rows: Sequence[Sequence[_Cell]], *, right: Sequence[str] = (), cut: str = "") -> Table:
    """A table that is as wide as it must be; where that is too wide, the column `cut` gives way before all others."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in head:
        # Those that may be wrapped are narrowed first. Its cells are cut all the same.
        made.add_column(
            _cuttable(name),
            justify="right" if name in right else "left",
            no_wrap=name != cut,
            overflow="ellipsis",
        )
    for row in rows:
        made.add_row(*map(_cuttable, row))
    return made


def _cuttable(cell: _Cell) -> Text | _Pool:
    return Text(cell, no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell


def _workers(state: Mapping[str, Any]) -> Table:
    rows: list[Sequence[_Cell]] = [
        (
            worker["worker"],
            Text(_state(worker), style="green" if worker["state"] in _GOOD_STATES else "bold yellow"),
            _of(worker["num_running"], worker["max_num_seqs"]),
            _count(worker["num_waiting"]),
            _Pool(worker["kv_blocks"], worker["kv_total_blocks"]),
            "not told" if worker["is_cache_untold"] else _share(worker["hit_rate"]),
            _count(worker["num_requests"]),
            _time(worker["status_age_s"]),
        )
        for worker in state["workers"]
    ]
    head = ("worker", "state", "running", "waiting", "KV blocks", "hit rate", "requests", "status")
    return _table(head, rows, right=("running", "waiting", "hit rate", "requests", "status"), cut="KV blocks")


def _state(worker: Mapping[str, Any]) -> str:
    doubts = ["" if worker["is_cache_aware"] else "not cache-aware", "" if worker["tells_blocks"] else "hints only"]
    return ", ".join([worker["state"], *filter(None, doubts)])


def _routers(state: Mapping[str, Any]) -> Table:
    rows = [
        (
            router["router"],
            _figure(router["now"]["requests_per_s"]),
            _time(router["now"]["ttft_p50_s"]),
            _time(router["now"]["ttft_p95_s"]),
            _share(router["now"]["cached_share"]),
            _count(router["num_under_way"]),
            _count(router["num_held"]),
            _count(router["num_requests"]),
            _time(router["uptime_s"]),
        )
        for router in state["routers"]
    ]
    head = ("router", "req/s", "TTFT p50", "p95", "from cache", "under way", "held", "ended", "up")
    return _table(head, rows, right=head[1:])


def _groups(state: Mapping[str, Any]) -> Table:
    rows = [
        (
            group["name"],
            _count(group["num_tokens"]),
            _figure(group["requests_per_min"], 0),
            _holders(group["worker_to_blocks"], group["num_blocks"]),
        )
        for group in state["groups"]
    ]
    return _table(("hot prefix", "tokens", "req/min", "held by"), rows, right=("tokens", "req/min"), cut="held by")


def _holders(worker_to_blocks: Mapping[str, int] | None, num_blocks: int) -> str:
    if worker_to_blocks is None:
        return "unknown"
    most_first = sorted(worker_to_blocks.items(), key=lambda pair: -pair[1])
    return "  ".join(f"{worker} {_share(held / num_blocks)}" for worker, held in most_first) or "nobody"


def _decisions(state: Mapping[str, Any]) -> Table:
    rows = []
    for decision in state["decisions"][:_SHOWN_DECISIONS]:
        cached = decision["cached_tokens"]
        rows.append(
            (
                time.strftime("%H:%M:%S", time.localtime(decision["decided_at"])),
                decision["request"][-_SHOWN_ID_CHARS:],
                decision["worker"],
                "not told"
                if decision["is_cache_untold"]
                else _of(decision["matched_tokens"] if cached is None else cached, decision["num_prompt_tokens"]),
                _time(decision["waited_s"]),
                _time(decision["ttft_s"]),
                decision["why"],
            )
        )
    head = ("time", "request", "worker", "from cache", "held", "TTFT", "why")
    return _table(head, rows, right=("from cache", "held", "TTFT"), cut="why")


def _jobs(state: Mapping[str, Any]) -> Table:
    rows = [
        (job["id"], job["state"], _of(job["num_done"], job["num_rows"]), _count(job["num_failed"]))
        for job in state["jobs"]
    ]
    return _table(("batch job", "state", "rows", "failed"), rows, right=("rows", "failed"), cut="batch job")


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _of(value: int | None, most: int) -> str:
    return "-" if value is None else f"{value:,}/{most:,}"


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    return f"{1e3 * value_s:.0f} ms" if value_s < 1.0 else f"{value_s:.3g} s"
