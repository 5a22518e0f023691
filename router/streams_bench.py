"""Measures many streams at once over simulated workers in real time: how late what clients read is, what the router
takes for it, and how soon everything is free again after clients that left.

The steps of the workers and the loops of the clients run late, too, on a machine that is busy, and that is in the
figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from router.http_bench import MODEL, Rig, chat_body
from router.tokenizer import Tokenizer
from shared.config import load_settings
from worker.engines.demo_model import prepare_model

_SEED = 0
_STEP_S = 0.05
_NUM_LEAVERS = 30
_POLL_S = 0.005
_PATIENCE_S = 30.0


async def measure(
    say: Callable[[str], None], *, num_streams: int = 1000, length_s: float = 60.0, step_s: float = _STEP_S
) -> dict[str, float]:
    """All figures by name."""
    folder = await asyncio.to_thread(prepare_model, MODEL, load_settings(flags={}, environment={}).model_cache_dir)
    tokenizer = await asyncio.to_thread(Tokenizer, folder)
    rng = random.Random(_SEED)
    figures = {"seed": float(_SEED), "num_streams": float(num_streams), "length_s": length_s, "step_s": step_s}
    with tempfile.TemporaryDirectory(prefix="kvroute-") as name:
        async with Rig(Path(name), tokenizer).running(step_s=step_s, engine="simulator") as rig:
            say(f"{num_streams} streams of one token each {step_s:g} s, for {length_s:g} s")
            figures |= await _stream(rig, Path(name), rng, num_streams, round(length_s / step_s), step_s)
            for when, num_tokens in (("before_first", 0), ("at_first", 1), ("after_first", 5)):
                say(f"{_NUM_LEAVERS} clients that leave {when.replace('_', ' ')} token")
                figures[f"freed_ms_{when}_token"] = await _leave(rig, rng, num_tokens)
    return figures


async def _stream(
    rig: Rig, folder: Path, rng: random.Random, num_streams: int, num_tokens: int, step_s: float
) -> dict[str, float]:
    bodies = [chat_body(rng, [], "short", is_streamed=True, num_tokens=num_tokens) for _ in range(num_streams)]
    path = folder / "streams"
    path.write_bytes(b"\n".join(bodies))
    pipe = asyncio.subprocess.PIPE
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.stream_load", str(rig.port), str(path), str(step_s)), stdin=pipe, stdout=pipe
    )
    assert clients.stdout is not None
    assert clients.stdin is not None
    assert await clients.stdout.readline() == b"ready\n"
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    clients.stdin.write(b"\n")
    reading = asyncio.create_task(clients.stdout.readline())
    most_bytes, others_cpu_s, others_began_s = before_bytes, 0.0, _cpu_s_of_others(process)
    while not reading.done():
        await asyncio.wait({reading}, timeout=1.0)
        most_bytes = max(most_bytes, process.memory_info().rss)
        others_cpu_s = max(others_cpu_s, _cpu_s_of_others(process) - others_began_s)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    told: dict[str, float] = json.loads(await reading)
    await clients.wait()
    return {
        **{key: value for key, value in told.items() if key != "wall_s"},
        "router_cpu_share": cpu_s / wall_s,
        "router_cpu_us_per_chunk": 1e6 * cpu_s / max(1.0, told["num_chunks"]),
        "workers_and_clients_cpu_share": others_cpu_s / wall_s,
        "router_memory_mb": most_bytes / 1e6,
        "router_memory_kb_per_stream": (most_bytes - before_bytes) / 1e3 / num_streams,
        "load_average": psutil.getloadavg()[0],
    }


def _cpu_s_of_others(process: psutil.Process) -> float:
    """Of the processes with workers and clients, as far as they live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = [child.cpu_times() for child in process.children()]
        return float(sum(time.user + time.system for time in times))
    return 0.0


async def _leave(rig: Rig, rng: random.Random, num_tokens: int) -> float:
    """Milliseconds from the moment that clients left until router, front and workers have nothing of theirs."""

    async def ask() -> asyncio.StreamWriter:
        body = chat_body(rng, [], "short", is_streamed=True, num_tokens=2000)
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        return writer

    metrics = rig.router.metrics
    num_tokens_before = metrics.num_output_tokens
    async with asyncio.timeout(_PATIENCE_S):
        writers = await asyncio.gather(*(ask() for _ in range(_NUM_LEAVERS)))
        await _until(lambda: rig.front.num_under_way == _NUM_LEAVERS)
        await _until(lambda: metrics.num_output_tokens - num_tokens_before >= num_tokens * _NUM_LEAVERS)
        for writer in writers:
            writer.transport.abort()
        left_s = time.perf_counter()
        await _until(lambda: _is_free(rig))
    return 1e3 * (time.perf_counter() - left_s)


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - of what is asked, nobody tells
        await asyncio.sleep(_POLL_S)


def _is_free(rig: Rig) -> bool:
    statuses = [member.status for member in rig.router.fleet.members()]
    is_idle = all(status is not None and not status.num_running + status.num_waiting for status in statuses)
    return is_idle and not rig.router.fleet.num_bookings and not len(rig.router.queue) and not rig.front.num_under_way
