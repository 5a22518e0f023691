"""Workers that hang with their connections standing: what is still sent to them, and what becomes of what they have."""

from __future__ import annotations

import asyncio

from shared.transport.base import Timings
from shared.transport.pulse import Pulse
from shared.types import FinishReason, WorkerId
from shared.vtime import VirtualTimeLoop, run_virtual
from tests.support.fakes import fake_tokens
from tests.support.lines import lines_to
from tests.support.rack import ask, prompt
from tests.unit.test_failover import GREEDY, SEEDED, WHOLE, read, when

PULSE_S = Timings().pulse_s
SLOW = {"token_s": 0.5, "prefill_s_per_token": 0.1}
"""A prompt takes longer, and so does an answer, than it takes until a silent worker is given up."""


def test_a_silent_worker_gets_nothing_new_until_its_next_word() -> None:
    async def scenario() -> None:
        async with lines_to(2) as lines:
            await ask(lines.router, "warm", prompt(1, 320, tail=0))
            silent = next(worker for worker, slot in lines.workers.worker_to_slot.items() if slot.engine.num_submitted)
            lines.freeze(silent)
            await asyncio.sleep(0.9 * PULSE_S)
            assert set(lines.router.fleet.loads().workers) == {"w0", "w1"}
            await asyncio.sleep(0.2 * PULSE_S)
            assert lines.router.fleet.state_to_count() == {
                "ready": 1,
                "silent": 1,
                "away": 0,
                "draining": 0,
                "resting": 0,
                "suspected": 0,
            }
            answers = [await ask(lines.router, f"r{tail}", prompt(1, 320, tail)) for tail in range(1, 5)]
            assert {trace.worker for _, trace in answers} == {"w0", "w1"} - {silent}
            lines.thaw(silent)
            await when(lambda: set(lines.router.fleet.loads().workers) == {"w0", "w1"})

    run_virtual(scenario())


def test_where_all_are_silent_requests_are_sent_as_ever() -> None:
    async def scenario() -> None:
        async with lines_to(2) as lines:
            lines.freeze(*lines.worker_to_connect)
            await asyncio.sleep(3.1 * PULSE_S)
            asking = asyncio.create_task(ask(lines.router, "a", prompt(1, 64, tail=1)))
            await when(lambda: lines.router.fleet.num_bookings == 1)
            lines.thaw(*lines.worker_to_connect)
            answer, trace = await asking
            assert (answer, trace.failed_workers) == (fake_tokens(prompt(1, 64, tail=1), 8), [])

    run_virtual(scenario())


def test_a_request_without_a_token_leaves_a_worker_that_stays_silent() -> None:
    async def scenario() -> None:
        async with lines_to(2, **SLOW) as lines:
            asking = asyncio.create_task(read(lines.router, SEEDED))
            await when(lambda: any(slot.engine.num_live for slot in lines.workers.worker_to_slot.values()))
            silent = lines.busy()
            lines.freeze(silent)
            began_at_s = asyncio.get_running_loop().time()
            await when(lambda: lines.workers.worker_to_slot[silent].engine.num_cancelled == 1)
            assert asyncio.get_running_loop().time() - began_at_s <= 2 * PULSE_S + 0.01
            told = await asking
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert (told.trace.failed_workers, told.trace.num_attempts) == ([silent], 2)
            lines.thaw(silent)
            # Nothing is held against it.
            await when(lambda: lines.router.fleet.state_to_count()["ready"] == 2)

    run_virtual(scenario())


def test_an_answer_that_may_continue_leaves_a_worker_that_stays_silent_and_another_waits_for_it() -> None:
    async def scenario() -> None:
        async with lines_to(2, "round_robin", token_s=0.5) as lines:
            samplings = [GREEDY, GREEDY, SEEDED, SEEDED]
            began = asyncio.Semaphore(0)
            reading = [
                asyncio.create_task(read(lines.router, sampling, name=f"r{number}", after=lambda _: began.release()))
                for number, sampling in enumerate(samplings)
            ]
            for _ in samplings:
                await began.acquire()
            lines.freeze(WorkerId("w0"))
            await asyncio.sleep(4.0 * PULSE_S)
            lines.thaw(WorkerId("w0"))
            answers = await asyncio.gather(*reading)
            for told in answers:
                assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert [told.trace.worker for told in answers] == ["w1", "w1", "w0", "w1"]
            assert [told.trace.failed_workers for told in answers] == [["w0"], [], [], []]
            assert [told.trace.num_continuations for told in answers] == [1, 0, 0, 0]

    run_virtual(scenario())


def test_a_worker_whose_engine_is_out_of_touch_is_silent_and_what_waits_there_moves() -> None:
    async def scenario() -> None:
        async with lines_to(2, **SLOW) as lines:
            asking = asyncio.create_task(read(lines.router, SEEDED))
            await when(lambda: any(slot.engine.num_live for slot in lines.workers.worker_to_slot.values()))
            hanging = lines.busy()
            lines.workers.worker_to_slot[hanging].engine.is_in_touch = False
            began_at_s = asyncio.get_running_loop().time()
            await when(lambda: lines.router.fleet.state_to_count()["silent"] == 1)
            assert 0.9 * PULSE_S <= asyncio.get_running_loop().time() - began_at_s <= PULSE_S + 0.01
            told = await asking
            assert (told.token_ids, told.finishes, told.error) == (WHOLE, [FinishReason.LENGTH], None)
            assert (told.trace.failed_workers, told.trace.num_attempts) == ([hanging], 2)
            lines.workers.worker_to_slot[hanging].engine.is_in_touch = True
            await when(lambda: lines.router.fleet.state_to_count()["ready"] == 2)

    run_virtual(scenario())


def test_a_time_in_which_the_process_itself_stood_still_is_one_silence_at_most() -> None:
    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        told: list[int] = []
        pulse = Pulse(1.0, lambda: told.append(pulse.num_silences))
        loop._now_s += 100.0
        await asyncio.sleep(0.5)
        pulse.heard()
        await asyncio.sleep(0.9)
        assert pulse.num_silences == 0
        await asyncio.sleep(1.2)
        pulse.stop()
        await asyncio.sleep(5.0)
        return told

    loop = VirtualTimeLoop()
    try:
        assert loop.run_until_complete(scenario()) == [1, 1, 2]
    finally:
        loop.close()
