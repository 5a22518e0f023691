"""What every way between a router and a worker must do with a submit that says how much may be before it, with a worker
that falls silent, and with an answer that is given up."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from shared.errors import Outpaced, WorkerLost, WorkerSilent
from shared.hashing import pack_tokens
from shared.transport.base import DeltaStream, WorkerClient
from shared.types import RequestId, Sampling
from tests.support.fakes import FakeEngine, fake_tokens
from tests.support.transport import BRISK, KINDS, Kind, collect, running, submit, tokens_of, until

PROMPT = list(range(100, 150))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def submit_within(
    client: WorkerClient, request: str, max_queued_tokens: int | None, *, first: int = 1, attempt: int = 0
) -> DeltaStream:
    """Of a prompt that has nothing in common with those that begin otherwise."""
    return client.submit(
        RequestId(request),
        attempt,
        pack_tokens([first, *PROMPT]),
        Sampling(max_tokens=20),
        max_queued_tokens=max_queued_tokens,
    )


async def test_a_worker_with_too_much_before_a_submit_refuses_it_and_tells_its_load(kind: Kind, tmp_path: Path) -> None:
    timings = dataclasses.replace(BRISK, status_interval_s=3600.0)
    async with running(kind, tmp_path, engine=FakeEngine(prefill_s_per_token=60.0), timings=timings) as rig:
        first, _ = await rig.connected(router="first")
        late, _ = await rig.connected(router="late")
        await until(lambda: late.status is not None)
        assert late.status is not None
        assert late.status.queued_prefill_tokens == 0
        running_one = submit(first, "a", PROMPT, 20)
        await until(lambda: rig.engine.num_live == 1)
        with pytest.raises(Outpaced, match="50 tokens are to be prefilled before the request, which allows 49"):
            await collect(submit_within(late, "a", 49))
        # The load comes with the refusal, and is that of after it.
        assert (late.status.queued_prefill_tokens, late.status.num_running + late.status.num_waiting) == (50, 1)
        assert (late.acknowledged_submit, late.num_open) == (1, 0)
        assert (rig.engine.num_submitted, rig.host.num_requests) == (1, 1)
        taken = [submit_within(late, "a", 50, attempt=1), submit_within(late, "b", None)]
        await until(lambda: rig.engine.num_live == 3)
        for stream in (running_one, *taken):
            await stream.aclose()


async def test_of_submits_that_arrive_together_one_is_taken_and_with_it_those_of_the_same_prompt(
    kind: Kind, tmp_path: Path
) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(prefill_s_per_token=60.0)) as rig:
        clients = [(await rig.connected(router=f"r{number}"))[0] for number in range(4)]
        streams = [submit_within(client, "a", 0, first=number % 2) for number, client in enumerate(clients)]
        reading = [asyncio.create_task(collect(stream)) for stream in streams]
        await until(lambda: rig.engine.num_live == 2 and sum(task.done() for task in reading) == 2)
        late = [number for number, task in enumerate(reading) if task.done()]
        assert late in ([0, 2], [1, 3])
        assert [type(reading[number].exception()) for number in late] == [Outpaced] * 2
        # What both have in common is computed once.
        assert rig.host.status().queued_prefill_tokens == 1 + len(PROMPT)
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)


async def test_a_worker_is_silent_while_its_statuses_stay_away_and_no_longer(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, timings=dataclasses.replace(BRISK, num_missed_statuses=5)) as rig:
        changes: list[int] = []
        client, connect = rig.client(on_change=lambda: changes.append(client.num_silences))
        await client.connect()
        connect.channel.stall()
        await until(lambda: client.num_silences >= 2)
        assert {1, 2} <= set(changes)
        connect.channel.flow()
        await until(lambda: client.num_silences == 0)
        assert (client.is_connected, client.num_reconnects) == (True, 0)
        connect.cut()
        await until(lambda: client.num_reconnects == 1)


async def test_a_stream_that_is_given_up_tells_its_reader_why_and_frees_the_engine(kind: Kind, tmp_path: Path) -> None:
    async with running(kind, tmp_path, engine=FakeEngine(token_s=0.002)) as rig:
        client, _ = await rig.connected()
        stream = submit(client, "a", PROMPT, 1_000_000)
        await anext(stream)
        stream.give_up(WorkerSilent("enough"))
        with pytest.raises(WorkerLost, match="enough"):
            await collect(stream)
        await stream.aclose()
        assert await collect(stream) == []
        await until(lambda: client.num_open == 0)
        assert (rig.engine.num_live, rig.engine.num_cancelled) == (0, 1)
        whole = submit(client, "b", PROMPT, 20)
        await until(lambda: client.num_open == 0)
        whole.give_up(WorkerSilent("too late"))
        assert tokens_of(await collect(whole)) == fake_tokens(PROMPT, 20)
