"""The picture of a router in a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
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


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str | Text]], *, right: Sequence[str] = (), cut: str = ""
) -> Table:
    """A table that is as wide as it must be; where that is too wide, the column `cut` alone is cut."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for column, name in enumerate(head):
        widest = max(len(name), *(len(row[column]) for row in rows)) if rows else len(name)
        made.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if name == cut else widest,
        )
    for row in rows:
        made.add_row(*row)
    return made


def _workers(state: Mapping[str, Any]) -> Table:
    rows: list[Sequence[str | Text]] = [
        (
            worker["worker"],
            Text(
                worker["state"] if worker["is_cache_aware"] else f"{worker['state']}, not cache-aware",
                style="green" if worker["state"] in _GOOD_STATES else "bold yellow",
            ),
            _of(worker["num_running"], worker["max_num_seqs"]),
            _count(worker["num_waiting"]),
            _bar(worker["kv_blocks"], worker["kv_total_blocks"]),
            "not told" if worker["is_cache_untold"] else _share(worker["hit_rate"]),
            _count(worker["num_requests"]),
            _time(worker["status_age_s"]),
        )
        for worker in state["workers"]
    ]
    head = ("worker", "state", "running", "waiting", "KV blocks", "hit rate", "requests", "status")
    return _table(head, rows, right=("running", "waiting", "hit rate", "requests", "status"))


def _bar(blocks: Mapping[str, int] | None, num_blocks: int) -> Text:
    """Each kind by its letter, in proportion; what there is at all has one letter at least, while there is room."""
    text = Text()
    if blocks is None:
        return text.append("-")
    num_left = _BAR_CHARS
    for kind, mark, style in _POOL:
        num_chars = min(num_left, max(round(_BAR_CHARS * blocks[kind] / num_blocks), int(blocks[kind] > 0)))
        if kind == _POOL[-1][0]:
            num_chars = num_left
        text.append(mark * num_chars, style=style)
        num_left -= num_chars
    return text.append(f" {num_blocks - blocks['free']}/{num_blocks}")


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
