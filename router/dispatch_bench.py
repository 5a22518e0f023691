"""Measures a router's processor time for each request where more wait than the workers can serve.

In simulated time: each worker takes one prompt after the other, as long for each, and tells of first tokens, of ends,
and of its load ten times a second. Counted is all processor time of the process, the arrivals' and the workers' own
included, but not the hashing of prompts.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from router.bench_rig import CHAIN_BLOCKS, INSTANCE, PROMPT_TOKENS, STATUS, BenchClient, Rig, bench_rig
from router.queue import Placement
from router.requests import GenerateRequest
from shared.types import BlockKey, RequestId, Sampling

_STATUS_INTERVAL_S = 0.1
_DECODE_S = 2.0
_OUTPUT_TOKENS = 64
_MATCHED_SHARE = 0.25
"""Of the prompts' blocks, those that some worker holds."""
_TOKENS = bytes(4 * PROMPT_TOKENS)


@dataclass(slots=True)
class _Server:
    """What one simulated worker does: one prefill after the other, then all decode for as long."""

    client: BenchClient
    told_at_s: float = -_STATUS_INTERVAL_S
    free_at_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    queued_tokens: int = 0
    used_blocks: int = 0


async def measure_dispatch(
    seed: int, num_workers: int, num_held: int, arrivals_per_s: float, num_requests: int
) -> dict[str, float]:
    """Figures by name, after a fifth of `num_requests` that do not count."""
    async with bench_rig(num_workers, seed) as rig:
        run = _Overload(rig, random.Random(seed), num_held, arrivals_per_s, num_requests + num_requests // 5)
        await run.run(num_requests // 5)
        run.num_events = run.num_held_sum = 0
        gc.collect()
        started_at_s = time.process_time()
        await run.run(num_requests)
        cpu_s = time.process_time() - started_at_s
        await run.close()
        return {
            "dispatch_cpu_us_per_request": 1e6 * cpu_s / num_requests,
            "dispatch_held_mean": run.num_held_sum / run.num_events,
            "dispatch_events_per_request": run.num_events / num_requests,
        }


class _Overload:
    """Arrivals at the rate that the workers can just serve, behind a backlog that therefore stays."""

    def __init__(self, rig: Rig, draws: random.Random, num_held: int, arrivals_per_s: float, num_requests: int) -> None:
        self._rig = rig
        self._draws = draws
        self._num_held = num_held
        self._arrivals_per_s = arrivals_per_s
        self._prefill_s = len(rig.clients) / arrivals_per_s
        self._worker_to_server = {client.worker: _Server(client) for client in rig.clients}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asking: set[asyncio.Task[None]] = set()
        self._num_arrived = 0
        self._num_started = 0
        self.num_events = 0
        self.num_held_sum = 0
        self._prompts = self._make_prompts(num_held + 2 * num_requests)
        for _ in range(num_held):
            self._arrive()
        self._at(draws.expovariate(arrivals_per_s), self._arrive_and_go_on)
        for number, server in enumerate(self._worker_to_server.values()):
            self._at(_STATUS_INTERVAL_S * number / len(rig.clients), partial(self._tell_regularly, server))

    async def run(self, num_requests: int) -> None:
        """Until so many more requests have got their first token."""
        goal = self._num_started + num_requests
        while self._num_started < goal:
            self._rig.now_s[0], _, happen = heapq.heappop(self._events)
            happen()
            self.num_events += 1
            self.num_held_sum += len(self._rig.queue)
            await asyncio.sleep(0)  # the queue decides
            await asyncio.sleep(0)  # the requests hear of it, and their sends are events

    async def close(self) -> None:
        """Cancel who still waits."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _make_prompts(self, num_prompts: int) -> list[tuple[BlockKey, ...]]:
        """Chains of which the beginning is popular and held by some workers."""
        num_shared = round(CHAIN_BLOCKS * _MATCHED_SHARE)
        mirror, workers = self._rig.directory.mirror, list(self._worker_to_server)
        beginnings = [self._keys(num_shared) for _ in range(4 * len(workers))]
        copies = [mirror.begin(worker, INSTANCE) for worker in workers]
        for beginning in beginnings:
            for copy in self._draws.sample(copies, min(2, len(copies))):
                mirror.apply(copy, beginning)
        for copy in copies:
            mirror.show(copy)
        return [(*self._draws.choice(beginnings), *self._keys(CHAIN_BLOCKS - num_shared)) for _ in range(num_prompts)]

    def _keys(self, num_keys: int) -> list[BlockKey]:
        return [BlockKey(self._draws.randbytes(16)) for _ in range(num_keys)]

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))

    def _arrive_and_go_on(self) -> None:
        self._arrive()
        self._at(self._rig.now_s[0] + self._draws.expovariate(self._arrivals_per_s), self._arrive_and_go_on)

    def _arrive(self) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        task = asyncio.create_task(self._ask(number))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, number: int) -> None:
        request = GenerateRequest(RequestId(f"r{number}"), _TOKENS, Sampling(max_tokens=_OUTPUT_TOKENS))
        keys = self._prompts[number % len(self._prompts)]
        placement = await self._rig.queue.place(request, keys, frozenset(), self._rig.now_s[0])
        server = self._worker_to_server[placement.booking.worker]
        server.client.last_submit += 1
        placement.booking.submit = server.client.last_submit
        server.num_waiting += 1
        server.queued_tokens += placement.booking.uncached_tokens
        server.free_at_s = max(server.free_at_s, self._rig.now_s[0]) + self._prefill_s
        self._at(server.free_at_s, partial(self._start, server, placement))

    def _start(self, server: _Server, placement: Placement) -> None:
        self._num_started += 1
        server.num_waiting -= 1
        server.num_running += 1
        server.queued_tokens -= placement.booking.uncached_tokens
        server.used_blocks += placement.booking.demand_blocks
        self._tell(server)
        self._rig.fleet.note_first_token(placement.booking)
        self._rig.hints.settle(placement.promise)
        self._at(self._rig.now_s[0] + _DECODE_S, partial(self._finish, server, placement))

    def _finish(self, server: _Server, placement: Placement) -> None:
        server.num_running -= 1
        server.used_blocks -= placement.booking.demand_blocks
        self._tell(server)
        self._rig.queue.note_finished(placement, _OUTPUT_TOKENS)
        self._rig.fleet.note_finished(placement.booking)
        self._rig.fleet.release(placement.booking)

    def _tell(self, server: _Server) -> None:
        server.told_at_s = self._rig.now_s[0]
        server.client.tell(
            replace(
                STATUS,
                num_running=server.num_running,
                num_waiting=server.num_waiting,
                queued_prefill_tokens=server.queued_tokens,
                kv_used_blocks=server.used_blocks,
                # What a prompt takes here, over the tokens that most prompts have to compute.
                prefill_s_per_token=self._prefill_s / (PROMPT_TOKENS * (1 - _MATCHED_SHARE)),
            )
        )

    def _tell_regularly(self, server: _Server) -> None:
        """What first tokens and ends have not told anyway."""
        due_s = server.told_at_s + _STATUS_INTERVAL_S
        if due_s <= self._rig.now_s[0]:
            self._tell(server)
            due_s = self._rig.now_s[0] + _STATUS_INTERVAL_S
        self._at(due_s, partial(self._tell_regularly, server))
