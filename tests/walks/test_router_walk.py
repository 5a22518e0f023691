"""Random submits, cancels, deaths, restarts, outages and slow workers: every request ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.hints import SETTLE_S
from router.policies import POLICY_NAMES
from router.requests import CLASSES, Generated, GenerateRequest, RequestTrace
from router.service import Router
from shared.directory.memory import MemoryDirectory
from shared.errors import StreamBroken, TransientError, WorkerIdTaken
from shared.hashing import pack_tokens
from shared.types import FinishReason, RequestId, Sampling, WorkerId
from shared.vtime import run_virtual
from tests.support.fakes import fake_tokens
from tests.support.flaky_directory import FlakyDirectory
from tests.support.rack import SCHEME, Rack, assert_no_leftovers, prompt, rack

NUM_STEPS = 120
NUM_WORKERS = 3
POLICIES = ("cost", "cost", "dynamo:queue_threshold=1", *POLICY_NAMES)
FAST_S, SLOW_S = 0.002, 0.3


@dataclass(eq=False)
class _Asked:
    """One request as the walk remembers it."""

    token_ids: list[int]
    num_tokens: int
    leaves_after: int | None
    """Items after which its reader goes away by itself."""
    seed: int | None
    """With one, an answer that broke off cannot go on elsewhere."""
    items: list[Generated] = field(default_factory=list)
    ends: list[str | TransientError] = field(default_factory=list)

    async def read(self, router: Router, name: str, **fields: Any) -> None:
        request = GenerateRequest(
            RequestId(name), pack_tokens(self.token_ids), Sampling(self.num_tokens, seed=self.seed), **fields
        )
        try:
            async with aclosing(router.generate(request, RequestTrace())) as generated:
                async for item in generated:
                    self.items.append(item)
                    if len(self.items) == self.leaves_after:
                        break
            self.ends.append("left" if len(self.items) == self.leaves_after else "answered")
        except TransientError as error:
            self.ends.append(error)
        except asyncio.CancelledError:
            self.ends.append("cancelled")

    def check(self) -> None:
        assert len(self.ends) == 1
        token_ids = tuple(token_id for item in self.items for token_id in item.token_ids)
        assert token_ids == fake_tokens(self.token_ids, self.num_tokens)[: len(token_ids)]
        finishes = [item.finish for item in self.items]
        assert not any(finishes[:-1])
        if self.ends == ["answered"]:
            assert len(token_ids) == self.num_tokens
            assert finishes[-1] is FinishReason.LENGTH
        if isinstance(self.ends[0], TransientError):
            assert not any(finishes)
        if isinstance(self.ends[0], StreamBroken):
            assert token_ids
            assert self.seed is not None


class _Walk:
    def __init__(self, workers: Rack, router: Router, directory: FlakyDirectory, rng: random.Random) -> None:
        self._workers = workers
        self._router = router
        self._directory = directory
        self._rng = rng
        self._asked: list[_Asked] = []
        self._readers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        num_tasks = len(asyncio.all_tasks())
        actions = [self._ask] * 12 + [self._cancel] * 4 + [self._pause] * 6
        actions += [self._change_speed, self._kill, self._stop, self._start, self._start, self._change_weather]
        for _ in range(NUM_STEPS):
            await self._rng.choice(actions)()
        await self._end_well(num_tasks)

    async def _end_well(self, num_tasks: int) -> None:
        """With everything mended, all that is under way ends, and nothing of it is left."""
        self._directory.is_down = False
        await self._mend()
        for slot in self._workers.worker_to_slot.values():
            slot.engine.token_s = FAST_S
        _, late = await asyncio.wait(self._readers, timeout=600.0)
        assert not late
        for asked in self._asked:
            asked.check()
        await self._workers.settle()
        await asyncio.sleep(SETTLE_S + 1.0)
        assert_no_leftovers(self._router)
        assert len(self._router.hints) == self._router.queue.num_lanes == 0
        assert set(self._names()) == set(self._router.fleet.worker_to_instance)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("kvroute-pump")]
        # Tasks of a lost worker's last connection may take their time, those of requests may not.
        assert len(names) <= num_tasks + NUM_WORKERS * 4

    def _names(self) -> list[str]:
        return [f"w{index}" for index in range(NUM_WORKERS)]

    # Actions.

    async def _ask(self) -> None:
        num_prefix_tokens = self._rng.choice((0, 0, 5, 64, 320))
        number = len(self._asked)
        asked = _Asked(
            prompt(self._rng.randrange(4), num_prefix_tokens, tail=number, num_tail_tokens=self._rng.randint(1, 40)),
            num_tokens=self._rng.randint(1, 12),
            leaves_after=self._rng.choice((None, None, None, 1, 3)),
            seed=self._rng.choice((None, None, 1)),
        )
        self._asked.append(asked)
        reading = asked.read(
            self._router,
            f"q{number}",
            priority=self._rng.randrange(3),
            tenant=self._rng.choice(("", "one", "two")),
            service_class=self._rng.choice(CLASSES),
        )
        self._readers.append(asyncio.create_task(reading, name=f"reader-{number}"))
        # Some moments, so that a cancel may come at any of a request's steps; the first one lets the reader begin.
        for _ in range(self._rng.randint(1, 12)):
            await asyncio.sleep(0)

    async def _cancel(self) -> None:
        under_way = [reader for reader in self._readers if not reader.done()]
        for reader in self._rng.sample(under_way, min(len(under_way), self._rng.choice((1, 1, 2, 10)))):
            reader.cancel()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0.001, 0.01, 0.1, 1.0, 3.0)))

    async def _change_speed(self) -> None:
        for slot in self._workers.worker_to_slot.values():
            slot.engine.token_s = self._rng.choice((FAST_S, SLOW_S))

    async def _kill(self) -> None:
        if self._workers.worker_to_slot:
            await self._workers.kill_worker(self._rng.choice(sorted(self._workers.worker_to_slot)))

    async def _stop(self) -> None:
        if self._workers.worker_to_slot:
            await self._workers.stop_worker(self._rng.choice(sorted(self._workers.worker_to_slot)))

    async def _start(self) -> None:
        missing = sorted(set(self._names()) - set(self._workers.worker_to_slot))
        if missing:
            await self._try_to_start(self._rng.choice(missing))

    async def _mend(self) -> None:
        """Start whoever is missing, until the router is connected to the current life of every worker."""
        slots = self._workers.worker_to_slot
        async with asyncio.timeout(60.0):
            while not self._is_whole():
                for name in self._names():
                    slot = slots.get(WorkerId(name))
                    if slot is None:
                        await self._try_to_start(name)
                    elif slot.publisher.is_evicted:
                        # Started in an outage, it has learnt late that its former life still held the id.
                        await self._workers.kill_worker(name)
                await asyncio.sleep(0.5)

    def _is_whole(self) -> bool:
        slots = self._workers.worker_to_slot
        worker_to_instance = {worker: slot.info.instance for worker, slot in slots.items()}
        is_settled = len(slots) == NUM_WORKERS and all(slot.publisher.is_quiet for slot in slots.values())
        return is_settled and worker_to_instance == self._router.fleet.worker_to_instance

    async def _try_to_start(self, name: str) -> None:
        # The lease of its former life may not have run out yet.
        with suppress(WorkerIdTaken):
            await self._workers.start_worker(name)

    async def _change_weather(self) -> None:
        self._directory.is_down ^= True


async def _walk(seed: int) -> None:
    rng = random.Random(seed)
    directory = FlakyDirectory(MemoryDirectory(SCHEME, asyncio.get_running_loop().time))
    options = {
        "max_attempts": rng.choice((1, 3, 8)),
        "max_held": rng.choice((4, 4096)),
        "queue_timeout_s": rng.choice((2.0, 600.0)),
        "min_prefix_tokens": rng.choice((0, 100)),
    }
    engine = {
        "token_s": FAST_S,
        "prefill_s_per_token": rng.choice((0.0, 0.0005)),
        "tokens_per_delta": rng.choice((1, 4)),
        "mode": rng.choice(("healthy", "flaky")),
        "fault_rate": 0.2,
        "max_num_seqs": rng.choice((2, 64)),
        "num_blocks": rng.choice((40, 1024)),
        "rng": random.Random(seed),
    }
    policy = rng.choice(POLICIES)
    async with rack(NUM_WORKERS, directory, **engine) as workers, workers.router(policy, **options) as router:
        await _Walk(workers, router, directory, rng).run()


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_with_its_tokens_and_nothing_is_left(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_virtual(_walk(seed))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def _disturbed(seed: int) -> None:
    """Requests that may all go on elsewhere, under deaths and leaves that always leave somebody alive."""
    rng = random.Random(seed)
    engine = {
        "token_s": FAST_S,
        "prefill_s_per_token": 0.0005,
        "tokens_per_delta": rng.choice((1, 3)),
        "max_num_seqs": rng.choice((2, 16)),
    }
    async with rack(NUM_WORKERS, **engine) as workers, workers.router(max_attempts=1000) as router:
        asked = [
            _Asked(prompt(rng.randrange(4), 64, tail=number), rng.randint(1, 120), leaves_after=None, seed=None)
            for number in range(80)
        ]
        readers = [asyncio.create_task(one.read(router, f"q{number}")) for number, one in enumerate(asked)]
        num_ended = 0
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(rng.choice((0.003, 0.03, 0.1)))
            names = sorted(workers.worker_to_slot)
            if len(names) > 1 and num_ended < 200:
                num_ended += 1
                await rng.choice((workers.kill_worker, workers.stop_worker))(rng.choice(names))
            elif len(names) == 1:
                await workers.start_worker(f"n{workers.num_started}")
        for one in asked:
            assert one.ends == ["answered"]
            one.check()
        assert num_ended >= 5
        await workers.settle()
        await asyncio.sleep(SETTLE_S + 1.0)
        assert len(router.hints) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_the_undisturbed_one_whoever_dies(seed: int) -> None:
    run_virtual(_disturbed(seed))
