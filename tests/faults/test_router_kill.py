"""A router process that is killed without warning: its requests are freed, and those of others go on."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path

from shared.hashing import pack_tokens
from shared.transport.client import connect_worker
from shared.types import CacheScheme, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerInfo
from tests.support.fakes import FakeEngine, fake_tokens
from worker.host import WorkerHost

PROJECT = Path(__file__).parents[2]
SECRET = b"secret"
NUM_REQUESTS = 5


def worker_info(address: str) -> WorkerInfo:
    return WorkerInfo(
        WorkerId("w0"),
        Instance("1" * 32),
        address,
        CacheScheme("fake", 16),
        b"parity",
        1024,
        64,
        1 << 20,
        "fake",
        "lru",
    )


async def ask_for_ever(address: str) -> None:
    """The router to be killed: it says so once all its requests have tokens, and they would never end."""
    client = connect_worker(worker_info(address), RouterId("doomed"), SECRET, rng=random.Random(1))
    await client.connect()
    streams = [
        client.submit(RequestId(f"r{index}"), 1, pack_tokens([index]), Sampling(1 << 30))
        for index in range(NUM_REQUESTS)
    ]
    for stream in streams:
        await anext(stream)
    sys.stdout.write("busy\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_of_a_killed_router_are_freed_and_no_others(tmp_path: Path) -> None:
    engine = FakeEngine(token_s=0.01)
    host = WorkerHost(engine, await engine.start(), worker=WorkerId("w0"), instance=Instance("1" * 32), secret=SECRET)
    address = await host.listen(f"unix:{tmp_path}/w0.sock")
    client = connect_worker(worker_info(address), RouterId("other"), SECRET, rng=random.Random(2))
    await client.connect()
    doomed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.test_router_kill", address), cwd=PROJECT, stdout=asyncio.subprocess.PIPE
    )
    assert doomed.stdout is not None
    assert await doomed.stdout.readline() == b"busy\n"
    deltas = client.submit(RequestId("mine"), 1, pack_tokens([7]), Sampling(1 << 30))
    answer: list[int] = []
    async with asyncio.timeout(120.0):
        async for delta in deltas:
            answer += delta.token_ids
            if doomed.returncode is None and engine.num_live == NUM_REQUESTS + 1:
                doomed.kill()
                await doomed.wait()
            # Whatever becomes of the other router's, this one goes on until the engine has nothing else to do.
            if engine.num_live == 1 and engine.num_cancelled == NUM_REQUESTS:
                break
    assert tuple(answer) == fake_tokens([7], len(answer))
    assert (host.counts.num_expired, host.num_sessions, host.num_requests) == (1, 1, 1)
    await deltas.aclose()
    await until(lambda: engine.num_live == 0)
    await client.close()
    await host.close()


if __name__ == "__main__":
    asyncio.run(ask_for_ever(sys.argv[1]))
