"""What `kvroute replay` does from its arguments to its results: progress, table, JSON and picture."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from tqdm import tqdm

from router import launch, replay
from router.openai import ParsedRequest
from router.replay_plot import draw, require_plot
from router.replay_report import report_json, report_text
from router.serving import Say
from router.simulation import Arrival
from router.tokenizer import Tokenizer
from router.traces import Tokenise
from router.workload import Workload
from shared.config import Settings


class _Stopped(Exception):
    """The command was interrupted. Nobody sees it: the command has ended by then."""


async def run_replay(settings: Settings, own: Mapping[str, Any], say: Say, show: Callable[[str], None]) -> None:
    """Replay a trace as the arguments say and show the results.

    Raises:
        ConfigError: an argument or the trace is at fault; nothing was simulated.
        OutputError: the picture cannot be written; the figures have been shown.
    """
    options = replay.read_options(own)
    replay.policy_texts(options.policies)
    if options.plot is not None:
        require_plot(options.plot)
    loop, stop = asyncio.get_running_loop(), threading.Event()

    @cache
    def load_tokenizer() -> Tokenizer:
        preparing = launch.prepare_model_folder(settings, say)
        return Tokenizer(asyncio.run_coroutine_threadsafe(preparing, loop).result())

    def watch(name: str, workload: Workload) -> Iterator[Arrival]:
        # Not shown where stderr is no terminal.
        for arrival in tqdm(workload, desc=name, unit="req", disable=None, file=sys.stderr):
            if stop.is_set():
                raise _Stopped
            yield arrival

    def work() -> None:
        prepared = replay.prepare(options, settings, tokenise_with(load_tokenizer) if settings.model else None, watch)
        say(f"simulated, not measured: {prepared.text()}")
        facts = {"trace": options.trace, "command": own["command_line"], **prepared.facts()}
        runs = []
        for run in replay.run_policies(prepared, watch, loop.time):
            runs.append(run)
            say(_speed(run))
            if own["json"]:
                show(report_json(run.report, facts))
        if not own["json"]:
            show(report_text([run.report for run in runs]))
        if options.plot is not None:
            draw(options.plot, runs, prepared.slo, prepared.text())

    try:
        # The simulation brings an event loop of its own, which needs a thread of its own.
        await asyncio.to_thread(work)
    finally:
        # Of an interrupted command the thread ends at the next arrival.
        stop.set()


def tokenise_with(load: Callable[[], Tokenizer]) -> Tokenise:
    """Token ids of requests as workers with this tokenizer get them. Few traces need one, so it is loaded for those."""

    def tokenise(parsed: ParsedRequest) -> Sequence[int]:
        tokenizer = load()
        if parsed.messages is not None:
            return tokenizer.render_chat(parsed.messages)
        if isinstance(parsed.prompt, str):
            return tokenizer.encode(parsed.prompt)
        return tokenizer.check_token_ids(parsed.prompt or ())

    return tokenise


def _speed(run: replay.PolicyRun) -> str:
    simulated_s = run.report.makespan_s
    return (
        f"{run.report.policy}: {simulated_s:,.1f} s simulated in {run.wall_s:,.1f} s, "
        f"{simulated_s / max(run.wall_s, 1e-9):,.0f} times as fast"
    )
