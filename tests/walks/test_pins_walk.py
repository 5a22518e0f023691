"""Random walks over a pin board: after quiet, every engine keeps exactly what is wanted of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from shared.directory.embedded import EmbeddedStore
from shared.directory.pin_board import MemoryPinBoard, PinSpec, PinState, Revision
from shared.errors import EngineError, PinRefused
from shared.hashing import unpack_tokens
from shared.types import WorkerId
from shared.vtime import run_virtual
from tests.support.boards import FlakyBoard, Follower
from tests.support.fakes import FakeEngine
from tests.support.stores import SCHEME, embedded_store, pin_spec, redis_board

__all__ = ["embedded_store"]

WORKERS = tuple(WorkerId(f"w{number}") for number in range(3))
NAMES = ("a", "b", "c", "d", "e")
BUDGET_BLOCKS = 12
MAX_BLOCKS = 5
"""Of one pin: several fit, all of them do not."""
NUM_STEPS_BETWEEN_QUIETS = 40


class Walk:
    """Workers that follow one board, what is put there, and the operations done so far."""

    def __init__(
        self, seed: int, board: FlakyBoard, lose_store: Callable[[], Awaitable[None]], heartbeat_s: float
    ) -> None:
        self.rng = random.Random(seed)
        self.board = board
        self.lose_store = lose_store
        self.heartbeat_s = heartbeat_s
        self.num_lives = 0
        self.num_puts = 0
        self.followers: dict[WorkerId, Follower] = {}
        self.operations: list[str] = []

    async def run(self, num_steps: int) -> None:
        for worker in WORKERS:
            self.start(worker)
        actions = [self.put] * 8 + [self.put_for_a_while] * 3 + [self.remove] * 5 + [self.wait] * 15
        actions += [
            self.restart,
            self.reset_engine,
            self.lose_cache,
            self.change_weather,
            self.make_pins_fail,
            self.lose,
        ]
        for step in range(1, num_steps + 1):
            await self.rng.choice(actions)()
            if step % NUM_STEPS_BETWEEN_QUIETS == 0:
                await self.check_after_quiet()
        for follower in self.followers.values():
            await follower.pinner.stop()

    # Operations.

    async def put(self, ttl_s: float | None = None) -> None:
        self.num_puts += 1
        workers = self.rng.choice([(), (), tuple(self.rng.sample(WORKERS, self.rng.randrange(1, len(WORKERS))))])
        num_tokens = self.rng.randrange(64, (MAX_BLOCKS + 1) * 64)
        spec = pin_spec(self.rng.choice(NAMES), life=self.num_puts, num_tokens=num_tokens, workers=workers)
        self.log(f"put {spec.name} of {num_tokens} tokens for {workers or 'all'}, ttl {ttl_s}")
        # What an operator does is done by somebody who asks until the store answers.
        await self.board.inner.put(spec, ttl_s)

    async def put_for_a_while(self) -> None:
        await self.put(self.rng.uniform(0.1, 20.0) * self.heartbeat_s)

    async def remove(self) -> None:
        name = self.rng.choice(NAMES)
        self.log(f"remove {name}")
        await self.board.inner.remove(name)

    async def wait(self) -> None:
        duration_s = self.rng.uniform(0.0, 2.0) * self.heartbeat_s
        self.log(f"wait {duration_s:.4f}")
        await asyncio.sleep(duration_s)

    async def restart(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.log(f"restart {worker}")
        await self.followers[worker].pinner.stop()
        self.start(worker)

    async def reset_engine(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.log(f"reset the cache of {worker}, but for pins")
        await self.followers[worker].engine.reset_cache()

    async def lose_cache(self) -> None:
        worker = self.rng.choice(WORKERS)
        self.log(f"reset the cache of {worker}, pins included")
        await self.followers[worker].engine.lose_cache()

    async def change_weather(self) -> None:
        self.board.is_down = self.rng.random() < 0.4
        self.board.loss_rate = self.rng.choice([0.0, 0.2, 0.6])
        self.log(f"weather down={self.board.is_down} losses={self.board.loss_rate}")

    async def make_pins_fail(self) -> None:
        worker, name = self.rng.choice(WORKERS), self.rng.choice(NAMES)
        self.log(f"pin {name} fails on {worker}")
        self.followers[worker].engine.pin_faults[name] = EngineError("fails")

    async def lose(self) -> None:
        self.log("the store comes back empty")
        await self.lose_store()

    def start(self, worker: WorkerId) -> None:
        self.num_lives += 1
        self.followers[worker] = Follower.start(
            self.board,
            worker,
            life=self.num_lives,
            heartbeat_s=self.heartbeat_s,
            pin_budget_blocks=BUDGET_BLOCKS,
            prefill_s_per_token=0.002 * self.heartbeat_s,
        )

    # Checks.

    async def check_after_quiet(self) -> None:
        self.log("quiet")
        self.board.is_down = False
        self.board.loss_rate = 0.0
        for follower in self.followers.values():
            follower.engine.pin_faults.clear()
        await self.come_to_rest()
        before = await self.lasting()
        await self.lose()
        await self.come_to_rest()
        assert await self.lasting() == before, "what every worker knew did not come back"

    async def come_to_rest(self) -> None:
        async with asyncio.timeout(500 * self.heartbeat_s):
            # A board that nobody has made yet has nothing to be in line with.
            while await self.board.inner.look() is None or not await self.is_true():
                await asyncio.sleep(self.heartbeat_s)

    async def lasting(self) -> dict[str, Revision]:
        """What is wanted without a time to live."""
        wanted = await self.board.inner.look()
        pins = wanted.pins if wanted is not None else {}
        return {name: pin.revision for name, pin in pins.items() if pin.expires_in_s is None}

    async def is_true(self) -> bool:
        """Whether each engine keeps what is wanted and reports it, and lacks room for what it refuses."""
        wanted = await self.board.inner.look()
        names = wanted.pins if wanted is not None else {}
        specs = [spec for name in names if (spec := await self.board.inner.spec(name)) is not None]
        reports = await self.board.inner.reports(WORKERS)
        if len(reports) < len(WORKERS):
            return False
        for worker, follower in self.followers.items():
            told = {(pin.name, pin.revision): pin.state for pin in reports[worker].pins}
            targeted = {(spec.name, spec.revision): spec for spec in specs if spec.is_for(worker)}
            if told.keys() != targeted.keys() or PinState.WARMING in told.values():
                return False
            pinned = [targeted[which] for which, state in told.items() if state is PinState.PINNED]
            held = await follower.held()
            if any(held.get(spec.name) != spec.num_tokens // 64 for spec in pinned):
                return False
            for which, state in told.items():
                if state is PinState.REFUSED and await self.has_room(follower, targeted[which]):
                    return False
            # A renewal that was refused leaves what stood before it; nothing else is kept beside what is wanted.
            if not held.keys() <= {name for name, _ in targeted}:
                return False
            if reports[worker].num_pinned_blocks != follower.engine.stats().kv_used_blocks:
                return False
        return True

    async def has_room(self, follower: Follower, spec: PinSpec) -> bool:
        """Whether the engine would take a pin that is reported as refused, asked of a copy of its pins."""
        copy = FakeEngine(scheme=SCHEME, pin_budget_blocks=BUDGET_BLOCKS)
        copy._pins = dict(follower.engine._pins)
        try:
            await copy.pin(spec.name, unpack_tokens(spec.token_ids))
        except PinRefused:
            return False
        return True

    def log(self, operation: str) -> None:
        self.operations.append(operation)


async def walk(
    seed: int, num_steps: int, board: FlakyBoard, lose_store: Callable[[], Awaitable[None]], heartbeat_s: float
) -> None:
    walked = Walk(seed, board, lose_store, heartbeat_s)
    try:
        await walked.run(num_steps)
    except BaseException as error:
        steps = "\n".join(walked.operations)
        pytest.fail(f"seed {seed} failed with {error!r} after these operations:\n{steps}")


@pytest.mark.parametrize("seed", range(8))
def test_engines_keep_what_is_wanted_after_quiet(seed: int) -> None:
    async def scenario() -> None:
        board = FlakyBoard(MemoryPinBoard(asyncio.get_running_loop().time), random.Random(seed + 1000))

        async def lose_store() -> None:
            board.inner = MemoryPinBoard(asyncio.get_running_loop().time)

        await walk(seed, 400, board, lose_store, heartbeat_s=1.0)

    run_virtual(scenario())


@pytest.mark.redis
async def test_engines_keep_what_is_wanted_on_a_real_server(embedded_store: EmbeddedStore) -> None:
    async with redis_board(embedded_store) as bench:
        client = bench.client
        assert client is not None

        async def lose_store() -> None:
            await client.flushall()
            await client.script_flush()

        await walk(0, 120, FlakyBoard(bench.board, random.Random(1000)), lose_store, heartbeat_s=0.05)
