"""The router over fake engines, everything else real, in virtual time."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import tracemalloc
from contextlib import aclosing

import pytest

from router.answer_lengths import AnswerLengths
from router.requests import GenerateRequest, RequestTrace
from router.service import Router
from shared.directory.memory import MemoryDirectory
from shared.directory.mirrored import MirroredDirectory
from shared.errors import DirectoryUnavailable, InvalidRequest, NoWorker, Overloaded, WorkerLost
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling, WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.memory_store import MemoryFeed, MemoryStore
from tests.support.rack import SCHEME, Rack, Slot, ask, assert_no_leftovers, mirrored_rack, prompt, rack

SLOW = {"token_s": 0.005, "prefill_s_per_token": 0.001}


async def _busy_engine(workers: Rack) -> Slot:
    """Wait until some engine has a request, and say which."""
    async with asyncio.timeout(10.0):
        while True:
            for slot in workers.worker_to_slot.values():
                if slot.engine.num_live:
                    return slot
            await asyncio.sleep(0.001)


def test_second_request_with_a_prefix_goes_to_its_holder_and_is_served_from_its_cache() -> None:
    async def scenario() -> None:
        async with rack(4, **SLOW) as workers, workers.router() as router:
            first, first_trace = await ask(router, "a", prompt(1, 320, tail=1))
            await workers.settle()
            await asyncio.sleep(5.0)  # past every hint: only the directory can know
            second, trace = await ask(router, "b", prompt(1, 320, tail=2))
            assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (first_trace.worker, 320, 320)
            assert first == fake_tokens(prompt(1, 320, tail=1), 8)
            assert second == fake_tokens(prompt(1, 320, tail=2), 8)

    run_virtual(scenario())


def test_router_that_cannot_start_leaves_no_mirror_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with mirrored_rack(1) as workers:
            num_tasks = len(asyncio.all_tasks())

            async def broken_listing(directory: MirroredDirectory) -> object:
                raise KeyError("a fault of ours")

            monkeypatch.setattr(MirroredDirectory, "workers", broken_listing)
            with pytest.raises(KeyError):
                async with workers.router():
                    pass
            assert len(asyncio.all_tasks()) == num_tasks

    run_virtual(scenario())


@pytest.mark.parametrize(("num_requests", "num_computing"), [(4, 1), (8, 2), (16, 3)])
def test_cold_burst_of_one_prefix_is_computed_on_few_workers(num_requests: int, num_computing: int) -> None:
    async def scenario() -> None:
        async with rack(4, **SLOW, max_num_seqs=16) as workers, workers.router() as router:
            answers = await asyncio.gather(
                *(ask(router, f"r{tail}", prompt(1, 640, tail=tail)) for tail in range(num_requests))
            )
            assert len({trace.worker for _, trace in answers}) == num_computing
            assert [trace.matched_tokens for _, trace in answers].count(640) == num_requests - num_computing

    run_virtual(scenario())


def test_other_salt_never_matches() -> None:
    async def scenario() -> None:
        async with rack(1, **SLOW) as workers, workers.router() as router:
            await ask(router, "a", prompt(1, 320, tail=1), salt="tenant-a")
            await workers.settle()
            _, trace = await ask(router, "b", prompt(1, 320, tail=1), salt="tenant-b")
            assert (trace.matched_tokens, trace.cached_tokens) == (0, 0)

    run_virtual(scenario())


def test_held_requests_wait_for_their_holder_while_it_is_full() -> None:
    async def scenario() -> None:
        async with rack(2, **SLOW, max_num_seqs=2) as workers, workers.router() as router:
            _, warm = await ask(router, "warm", prompt(1, 1600, tail=0))
            answers = await asyncio.gather(*(ask(router, f"r{tail}", prompt(1, 1600, tail=tail)) for tail in range(8)))
            assert {trace.worker for _, trace in answers} == {warm.worker}
            assert max(slot.engine.num_submitted for slot in workers.worker_to_slot.values()) == 9

    run_virtual(scenario())


def test_different_prefixes_spread_over_the_fleet() -> None:
    async def scenario() -> None:
        async with rack(4, **SLOW, max_num_seqs=4) as workers, workers.router() as router:
            await asyncio.gather(*(ask(router, f"r{index}", prompt(index, 320, tail=0)) for index in range(16)))
            counts = [slot.engine.num_submitted for slot in workers.worker_to_slot.values()]
            assert sum(counts) == 16
            assert max(counts) <= 6

    run_virtual(scenario())


def test_worker_lost_before_the_first_token_costs_another_attempt() -> None:
    async def scenario() -> None:
        async with rack(2, token_s=0.005, prefill_s_per_token=0.01) as workers, workers.router() as router:
            asking = asyncio.create_task(ask(router, "a", prompt(1, 320, tail=1)))
            busy = await _busy_engine(workers)
            busy.engine.die()
            answer, trace = await asking
            assert answer == fake_tokens(prompt(1, 320, tail=1), 8)
            assert trace.failed_workers == [busy.info.worker]
            assert trace.worker != busy.info.worker
            workers.worker_to_slot.pop(busy.info.worker)

    run_virtual(scenario())


def test_client_error_is_not_tried_elsewhere() -> None:
    async def scenario() -> None:
        async with rack(2) as workers, workers.router() as router:
            with pytest.raises(InvalidRequest):
                await ask(router, "a", [1 << 20])
            assert sum(slot.engine.num_submitted for slot in workers.worker_to_slot.values()) == 0

    run_virtual(scenario())


def test_closing_the_answer_early_frees_the_engine() -> None:
    async def scenario() -> None:
        async with rack(1, token_s=0.01) as workers, workers.router() as router:
            request = GenerateRequest(RequestId("a"), pack_tokens(prompt(1, 64, 1)), Sampling(max_tokens=10_000))
            async with aclosing(router.generate(request, RequestTrace())) as generated:
                await anext(generated)
            await workers.settle()
            assert workers.worker_to_slot[WorkerId("w0")].engine.num_cancelled == 1

    run_virtual(scenario())


def test_cancel_while_held_leaves_nothing() -> None:
    async def scenario() -> None:
        async with rack(1, token_s=0.01, max_num_seqs=1) as workers, workers.router() as router:
            running = asyncio.create_task(ask(router, "a", prompt(1, 64, 1), max_tokens=100))
            await _busy_engine(workers)
            held = asyncio.create_task(ask(router, "b", prompt(1, 64, 2)))
            await asyncio.sleep(0.05)
            assert len(router.queue) == 1
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            assert len(router.queue) == 0
            await running

    run_virtual(scenario())


def test_full_queue_is_told_at_once_and_a_held_request_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        async with (
            rack(1, token_s=1.0, max_num_seqs=1) as workers,
            workers.router(max_held=1, queue_timeout_s=3.0) as router,
        ):
            running = asyncio.create_task(ask(router, "a", prompt(1, 64, 1), max_tokens=10))
            await _busy_engine(workers)
            held = asyncio.create_task(ask(router, "b", prompt(1, 64, 2)))
            await asyncio.sleep(0.5)
            with pytest.raises(Overloaded, match="1 requests are held already"):
                await ask(router, "c", prompt(1, 64, 3))
            with pytest.raises(Overloaded, match="within 3 s"):
                await held
            await running
            await workers.kill_worker("w0")
            with pytest.raises(NoWorker, match="none came within 3 s"):
                await ask(router, "d", prompt(1, 64, 4))

    run_virtual(scenario())


def test_new_life_of_a_worker_is_never_matched_with_the_old_ones_blocks() -> None:
    async def scenario() -> None:
        async with rack(1, **SLOW) as workers, workers.router() as router:
            await ask(router, "a", prompt(1, 320, tail=1))
            await workers.settle()
            await workers.stop_worker("w0")
            await workers.start_worker("w0")
            answer, trace = await ask(router, "b", prompt(1, 320, tail=2))
            assert (trace.matched_tokens, trace.cached_tokens) == (0, 0)
            assert answer == fake_tokens(prompt(1, 320, tail=2), 8)

    run_virtual(scenario())


def test_worker_with_other_keys_is_used_but_not_for_its_cache(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with rack(0, **SLOW) as workers:
            await workers.start_worker("w0", parity=b"another")
            async with workers.router() as router:
                await ask(router, "a", prompt(1, 320, tail=1))
                await workers.settle()
                _, trace = await ask(router, "b", prompt(1, 320, tail=2))
                assert (trace.matched_tokens, trace.cached_tokens) == (0, 320)

    run_virtual(scenario())
    assert "does not compute our block keys" in caplog.text


class _DeafDirectory(MemoryDirectory):
    """A directory that stops to answer routers."""

    is_deaf = False

    async def match(self, keys, workers):  # type: ignore[no-untyped-def]
        if self.is_deaf:
            raise DirectoryUnavailable("match: no answer")
        return await super().match(keys, workers)

    async def workers(self):  # type: ignore[no-untyped-def]
        if self.is_deaf:
            raise DirectoryUnavailable("workers: no answer")
        return await super().workers()


def test_without_the_directory_requests_are_still_answered_and_hints_still_work() -> None:
    async def scenario() -> None:
        directory = _DeafDirectory(SCHEME, asyncio.get_running_loop().time)
        async with rack(3, directory, **SLOW) as workers, workers.router() as router:
            directory.is_deaf = True
            await asyncio.sleep(10.0)
            answers = [await ask(router, f"r{tail}", prompt(1, 320, tail=tail)) for tail in range(4)]
            assert [answer for answer, _ in answers] == [fake_tokens(prompt(1, 320, tail), 8) for tail in range(4)]
            assert len({trace.worker for _, trace in answers}) == 1
            directory.is_deaf = False
            await ask(router, "again", prompt(2, 320, tail=0))

            metrics = router.render_metrics().decode()
            assert "kvroute_directory_degraded_total 4.0" in metrics
            assert 'kvroute_workers{state="ready"} 3.0' in metrics

    run_virtual(scenario())


def test_worker_whose_connection_is_lost_while_the_directory_is_away_is_connected_to_again() -> None:
    async def scenario() -> None:
        directory = _DeafDirectory(SCHEME, asyncio.get_running_loop().time)
        async with rack(2, directory) as workers, workers.router() as router:
            directory.is_deaf = True
            workers.worker_to_slot[WorkerId("w1")].engine.die()
            for member in list(router.fleet._members.values()):
                await member.client.close()
            await asyncio.sleep(10.0)
            assert router.fleet.state_to_count()["ready"] == 1
            answer, trace = await ask(router, "a", prompt(1, 320, tail=1))
            assert (answer, trace.worker) == (fake_tokens(prompt(1, 320, tail=1), 8), "w0")
            workers.worker_to_slot.pop(WorkerId("w1"))

    run_virtual(scenario())


def test_requests_of_an_outage_are_routed_by_the_mirror_and_counted() -> None:
    async def scenario() -> None:
        async with mirrored_rack(3, **SLOW) as workers, workers.router() as router:
            assert isinstance(router.directory, MirroredDirectory)
            _, warm = await ask(router, "warm", prompt(1, 320, tail=0))
            await asyncio.sleep(10.0)  # what was promised is no hint any more
            feed = router.directory._feed
            assert isinstance(feed, MemoryFeed)
            feed.is_down = True
            await asyncio.sleep(60.0)
            assert isinstance(workers.directory, MemoryStore)
            workers.directory.is_resting = True
            _, trace = await ask(router, "a", prompt(1, 320, tail=1))
            assert (trace.worker, trace.matched_tokens) == (warm.worker, 320)
            metrics = router.render_metrics().decode()
            assert "kvroute_directory_degraded_total 1.0" in metrics
            assert f"kvroute_mirror_entries {router.directory.num_entries}.0" in metrics
            assert "kvroute_mirror_stale_matches_total 1.0" in metrics
            assert "kvroute_mirror_loads_total 3.0" in metrics
            assert "kvroute_mirror_batches_behind 0.0" in metrics
            assert router.directory.num_entries >= 20

    run_virtual(scenario())


class _SlowDirectory(MemoryDirectory):
    """A directory whose every match takes its time."""

    async def match(self, keys, workers):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.015)
        return await super().match(keys, workers)


def test_slow_store_delays_each_request_by_its_own_match_only() -> None:
    async def scenario() -> None:
        directory = _SlowDirectory(SCHEME, asyncio.get_running_loop().time)
        async with rack(4, directory, token_s=0.001, max_num_seqs=64) as workers, workers.router() as router:
            started_s = asyncio.get_running_loop().time()
            await asyncio.gather(*(ask(router, f"r{index}", prompt(index, 64, 0)) for index in range(200)))
            assert asyncio.get_running_loop().time() - started_s < 0.5

    run_virtual(scenario())


def test_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    async def scenario() -> None:
        async with rack(1, **SLOW, num_blocks=64, max_num_seqs=8) as workers, workers.router() as router:
            is_over = False

            async def small_stream(stream: int) -> None:
                turn = 0
                while not is_over:
                    await ask(router, f"small-{stream}-{turn}", prompt(stream, 160, tail=turn))
                    turn += 1

            streams = [asyncio.create_task(small_stream(stream)) for stream in range(4)]
            await asyncio.sleep(1.0)
            async with asyncio.timeout(60.0):
                answer, _ = await ask(router, "large", prompt(9, 880, tail=0))
            assert answer == fake_tokens(prompt(9, 880, tail=0), 8)
            is_over = True
            await asyncio.gather(*streams)

    run_virtual(scenario())


def test_request_under_way_at_the_routers_close_ends_at_once() -> None:
    async def scenario() -> None:
        async with rack(1, token_s=0.1) as workers, workers.router() as router:
            asking = asyncio.create_task(ask(router, "a", prompt(1, 64, 1), max_tokens=1000))
            await _busy_engine(workers)
            await router.__aexit__(None, None, None)
            async with asyncio.timeout(5.0):
                with pytest.raises((NoWorker, WorkerLost)):
                    await asking

    run_virtual(scenario())


def test_fleet_without_any_worker_is_told_apart_from_a_busy_one() -> None:
    async def scenario() -> None:
        async with rack(0) as workers, workers.router(queue_timeout_s=3.0) as router:
            with pytest.raises(NoWorker, match="there is no worker, and none came within 3 s"):
                await ask(router, "a", prompt(1, 64, 1))

    run_virtual(scenario())


@pytest.mark.parametrize("policy", ["cost", "random", "round_robin", "least_load", "power_of_two", "prefix_hash"])
def test_every_policy_answers_everything(policy: str) -> None:
    async def scenario() -> None:
        async with rack(3, **SLOW, max_num_seqs=4) as workers, workers.router(policy) as router:
            prompts = [prompt(index % 5, 160, tail=index) for index in range(60)]
            answers = await asyncio.gather(*(ask(router, f"r{index}", ids) for index, ids in enumerate(prompts)))
            assert [answer for answer, _ in answers] == [fake_tokens(ids, 8) for ids in prompts]

    run_virtual(scenario())


def test_memory_is_flat_after_any_number_of_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """No booking, task, hint or queue slot is left after 1, 100 and 1,000 requests in flight."""
    # Full before it counts: so many requests do not fill one of the usual size.
    monkeypatch.setattr("router.queue.AnswerLengths", functools.partial(AnswerLengths, max_beginnings=500))

    async def burst(router: Router, num_requests: int, start: int) -> None:
        prompts = [prompt(index % 7, 64, tail=index) for index in range(start, start + num_requests)]
        await asyncio.gather(*(ask(router, f"r{start + i}", ids, max_tokens=2) for i, ids in enumerate(prompts)))

    async def scenario() -> None:
        async with rack(4, max_num_seqs=256, num_blocks=64) as workers, workers.router() as router:
            num_tasks = len(asyncio.all_tasks())
            sizes = []
            start = 0
            for num_requests in (1, 100, 1000, 1000, 1000, 1000):
                await burst(router, num_requests, start)
                start += num_requests
                await workers.settle()
                await asyncio.sleep(5.0)
                assert_no_leftovers(router)
                assert len(router.hints) == 0
                for slot in workers.worker_to_slot.values():
                    slot.engine.seen.clear()
                assert len(asyncio.all_tasks()) == num_tasks
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            # Caches of fixed size fill, tables grow in steps, and the process has others in it: one round may end
            # higher than the last. What a request left behind would show in each of them.
            growths = [after - before for before, after in itertools.pairwise(sizes[2:])]
            assert min(growths) < 32_000, sizes

    tracemalloc.start()
    try:
        run_virtual(scenario())
    finally:
        tracemalloc.stop()
