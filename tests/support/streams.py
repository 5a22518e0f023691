"""Many streamed requests at once, and what became of each: for tests that disturb them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.requests import GenerateRequest, RequestTrace
from router.service import Router
from shared.hashing import pack_tokens
from shared.types import FinishReason, RequestId, Sampling, WorkerId

NUM_BEGINNINGS = 8


@dataclass(eq=False)
class Streamed:
    """One request's answer, as its reader has it so far."""

    name: str
    prompt: list[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    trace: RequestTrace = field(default_factory=RequestTrace)
    longest_wait_s: float = 0.0
    """Between two items, once there was one."""

    async def read(self, router: Router) -> None:
        clock = asyncio.get_running_loop().time
        sampling = Sampling(self.max_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(RequestId(self.name), pack_tokens(self.prompt), sampling)
        heard_at_s: float | None = None
        async for item in router.generate(request, self.trace):
            assert self.finish is None, "an answer went on after its end"
            now_s = clock()
            if heard_at_s is not None:
                self.longest_wait_s = max(self.longest_wait_s, now_s - heard_at_s)
            heard_at_s = now_s
            self.token_ids += item.token_ids
            self.finish = item.finish

    def is_under_way_on(self, worker: WorkerId) -> bool:
        """Whether `worker` has answered a part of it and not all."""
        return self.trace.worker == worker and bool(self.token_ids) and self.finish is None


def streams(run: str, num_requests: int, max_tokens: int) -> list[Streamed]:
    """Requests of the tiny model's bytes, the same in each run but for their names; every eighth begins alike."""
    beginnings = [random.Random(index) for index in range(NUM_BEGINNINGS)]
    shared = [[one.randrange(3, 259) for _ in range(128)] for one in beginnings]
    built = []
    for index in range(num_requests):
        own = random.Random(f"own-{index}")
        prompt = shared[index % NUM_BEGINNINGS] + [own.randrange(3, 259) for _ in range(own.randint(8, 40))]
        built.append(Streamed(f"{run}-{index}", prompt, max_tokens))
    return built


def assert_whole(streamed: Sequence[Streamed], expected: Sequence[list[int]]) -> None:
    """Every request ended by its length, with the tokens of the undisturbed run: none lost, none twice."""
    assert [one.finish for one in streamed] == [FinishReason.LENGTH] * len(streamed)
    differing = [one.name for one, token_ids in zip(streamed, expected, strict=True) if one.token_ids != token_ids]
    assert differing == []
