"""Faults that routers of this kind have had, each with its neighbours, against a whole router in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from router.requests import RequestTrace
from router.service import Router
from router.tokenizer import Tokenizer
from shared.errors import (
    ConfigError,
    ContextTooLong,
    EngineError,
    InvalidRequest,
    KvrouteError,
    Overloaded,
    WorkerLost,
)
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import VOCABULARY, fake_tokens
from tests.support.rack import SCHEME, Rack, Slot, ask, mirrored_rack, prompt, rack
from tests.support.tokenizers import write_model_folder
from worker.engines.base import BlockChange
from worker.engines.vllm_events import EventTranslator

W0, W1, W2, W3 = (WorkerId(f"w{index}") for index in range(4))
REAL = {"token_s": 0.01, "decode_s_per_seq": 0.0005, "prefill_s_per_token": 0.0002, "is_contended": True}
"""An engine whose prefills take turns and whose steps grow with what runs, as real ones do."""


OpenRack = Callable[..., AbstractAsyncContextManager[Rack]]
over_both = pytest.mark.parametrize("rack", [rack, mirrored_rack], ids=["memory", "mirrored"])
"""Routers that ask the directory itself, and routers that match from a mirror of it."""


def keys_of(token_ids: list[int]) -> list[BlockKey]:
    return block_keys(pack_tokens(token_ids), SCHEME.block_size_tokens, root_key(SCHEME))


async def warm(workers: Rack, *names: WorkerId, token_ids: list[int]) -> None:
    """Have each of the named workers compute a prompt, and wait until every status tells that they are idle again."""
    for name in names:
        async with workers.router(only=frozenset({name})) as router:
            await ask(router, f"warm-{name}", token_ids, max_tokens=1)
    await workers.settle()
    await asyncio.sleep(0.2)


def num_requests(router: Router) -> dict[WorkerId, int]:
    loads = router.fleet.loads()
    return dict(zip(loads.workers, loads.num_requests.tolist(), strict=True))


async def ask_all(
    router: Router, prompts: list[list[int]], name: str = "r", max_tokens: int = 8
) -> list[tuple[tuple[int, ...], RequestTrace]]:
    asking = (ask(router, f"{name}{index}", ids, max_tokens) for index, ids in enumerate(prompts))
    return await asyncio.gather(*asking)


@over_both
class TestAllCleared:
    """G1."""

    def test_worker_that_cleared_its_cache_is_not_credited_and_still_routed_to(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, W1, token_ids=prompt(1, 160, 0))
                await workers.worker_to_slot[W0].engine.reset_cache()
                await workers.settle()
                _, trace = await ask(router, "a", prompt(1, 160, 1))
                assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (W1, 160, 160)
                assert set(num_requests(router)) == {W0, W1}
                await asyncio.sleep(5.0)
                await workers.stop_worker(W1)
                _, trace = await ask(router, "b", prompt(1, 160, 2))
                assert (trace.worker, trace.matched_tokens, trace.cached_tokens) == (W0, 0, 0)

        run_virtual(scenario())

    def test_lookups_do_not_stall_while_a_worker_clears(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W1, token_ids=prompt(1, 160, 0))
                asked = [asyncio.create_task(ask(router, f"r{index}", prompt(1, 160, index))) for index in range(5)]
                for _ in range(50):
                    await workers.worker_to_slot[W0].engine.reset_cache()
                    await asyncio.sleep(0.001)
                traces = [trace for _, trace in await asyncio.gather(*asked)]
                assert {trace.worker for trace in traces} == {W1}
                assert all(trace.bound_at_s is not None for trace in traces)
                assert max((trace.bound_at_s or 0.0) - trace.received_at_s for trace in traces) < 0.02

        run_virtual(scenario())


@over_both
class TestLongestHolder:
    """G2."""

    def test_longest_live_holder_gets_the_request(self, rack: OpenRack, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario() -> None:
            async with rack(4, **REAL) as workers:
                whole = prompt(1, 160, 0, num_tail_tokens=1)
                await warm(workers, W1, token_ids=whole[:48])
                await warm(workers, W2, W3, token_ids=whole[:144])
                async with workers.router() as router:
                    await workers.stop_worker(W3)
                    _, trace = await ask(router, "a", whole)
                    assert (trace.worker, trace.matched_tokens, trace.failed_workers) == (W2, 144, [])

        run_virtual(scenario())
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []

    def test_listed_holder_that_cannot_be_reached_is_no_error(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(3, **REAL) as workers:
                whole = prompt(1, 160, 0, num_tail_tokens=1)
                await warm(workers, W1, token_ids=whole[:48])
                await warm(workers, W2, token_ids=whole)
                # Its host is gone while its lease still stands, as after a crash.
                await workers.worker_to_slot[W2].host.close()
                async with workers.router() as router:
                    _, trace = await ask(router, "a", whole)
                    assert (trace.worker, trace.matched_tokens, trace.failed_workers) == (W1, 48, [])

        run_virtual(scenario())

    @pytest.mark.parametrize("num_held_blocks", [1, 5, 9, 10])
    def test_one_more_block_decides_between_equals(self, rack: OpenRack, num_held_blocks: int) -> None:
        async def scenario() -> None:
            async with rack(3, **REAL) as workers, workers.router() as router:
                whole = prompt(1, 176, 0, num_tail_tokens=1)
                await warm(workers, W0, W2, token_ids=whole[: 16 * num_held_blocks])
                await warm(workers, W1, token_ids=whole[: 16 * (num_held_blocks + 1)])
                _, trace = await ask(router, "a", whole)
                assert (trace.worker, trace.matched_tokens) == (W1, 16 * (num_held_blocks + 1))

        run_virtual(scenario())


@over_both
class TestOtherBlockSize:
    """G3."""

    def test_worker_of_another_block_size_is_named_and_used_without_its_cache(
        self, rack: OpenRack, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario() -> None:
            async with rack(1, **REAL) as workers:
                await workers.start_worker("w1", parity=b"blocks of 64 tokens")
                async with workers.router() as router:
                    await warm(workers, W0, W1, token_ids=prompt(1, 160, 0))
                    _, trace = await ask(router, "a", prompt(1, 160, 1))
                    assert (trace.worker, trace.matched_tokens) == (W0, 160)
                    await workers.stop_worker(W0)
                    answer, trace = await ask(router, "b", prompt(1, 160, 2))
                    assert (trace.worker, trace.matched_tokens) == (W1, 0)
                    assert answer == fake_tokens(prompt(1, 160, 2), 8)

        run_virtual(scenario())
        assert "worker w1 does not compute our block keys" in caplog.text

    @pytest.mark.parametrize("block_size_tokens", [64, 8])
    def test_events_of_another_block_size_than_announced_are_found_with_the_first(
        self, rack: OpenRack, block_size_tokens: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, W1, token_ids=prompt(1, 160, 0))
                slot, translator = workers.worker_to_slot[W1], EventTranslator(SCHEME)
                tokens = prompt(1, 2 * block_size_tokens, 0)[: 2 * block_size_tokens]
                event = {
                    "type": "BlockStored",
                    "block_hashes": [1, 2],
                    "parent_block_hash": None,
                    "token_ids": tokens,
                    "block_size": block_size_tokens,
                }
                slot.publisher.on_blocks(translator.apply([event]))
                slot.engine.is_cache_aware = translator.refusal is None
                assert translator.refusal == f"engine's blocks have {block_size_tokens} tokens, announced were 16"
                await workers.settle()
                await asyncio.sleep(2.5)  # a status, and the router's next look at its workers
                assert 'kvroute_worker_cache_unaware{worker="w1"} 1.0' in router.render_metrics().decode()
                _, trace = await ask(router, "a", prompt(1, 160, 1))
                assert (trace.worker, trace.matched_tokens) == (W0, 160)
                await workers.stop_worker(W0)
                for number in range(2):  # nor is it expected to hold what was just sent there
                    answer, trace = await ask(router, f"b{number}", prompt(1, 160, 2))
                    assert (trace.worker, trace.matched_tokens) == (W1, 0)
                    assert answer == fake_tokens(prompt(1, 160, 2), 8)

        run_virtual(scenario())
        told = [record.getMessage() for record in caplog.records if "w1" in record.getMessage()]
        assert [line for line in told if "cache" in line] == [
            "worker w1 has other blocks than it announced (its own log says which): it is used, but not for its cache"
        ]


class TestMissWhileTheEmptiestCacheIsBusy:
    """G5."""

    @pytest.mark.parametrize("max_num_seqs", [48, 1024])
    def test_unseen_prompts_go_to_the_idle_worker_however_much_it_has_cached(self, max_num_seqs: int) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL, max_num_seqs=max_num_seqs) as workers:
                for prefix in range(8):
                    await warm(workers, W1, token_ids=prompt(prefix, 320, 0))
                async with workers.router(only=frozenset({W0})) as other, workers.router() as router:
                    busy = asyncio.create_task(ask_all(other, [prompt(50, 64, t) for t in range(40)], max_tokens=300))
                    await asyncio.sleep(1.0)
                    assert num_requests(router) == {W0: 40, W1: 0}
                    answers = await ask_all(router, [prompt(100 + index, 320, 0) for index in range(10)])
                    assert Counter(trace.worker for _, trace in answers) == {W1: 10}
                    assert not busy.done()
                    await busy

        run_virtual(scenario())


class _Refusing:
    """Makes a worker's host answer submits with an error for a while."""

    def __init__(self, slot: Slot) -> None:
        self._host = slot.host
        self._check_room = slot.host._check_room
        self.num_refused = 0

    def refuse(self, error: KvrouteError) -> None:
        def refuse(session: object) -> None:
            self.num_refused += 1
            raise error

        self._host._check_room = refuse  # type: ignore[method-assign]

    def heal(self) -> None:
        self._host._check_room = self._check_room  # type: ignore[method-assign]


class TestRefusalsAndBreaks:
    """G6."""

    def test_client_errors_never_keep_a_worker_from_requests(self) -> None:
        async def scenario() -> None:
            async with rack(1, **REAL, max_model_len_tokens=512) as workers, workers.router() as router:
                for index in range(10):
                    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                        await ask(router, f"bad{index}", [VOCABULARY, *prompt(1, 160, index)])
                    with pytest.raises(ContextTooLong, match="no worker's context is longer than 512 tokens"):
                        await ask(router, f"long{index}", prompt(1, 600, index))
                _, trace = await ask(router, "good", prompt(1, 160, 0))
                assert trace.bound_at_s == pytest.approx(trace.received_at_s, abs=1e-6)

        run_virtual(scenario())

    def test_refusals_busy_answers_an_answer_and_breaks_in_a_row(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                for prefix in range(20):
                    await warm(workers, W0, token_ids=prompt(prefix, 320, 0))
                refusing = _Refusing(workers.worker_to_slot[W0])
                for prefix in range(10):
                    with pytest.raises(InvalidRequest):
                        await ask(router, f"bad{prefix}", [*prompt(prefix, 320, 1), VOCABULARY])
                assert set(num_requests(router)) == {W0, W1}
                refusing.refuse(Overloaded("queue full", retry_after_s=0.2))
                for prefix in range(10):
                    _, trace = await ask(router, f"busy{prefix}", prompt(prefix, 320, 1))
                    assert (trace.failed_workers, trace.worker) == ([W0], W1)
                    assert set(num_requests(router)) == {W1}
                    await asyncio.sleep(0.3)
                    assert set(num_requests(router)) == {W0, W1}
                refusing.heal()
                _, trace = await ask(router, "good", prompt(10, 320, 1))
                assert (trace.worker, trace.matched_tokens, trace.failed_workers) == (W0, 320, [])
                refusing.refuse(WorkerLost("the connection broke"))
                for prefix in range(11, 16):
                    assert set(num_requests(router)) == {W0, W1}
                    _, trace = await ask(router, f"broken{prefix}", prompt(prefix, 320, 1))
                    assert (trace.failed_workers, trace.worker) == ([W0], W1)
                before = refusing.num_refused
                assert set(num_requests(router)) == {W1}
                _, trace = await ask(router, "open", prompt(16, 320, 1))
                assert (trace.worker, trace.failed_workers) == (W1, [])
                assert refusing.num_refused == before

        run_virtual(scenario())
        assert caplog.text.count("failed 5 requests in a row") == 1

    @pytest.mark.parametrize(("retry_after_s", "rest_s"), [(0.3, 0.3), (3.0, 3.0), (None, 1.0), (600.0, 30.0)])
    def test_busy_worker_rests_for_the_time_it_names_and_is_tried_again(
        self, retry_after_s: float | None, rest_s: float
    ) -> None:
        async def scenario() -> None:
            async with rack(1, **REAL) as workers, workers.router() as router:
                refusing = _Refusing(workers.worker_to_slot[W0])
                refusing.refuse(Overloaded("queue full", retry_after_s=retry_after_s))
                loop = asyncio.get_running_loop()
                started_at_s = loop.time()
                asking = asyncio.create_task(ask(router, "a", prompt(1, 160, 0)))
                await asyncio.sleep(0.05)
                refusing.heal()
                _, trace = await asking
                assert trace.failed_workers == [W0]
                assert trace.bound_at_s == pytest.approx(started_at_s + rest_s, abs=0.02)

        run_virtual(scenario())

    def test_ten_busy_answers_do_not_make_a_worker_suspect(self) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, token_ids=prompt(1, 320, 0))
                refusing = _Refusing(workers.worker_to_slot[W0])
                refusing.refuse(Overloaded("queue full", retry_after_s=0.5))
                answers = await ask_all(router, [prompt(1, 320, tail) for tail in range(1, 11)])
                assert {trace.worker for _, trace in answers} == {W1}
                assert refusing.num_refused >= 1
                refusing.heal()
                await asyncio.sleep(0.6)
                assert set(num_requests(router)) == {W0, W1}
                _, trace = await ask(router, "good", prompt(1, 320, 20))
                assert trace.failed_workers == []

        run_virtual(scenario())

    def test_engine_that_fails_five_in_a_row_gets_a_probe_and_no_traffic_until_it_is_well(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, token_ids=prompt(1, 320, 0))
                slot = workers.worker_to_slot[W0]
                refusing = _Refusing(slot)
                refusing.refuse(EngineError("out of memory"))
                traces = [(await ask(router, f"r{index}", prompt(1, 320, index + 1)))[1] for index in range(20)]
                # Affinity asks for it until it is open; nobody is failed by it after that.
                assert [len(trace.failed_workers) for trace in traces].count(1) <= 5
                before = slot.engine.num_submitted
                while W0 in num_requests(router):
                    await asyncio.sleep(0.1)
                    _, trace = await ask(router, f"more{asyncio.get_running_loop().time()}", prompt(1, 320, 99))
                    if trace.failed_workers:
                        continue
                    if refusing.num_refused >= 5:
                        break
                num_before_rest = refusing.num_refused
                for index in range(10):
                    _, trace = await ask(router, f"open{index}", prompt(1, 320, 200 + index))
                    assert (trace.worker, trace.failed_workers) == (W1, [])
                await asyncio.sleep(8.0)
                assert W0 not in num_requests(router)
                # Pauses of 1, 2 and 4 s: a few probes, each of one token, and no request.
                assert 1 <= refusing.num_refused - num_before_rest <= 4
                assert slot.engine.num_submitted == before
                refusing.heal()
                await asyncio.sleep(20.0)
                assert slot.engine.num_submitted == before + 1
                assert [len(seen.token_ids) for seen in slot.engine.seen[-1:]] == [1]
                assert set(num_requests(router)) == {W0, W1}

        run_virtual(scenario())
        assert caplog.text.count("failed 5 requests in a row") == 1
        assert caplog.text.count("worker w0 answers again") == 1

    def test_broken_connections_open_the_breaker_and_affinity_does_not_pick_the_worker(self) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, token_ids=prompt(1, 320, 0))
                refusing = _Refusing(workers.worker_to_slot[W0])
                refusing.refuse(WorkerLost("the connection broke"))
                await ask_all(router, [prompt(1, 320, tail) for tail in range(1, 7)])
                assert set(num_requests(router)) == {W1}
                _, trace = await ask(router, "open", prompt(1, 320, 50))
                assert (trace.worker, trace.failed_workers) == (W1, [])
                refusing.heal()
                await asyncio.sleep(3.0)
                assert set(num_requests(router)) == {W0, W1}

        run_virtual(scenario())

    def test_failures_with_answers_in_between_do_not_add_up(self) -> None:
        async def scenario() -> None:
            async with rack(1, **REAL) as workers, workers.router(max_attempts=1) as router:
                refusing = _Refusing(workers.worker_to_slot[W0])
                for index in range(12):
                    refusing.refuse(EngineError("this one only"))
                    with pytest.raises(EngineError):
                        await ask(router, f"bad{index}", prompt(1, 32, index))
                    refusing.heal()
                    if index % 4 == 3:
                        await ask(router, f"good{index}", prompt(1, 32, index))
                assert set(num_requests(router)) == {W0}

        run_virtual(scenario())

    def test_new_life_of_a_suspect_worker_starts_with_a_clean_name(self) -> None:
        async def scenario() -> None:
            async with rack(1, **REAL) as workers, workers.router(max_attempts=1) as router:
                refusing = _Refusing(workers.worker_to_slot[W0])
                refusing.refuse(EngineError("broken"))
                asking = (ask(router, f"r{index}", prompt(1, 32, index)) for index in range(5))
                await asyncio.gather(*asking, return_exceptions=True)
                assert num_requests(router) == {}
                refusing.heal()
                await workers.stop_worker("w0")
                await workers.start_worker("w0")
                await asyncio.sleep(1.1)
                assert num_requests(router) == {W0: 0}

        run_virtual(scenario())


class TestPopularPrefix:
    """G4."""

    @pytest.mark.parametrize("max_num_seqs", [32, 64, 1024])
    def test_burst_on_a_busy_holder_spills_to_few_others_that_then_hold_the_prefix(self, max_num_seqs: int) -> None:
        async def scenario() -> None:
            async with rack(4, **REAL, max_num_seqs=max_num_seqs, num_blocks=8192) as workers:
                await warm(workers, W1, token_ids=prompt(1, 800, 0))
                async with workers.router(only=frozenset({W1})) as other, workers.router() as router:
                    busy = asyncio.create_task(ask_all(other, [prompt(1, 800, t) for t in range(30)], "b", 200))
                    await asyncio.sleep(0.5)
                    assert num_requests(router) == {W0: 0, W1: 30, W2: 0, W3: 0}
                    asking = asyncio.create_task(
                        ask_all(router, [prompt(1, 800, 100 + t) for t in range(40)], "r", 200)
                    )
                    longest = 0
                    for _ in range(100):
                        await asyncio.sleep(0.01)
                        longest = max(longest, *num_requests(router).values())
                    assert longest <= 2 * (30 + 40) / 4
                    traces = [trace for _, trace in await asking]
                    await busy
                    num_computed = sum(trace.cached_tokens < 800 for trace in traces)
                    used = {trace.worker for trace in traces}
                    # The holder is not given up, and each worker that the others spilled to computed the prefix once.
                    assert W1 in used
                    assert 2 <= len(used) <= 3
                    assert num_computed == len(used) - 1
                    assert max(trace.first_token_at_s - trace.received_at_s for trace in traces) < 0.5
                await workers.settle()
                async with workers.router() as router:
                    for worker in used:
                        matches = await router.directory.match(keys_of(prompt(1, 800, 0)), [worker])
                        assert matches[worker].num_blocks >= 50

        run_virtual(scenario())

    def test_requests_do_not_wait_for_slots_of_a_holder_longer_than_computing_the_prefix_takes(self) -> None:
        async def scenario() -> None:
            async with rack(4, **REAL, max_num_seqs=4) as workers, workers.router() as router:
                await warm(workers, W1, token_ids=prompt(1, 800, 0))
                traces = [t for _, t in await ask_all(router, [prompt(1, 800, t) for t in range(16)], max_tokens=200)]
                # An answer takes two seconds, the prefix a sixth of one: nobody waits for an answer to end.
                assert max(trace.first_token_at_s - trace.received_at_s for trace in traces) < 1.0
                assert Counter(trace.worker for trace in traces) == {W0: 4, W1: 4, W2: 4, W3: 4}

        run_virtual(scenario())

    def test_other_requests_are_not_held_up_for_ever_behind_a_popular_prefix(self) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL, max_num_seqs=4) as workers, workers.router() as router:
                await warm(workers, W0, token_ids=prompt(1, 8000, 0))
                is_over = False

                async def popular(stream: int) -> None:
                    turn = 0
                    while not is_over:
                        await ask(router, f"popular-{stream}-{turn}", prompt(1, 8000, 1000 * stream + turn))
                        turn += 1

                streams = [asyncio.create_task(popular(stream)) for stream in range(60)]
                await asyncio.sleep(1.0)
                _, trace = await ask(router, "other", prompt(2, 160, 0))
                # Cheaper requests go first, but only those that have waited at least a third as long.
                assert trace.first_token_at_s - trace.received_at_s < 3.0
                is_over = True
                await asyncio.gather(*streams)

        run_virtual(scenario())


class TestHealthTraffic:
    """G7."""

    def test_probes_and_statuses_leave_the_load_as_it_is(self) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                await warm(workers, W0, token_ids=prompt(1, 32, 0))
                async with workers.router(only=frozenset({W0})) as other:
                    busy = asyncio.create_task(ask_all(other, [prompt(7, 32, t) for t in range(20)], "b", 400))
                    await asyncio.sleep(1.0)
                    for _ in range(20):
                        await asyncio.sleep(0.1)
                        await router.fleet.refresh()
                        assert num_requests(router) == {W0: 20, W1: 0}
                    traces = [t for _, t in await ask_all(router, [prompt(1, 160, t) for t in range(5)])]
                    assert Counter(trace.worker for trace in traces) == {W1: 5}
                    await busy

        run_virtual(scenario())

    def test_probes_of_a_suspect_worker_leave_its_streams_counted_and_its_load_as_it_is(self) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL, num_blocks=8192) as workers, workers.router() as router:
                for prefix in range(10, 15):
                    await warm(workers, W0, token_ids=prompt(prefix, 9600, 0))
                refusing = _Refusing(workers.worker_to_slot[W0])
                async with workers.router(only=frozenset({W0})) as other:
                    busy = asyncio.create_task(ask_all(other, [prompt(7, 32, t) for t in range(20)], "b", 2000))
                    await asyncio.sleep(1.0)
                    refusing.refuse(EngineError("out of memory"))
                    for prefix in range(10, 15):
                        _, trace = await ask(router, f"r{prefix}", prompt(prefix, 9600, 1))
                        assert trace.failed_workers == [W0]
                    assert set(num_requests(router)) == {W1}
                    num_refused = refusing.num_refused
                    await asyncio.sleep(4.0)
                    assert refusing.num_refused > num_refused, "it has been probed"
                    refusing.heal()
                    async with asyncio.timeout(20.0):
                        while W0 not in num_requests(router):
                            await asyncio.sleep(0.1)
                    await asyncio.sleep(0.2)
                    assert num_requests(router) == {W0: 20, W1: 0}
                    traces = [t for _, t in await ask_all(router, [prompt(1, 160, t) for t in range(5)])]
                    assert Counter(trace.worker for trace in traces) == {W1: 5}
                    assert not busy.done()
                    await busy

        run_virtual(scenario())


class TestChatKeys:
    """G8."""

    MESSAGES = (
        {"role": "system", "content": "You are a patient teacher. " * 8},
        {"role": "user", "content": "What is a hash?"},
        {"role": "assistant", "content": "A short name of a long thing."},
        {"role": "user", "content": "And a chain of them?"},
    )
    TOOLS = ({"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}},)
    TEMPLATE = (
        "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )

    @pytest.mark.parametrize("tools", [(), TOOLS])
    def test_next_turn_of_a_chat_matches_all_full_blocks_of_the_turn_before(
        self, tmp_path: Path, tools: tuple[dict[str, object], ...]
    ) -> None:
        tokenizer = Tokenizer(write_model_folder(tmp_path, chat_template=self.TEMPLATE))

        async def scenario() -> None:
            async with rack(3, **REAL) as workers, workers.router() as router:
                first = tokenizer.render_chat(self.MESSAGES[:2], tools)
                _, warm_trace = await ask(router, "turn1", first)
                await workers.settle()
                await asyncio.sleep(5.0)
                second = tokenizer.render_chat(self.MESSAGES, tools)
                _, trace = await ask(router, "turn2", second)
                # Both turns share the rendered text up to the first answer.
                num_full_blocks = len(first) // SCHEME.block_size_tokens
                assert num_full_blocks >= 10
                assert trace.worker == warm_trace.worker
                assert trace.matched_tokens == trace.cached_tokens == num_full_blocks * SCHEME.block_size_tokens
                engine = workers.worker_to_slot[trace.worker].engine
                assert set(keys_of(second)) <= await engine.resident()

        run_virtual(scenario())

    def test_other_tools_are_another_prefix(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer(write_model_folder(tmp_path, chat_template=self.TEMPLATE))
        with_tools, without = (keys_of(tokenizer.render_chat(self.MESSAGES, tools)) for tools in (self.TOOLS, None))
        assert not set(with_tools) & set(without)

    def test_missing_tokenizer_is_one_clear_error_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot load a tokenizer from"):
            Tokenizer(tmp_path)


@over_both
class TestUnknownRemovals:
    """G9."""

    def test_removals_of_unknown_blocks_change_nothing_else_and_hold_nobody_up(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(2, **REAL) as workers, workers.router() as router:
                whole = prompt(1, 64, 0, num_tail_tokens=1)
                a, b, c, d = keys_of(whole)
                await warm(workers, W0, token_ids=whole[:32])
                await warm(workers, W1, token_ids=whole[:16])
                slot = workers.worker_to_slot[W0]
                slot.publisher.on_blocks(BlockChange(stored=(d,)))
                slot.publisher.on_blocks(BlockChange(removed=(a, c, d)))
                joining = asyncio.create_task(workers.start_worker("w2"))
                slot.publisher.on_blocks(BlockChange(removed=(a, c, d)))
                await asyncio.wait_for(joining, 0.01)
                await workers.settle()
                assert await router.directory.resident(W0) == {b}
                assert await router.directory.resident(W1) == {a}
                _, trace = await ask(router, "a", whole)
                assert (trace.worker, trace.matched_tokens) == (W1, 16)

        run_virtual(scenario())


@over_both
class TestNewReplica:
    """G10."""

    def test_router_that_starts_beside_a_warm_one_is_right_from_its_first_request(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(3, **REAL) as workers, workers.router() as warm_router:
                _, trace = await ask(warm_router, "p", prompt(1, 320, 0))
                holder = trace.worker
                await workers.settle()
                await asyncio.sleep(600.0)  # past every hint and many leases
                async with workers.router() as new_router:
                    first = (await ask(new_router, "first", prompt(1, 320, 1)))[1]
                    traces = [t for _, t in await ask_all(new_router, [prompt(1, 320, 10 + t) for t in range(8)])]
                    assert {(one.worker, one.matched_tokens) for one in [first, *traces]} == {(holder, 320)}

        run_virtual(scenario())

    def test_replicas_choose_alike_for_the_same_state(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(4, **REAL) as workers, workers.router() as one, workers.router() as other:
                for index in range(12):
                    await asyncio.sleep(5.0)
                    _, trace = await ask(one, f"a{index}", prompt(index, 160, 0))
                    await workers.settle()
                    await asyncio.sleep(5.0)
                    assert (await ask(other, f"b{index}", prompt(index, 160, 1)))[1].worker == trace.worker
                # What no worker holds both place alike, too.
                for index in range(100, 112):
                    await asyncio.sleep(5.0)
                    _, trace = await ask(one, f"c{index}", prompt(index, 160, 0))
                    await workers.settle()
                    await workers.worker_to_slot[trace.worker].engine.reset_cache()
                    await workers.settle()
                    await asyncio.sleep(5.0)
                    assert (await ask(other, f"d{index}", prompt(index, 160, 0)))[1].worker == trace.worker
                    await workers.settle()
                    await workers.worker_to_slot[trace.worker].engine.reset_cache()
                    await workers.settle()

        run_virtual(scenario())

    def test_stopping_one_router_loses_nothing_of_the_other(self, rack: OpenRack) -> None:
        async def scenario() -> None:
            async with rack(3, **REAL) as workers, workers.router() as staying:
                async with workers.router() as leaving:
                    await ask(leaving, "p", prompt(1, 320, 0))
                    asked = [
                        asyncio.create_task(ask(router, f"r{index}", prompt(1, 320, index), max_tokens=50))
                        for index, router in enumerate([staying, leaving] * 4)
                    ]
                    await asyncio.sleep(0.3)
                    await leaving.__aexit__(None, None, None)
                    answers = await asyncio.gather(*asked, return_exceptions=True)
                for index in range(0, 8, 2):
                    assert answers[index][0] == fake_tokens(prompt(1, 320, index), 50)
                await workers.settle()
                await asyncio.sleep(5.0)
                _, trace = await ask(staying, "after", prompt(1, 320, 50))
                assert trace.matched_tokens == 320

        run_virtual(scenario())
