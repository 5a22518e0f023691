"""The queue's places: who is let in, who gives way, and what those hear who are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from router.admission import MAX_RETRY_S, MIN_RETRY_S
from router.bench_rig import INSTANCE, STATUS, Rig, bench_rig
from router.queue import Placement
from router.requests import GenerateRequest, ServiceClass
from shared.errors import Overloaded, QueueFull
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling

BATCH = ServiceClass.BATCH
BUSY = replace(STATUS, num_running=256)
ONE_FREE = replace(STATUS, num_running=255)


@dataclass(eq=False)
class Door:
    """A queue of few places before one busy worker, and all who have come."""

    rig: Rig
    name_to_task: dict[str, asyncio.Task[Placement]] = field(default_factory=dict)

    async def come(self, *names: str, is_again: bool = False, **fields: object) -> None:
        for name in names:
            request = GenerateRequest(RequestId(name), pack_tokens(range(50)), Sampling(max_tokens=8), **fields)
            placing = self.rig.queue.place(request, [], frozenset(), self.rig.now_s[0], is_again=is_again)
            self.name_to_task[name] = asyncio.create_task(placing)
        await settle()

    async def leave(self, name: str) -> None:
        self.name_to_task[name].cancel()
        await settle()

    async def serve(self, count: int, every_s: float) -> None:
        """Let the worker take so many at a steady rate."""
        for _ in range(count):
            self.rig.now_s[0] += every_s
            self.rig.clients[0].tell(ONE_FREE)
            await settle()
            self.rig.clients[0].tell(BUSY)
            for task in self.name_to_task.values():
                if task.done() and not task.cancelled() and task.exception() is None:
                    placement = task.result()
                    self.rig.hints.withdraw(placement.promise)
                    self.rig.fleet.release(placement.booking)

    @property
    def held(self) -> str:
        return " ".join(name for name, task in self.name_to_task.items() if not task.done())

    def refusal(self, name: str) -> QueueFull:
        error = self.name_to_task[name].exception()
        assert isinstance(error, QueueFull)
        return error


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def door(max_held: int, **options: object) -> AsyncIterator[Door]:
    async with bench_rig(1, 0, max_held=max_held, **options) as rig:
        copy = rig.directory.mirror.begin(rig.clients[0].worker, INSTANCE)
        rig.directory.mirror.show(copy)
        rig.clients[0].tell(BUSY)
        await settle()
        opened = Door(rig)
        yield opened
        for task in opened.name_to_task.values():
            task.cancel()
        await asyncio.gather(*opened.name_to_task.values(), return_exceptions=True)
        assert (len(rig.queue), rig.queue.num_lanes, rig.fleet.num_bookings) == (0, 0, 0)


async def test_lone_tenant_may_fill_the_queue_and_is_refused_beyond_it() -> None:
    async with door(3) as queue:
        await queue.come("a", "b", "c", "d")
        assert queue.held == "a b c"
        assert str(queue.refusal("d")) == "3 requests are held already"
        assert len(queue.rig.queue) == 3


async def test_request_that_leaves_frees_its_place_at_once() -> None:
    async with door(2) as queue:
        await queue.come("a", "b")
        queue.name_to_task["a"].cancel()
        await asyncio.sleep(0)
        await queue.come("c")
        assert queue.held == "b c"


async def test_newest_batch_request_gives_way_to_an_interactive_one() -> None:
    async with door(3) as queue:
        await queue.come("b1", "b2", service_class=BATCH)
        await queue.come("i1", "i2")
        assert queue.held == "b1 i1 i2"
        assert "gave way" in str(queue.refusal("b2"))
        await queue.come("i3", "i4")
        assert queue.held == "i1 i2 i3"
        assert str(queue.refusal("i4")) == "3 requests are held already"


async def test_batch_request_makes_nobody_give_way_to_it() -> None:
    async with door(2) as queue:
        await queue.come("i1", "i2")
        await queue.come("b1", service_class=BATCH, priority=-100)
        assert queue.held == "i1 i2"
        assert isinstance(queue.name_to_task["b1"].exception(), QueueFull)


async def test_tenant_below_its_share_gets_a_place_of_the_one_that_has_most() -> None:
    async with door(4) as queue:
        await queue.come("f1", "f2", "f3", "f4", tenant="flood")
        await queue.come("o1", "o2", tenant="other")
        assert queue.held == "f1 f2 o1 o2"
        # Both have their share now: who comes is refused, whoever it is.
        await queue.come("o3", tenant="other")
        await queue.come("f5", tenant="flood")
        assert queue.held == "f1 f2 o1 o2"


async def test_shares_of_the_queue_go_by_weight() -> None:
    async with door(8, tenant_to_weight={"gold": 3.0}) as queue:
        await queue.come(*(f"p{number}" for number in range(8)), tenant="plain")
        await queue.come(*(f"g{number}" for number in range(8)), tenant="gold")
        assert Counter(name[0] for name in queue.held.split()) == {"g": 6, "p": 2}


async def test_who_had_a_worker_before_is_neither_refused_nor_gives_way() -> None:
    async with door(1) as queue:
        await queue.come("b1", service_class=BATCH, is_again=True)
        await queue.come("b2", service_class=BATCH, is_again=True)
        assert queue.held == "b1 b2"
        await queue.come("i1")
        assert queue.held == "b1 b2"
        assert isinstance(queue.name_to_task["i1"].exception(), QueueFull)


async def test_refused_are_told_the_time_in_which_the_queue_drains_at_its_rate() -> None:
    async with door(40) as queue:
        await queue.come(*(f"r{number}" for number in range(40)))
        await queue.serve(20, every_s=0.5)
        await queue.come(*(f"s{number}" for number in range(20)))
        await queue.come("late")
        # 40 are before it, and two a second get a worker.
        assert queue.refusal("late").retry_after_s == pytest.approx(20.0, rel=0.05)


async def test_batch_is_told_to_wait_for_all_interactive_ones_and_a_tenant_for_its_own_at_its_share() -> None:
    async with door(40) as queue:
        await queue.come(*(f"w{number}" for number in range(20)))
        await queue.serve(20, every_s=0.5)
        await queue.come(*(f"o{number}" for number in range(10)), tenant="one")
        await queue.come(*(f"t{number}" for number in range(10)), tenant="two")
        await queue.come(*(f"b{number}" for number in range(20)), service_class=BATCH)
        await queue.come("late", service_class=BATCH)
        assert queue.refusal("late").retry_after_s == pytest.approx(20.0, rel=0.05)
        # As many before its turn comes as both tenants hold: ten of its own, each with one of the other.
        await queue.come(*(f"p{number}" for number in range(21)), tenant="one")
        last = queue.refusal("p20")
        assert last.retry_after_s == pytest.approx(30 * 2 / 2 / 1.0, rel=0.5)


@pytest.mark.parametrize(("every_s", "retry_s"), [(0.001, MIN_RETRY_S), (100.0, MAX_RETRY_S)])
async def test_time_to_retry_has_bounds(every_s: float, retry_s: float) -> None:
    async with door(10) as queue:
        await queue.come(*(f"r{number}" for number in range(10)))
        await queue.serve(5, every_s=every_s)
        await queue.come(*(f"s{number}" for number in range(6)))
        assert queue.refusal("s5").retry_after_s == retry_s


async def test_nothing_served_yet_means_the_longest_time() -> None:
    async with door(1) as queue:
        await queue.come("a", "b")
        assert queue.refusal("b").retry_after_s == MAX_RETRY_S


def test_queue_full_is_told_apart_from_a_worker_that_is_busy_and_treated_alike() -> None:
    assert issubclass(QueueFull, Overloaded)
    assert QueueFull("full").code == Overloaded("busy").code == "rate_limit_exceeded"
