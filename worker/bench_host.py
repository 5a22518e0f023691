"""Workers that answer at once, as a process of their own: what stands behind a router whose own cost is measured."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from shared.types import CacheScheme, FinishReason, Instance, RequestId, WorkerId
from worker.engines.base import Engine, EngineDelta, EngineInfo, EngineRequest, EngineStats, StepFit
from worker.engines.profiles import LatencyProfile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions
from worker.host import WorkerHost

INSTANCE = Instance("0" * 32)
SECRET = b"bench"
MAX_NUM_SEQS = 1024
MAX_MODEL_LEN_TOKENS = 1 << 17
_FIRST_TOKEN, _NUM_TOKENS = 1000, 5000
"""Ids that are whole words or pieces of them in any vocabulary of a usual size."""


class InstantEngine:
    """Gives every request one token for each step, at once or in steps that all requests take together."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._num_running = 0

    async def start(self) -> EngineInfo:
        return EngineInfo("instant", 1 << 20, MAX_NUM_SEQS, MAX_MODEL_LEN_TOKENS, 1 << 20, "none")

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            for number in range(1, request.sampling.max_tokens + 1):
                if self._step_s:
                    await asyncio.sleep(self._step_s - loop.time() % self._step_s)
                finish = FinishReason.LENGTH if number == request.sampling.max_tokens else None
                token_id = _FIRST_TOKEN + (7 * number) % _NUM_TOKENS
                yield EngineDelta((token_id,), finish, 0 if number == 1 else None)
        finally:
            self._num_running -= 1

    @property
    def num_prefilled_tokens(self) -> int:
        return 0

    async def cancel(self, request: RequestId) -> None:
        """Every request runs to its end here."""

    def stats(self) -> EngineStats:
        return EngineStats(self._num_running, 0, 0, StepFit())


def address_of(folder: Path, worker: WorkerId) -> str:
    """Where a worker listens."""
    return f"unix:{folder / worker}"


class WordySimulator(SimulatorEngine):
    """A simulated engine that answers with whole words, so that each token is a piece of text."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        async for delta in super().generate(request):
            token_ids = tuple([_FIRST_TOKEN + token_id % _NUM_TOKENS for token_id in delta.token_ids])
            yield EngineDelta(token_ids, delta.finish, delta.cached_tokens)


def _simulated(step_s: float) -> WordySimulator:
    """One whose steps take the same time, whatever is in them."""
    options = SimulatorOptions(
        LatencyProfile("steady", step_s, 1e-6, 0.0, 0.0, 0.0),
        CacheScheme("bench", 64),
        num_blocks=8192,
        max_model_len_tokens=MAX_MODEL_LEN_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        vocabulary_size=1 << 17,
    )
    return WordySimulator(options, lambda change: None, lambda reason: None)


async def serve(folder: Path, num_workers: int, step_s: float, name: str) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    for number in range(num_workers):
        # Of the engine protocol it has what a host without pins or audits asks for.
        engine = InstantEngine(step_s) if name == "instant" else _simulated(step_s)
        worker = WorkerId(f"w{number}")
        host = WorkerHost(cast(Engine, engine), await engine.start(), worker=worker, instance=INSTANCE, secret=SECRET)
        await host.listen(address_of(folder, worker))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_workers", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("engine", choices=["instant", "simulator"])
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.folder, arguments.num_workers, arguments.step_s, arguments.engine))


if __name__ == "__main__":
    main()
