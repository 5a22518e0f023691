"""Classes, tenants and priorities: whose turn it is at a worker that takes one request at a time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from router.bench_rig import INSTANCE, SCHEME, STATUS, Rig, bench_rig
from router.queue import Placement
from router.requests import GenerateRequest, ServiceClass
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import RequestId, Sampling

BATCH = ServiceClass.BATCH
BUSY = replace(STATUS, num_running=256)
ONE_FREE = replace(STATUS, num_running=255)


@dataclass(eq=False)
class Bench:
    """A queue before one worker, and who has had the worker, by name."""

    rig: Rig
    served: list[str] = field(default_factory=list)
    waiting: dict[str, asyncio.Task[Placement]] = field(default_factory=dict)
    num_asked: int = 0

    async def start(self) -> None:
        copy = self.rig.directory.mirror.begin(self.rig.clients[0].worker, INSTANCE)
        self.rig.directory.mirror.show(copy)
        self.rig.clients[0].tell(BUSY)
        await self._settle()

    async def ask(
        self, name: str, count: int = 1, *, num_tokens: int = 640, output_tokens: int = 8, **fields: object
    ) -> None:
        """Hold `count` requests of one kind: each with a prompt of its own."""
        for _ in range(count):
            self.num_asked += 1
            packed = pack_tokens([self.num_asked * 7 + index for index in range(num_tokens)])
            request = GenerateRequest(
                RequestId(f"{name}-{self.num_asked}"), packed, Sampling(max_tokens=output_tokens), **fields
            )
            keys = block_keys(packed, SCHEME.block_size_tokens, root_key(SCHEME))
            placing = self.rig.queue.place(request, keys, frozenset(), self.rig.now_s[0])
            self.waiting[request.request] = asyncio.create_task(placing)
        await self._settle()

    async def serve(self, count: int) -> str:
        """Let the worker take so many, one after the other; the names' first letters in order."""
        begin = len(self.served)
        for _ in range(count):
            self.rig.now_s[0] += 0.1
            self.rig.clients[0].tell(ONE_FREE)
            await self._settle()
            done = [name for name, task in self.waiting.items() if task.done()]
            for name in done:
                placement = self.waiting.pop(name).result()
                self.rig.fleet.note_first_token(placement.booking)
                self.rig.hints.settle(placement.promise)
                self.rig.queue.note_finished(placement, placement.request.sampling.max_tokens)
                self.rig.fleet.release(placement.booking)
                self.served.append(name)
            self.rig.clients[0].tell(BUSY)
            await self._settle()
        return "".join(name[0] for name in self.served[begin:])

    async def leave(self) -> None:
        """All who wait go away."""
        for task in self.waiting.values():
            task.cancel()
        await asyncio.gather(*self.waiting.values(), return_exceptions=True)
        self.waiting.clear()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(**options: object) -> AsyncIterator[Bench]:
    async with bench_rig(1, 0, **options) as rig:
        bench = Bench(rig)
        await bench.start()
        try:
            yield bench
        finally:
            await bench.leave()
            assert (len(rig.queue), rig.queue.num_lanes) == (0, 0)


async def test_tenants_take_turns_however_many_requests_one_of_them_holds() -> None:
    async with opened() as bench:
        await bench.ask("flood", 100, tenant="f")
        await bench.ask("one", 5, tenant="o")
        await bench.ask("two", 5, tenant="t")
        turns = await bench.serve(15)
        assert [Counter(turns[at : at + 3]) for at in range(0, 15, 3)] == [Counter("fot")] * 5
        assert await bench.serve(4) == "ffff"


async def test_turns_go_by_weight() -> None:
    async with opened(tenant_to_weight={"g": 3.0}) as bench:
        await bench.ask("gold", 40, tenant="g")
        await bench.ask("plain", 40, tenant="p")
        assert Counter(await bench.serve(40)) == {"g": 30, "p": 10}


async def test_turns_are_measured_in_work_and_not_in_requests() -> None:
    async with opened() as bench:
        await bench.ask("long", 40, tenant="l", num_tokens=6400)
        await bench.ask("short", 80, tenant="s", num_tokens=640)
        counts = Counter(await bench.serve(55))
        assert counts["s"] == pytest.approx(10 * counts["l"], rel=0.2)


async def test_long_answers_count_with_their_real_length_once_it_is_known() -> None:
    async with opened() as bench:
        await bench.ask("brief", 60, tenant="b", output_tokens=1, num_tokens=100)
        await bench.ask("verbose", 60, tenant="v", output_tokens=2000, num_tokens=100)
        assert Counter(await bench.serve(40))["b"] >= 30


async def test_tenant_that_was_away_has_saved_up_nothing() -> None:
    async with opened() as bench:
        await bench.ask("back", 1, tenant="b")
        await bench.ask("flood", 200, tenant="f")
        await bench.serve(60)
        await bench.ask("back", 20, tenant="b")
        assert Counter(await bench.serve(20)) == {"b": 10, "f": 10}


async def test_tenant_that_asks_one_at_a_time_gets_its_share_and_no_more() -> None:
    async with opened() as bench:
        await bench.ask("flood", 100, tenant="f")
        turns = ""
        for _ in range(30):
            if not any(name.startswith("one") for name in bench.waiting):
                await bench.ask("one", 1, tenant="o")
            turns += await bench.serve(1)
        assert Counter(turns) == {"f": 15, "o": 15}


async def test_tenant_without_requests_is_forgotten_when_the_others_have_had_as_much() -> None:
    async with opened() as bench:
        for number in range(50):
            await bench.ask("x", 1, tenant=f"tenant-{number}")
        await bench.ask("steady", 100, tenant="s")
        assert bench.rig.queue.num_lanes == 51
        await bench.serve(51)
        await bench.serve(5)
        assert bench.rig.queue.num_lanes == 1
        await bench.leave()
        assert bench.rig.queue.num_lanes == 0


@pytest.mark.parametrize("seed", range(5))
async def test_tenants_that_come_and_go_leave_nothing_behind_and_get_equal_shares(seed: int) -> None:
    rng = random.Random(seed)
    async with opened() as bench:
        for _ in range(150):
            tenant = rng.choice("abcdef")
            await bench.ask(
                tenant,
                rng.randint(1, 4),
                tenant=tenant,
                num_tokens=rng.choice((64, 640, 3200)),
                priority=rng.randint(-1, 1),
                service_class=rng.choice(list(ServiceClass)),
            )
            if rng.random() < 0.3 and bench.waiting:
                task = bench.waiting.pop(rng.choice(list(bench.waiting)))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await bench.serve(rng.randint(0, 3))
            assert len(bench.rig.queue) == len(bench.waiting)
            assert bench.rig.queue.num_lanes <= 12
        while bench.waiting:
            assert len(await bench.serve(1)) == 1
        assert (len(bench.rig.queue), bench.rig.queue.num_lanes) == (0, 0)


async def test_batch_requests_get_what_interactive_ones_leave_and_a_sixteenth() -> None:
    async with opened() as bench:
        await bench.ask("batch", 40, service_class=BATCH)
        await bench.ask("now", 64)
        turns = await bench.serve(64)
        assert Counter(turns)["b"] == pytest.approx(4, abs=1)
        await bench.serve(turns.count("b") + 1)
        assert await bench.serve(8) == "b" * 8


async def test_tenants_share_what_is_left_to_batch_and_what_they_use_of_it_costs_them_nothing_else() -> None:
    async with opened() as bench:
        await bench.ask("one", 20, tenant="o", service_class=BATCH)
        await bench.ask("two", 60, tenant="t", service_class=BATCH)
        assert Counter(await bench.serve(20)) == {"o": 10, "t": 10}
        await bench.ask("One", 8, tenant="o")
        await bench.ask("Third", 8, tenant="x")
        counts = Counter(await bench.serve(14))
        assert counts["O"] + counts["T"] >= 12
        assert abs(counts["O"] - counts["T"]) <= 1


async def test_lower_priority_numbers_go_first_and_nobody_starves() -> None:
    async with opened() as bench:
        await bench.ask("late", 10, priority=5)
        await bench.ask("early", 48, priority=-5)
        turns = await bench.serve(48)
        assert 1 <= turns.count("l") <= 4
        assert turns[:10].count("l") <= 1


async def test_of_those_passed_over_the_longest_waiting_has_the_turn() -> None:
    async with opened() as bench:
        # Longer, so that urgency alone would have it last.
        await bench.ask("oldest", 1, priority=9, num_tokens=1600)
        bench.rig.now_s[0] += 1.0
        await bench.ask("newer", 10, priority=5, num_tokens=64)
        await bench.ask("first", 60)
        turns = await bench.serve(40)
        assert turns.replace("f", "")[0] == "o"


async def test_priority_is_no_means_against_other_tenants() -> None:
    async with opened() as bench:
        await bench.ask("greedy", 40, tenant="g", priority=-1000)
        await bench.ask("modest", 10, tenant="m", priority=7)
        assert Counter(await bench.serve(20)) == {"g": 10, "m": 10}


async def test_refused_request_costs_its_tenant_nothing() -> None:
    async with opened() as bench:
        await bench.ask("a", 20, tenant="a")
        await bench.ask("b", 20, tenant="b")
        first = await bench.serve(1)
        loser = next(iter(name for name in bench.waiting if name.startswith(first)))
        # What was charged for the first is given back, as if it had been refused: its tenant is next again.
        placement_request = bench.waiting[loser]
        assert not placement_request.done()
        bench.rig.queue._shares.refund(
            GenerateRequest(RequestId("r"), pack_tokens([1]), Sampling(max_tokens=8), tenant=first), 640, 8
        )
        assert await bench.serve(1) == first


def test_engines_run_batch_requests_after_all_interactive_ones() -> None:
    def priority(priority: int, service_class: ServiceClass) -> int:
        request = GenerateRequest(
            RequestId("r"), pack_tokens([1]), Sampling(max_tokens=1), priority=priority, service_class=service_class
        )
        return request.worker_priority

    most, least = (1 << 31) - 1, -(1 << 31)
    assert [priority(number, ServiceClass.INTERACTIVE) for number in (least, 0, most)] == [least, 0, most]
    assert most < priority(least, BATCH) <= priority(0, BATCH) < priority(1, BATCH)
