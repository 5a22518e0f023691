"""A batch on a simulated fleet: the real planner before real routers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from router.planned_run import Outline, PlannedRun, fleet_of
from router.policies.base import Policy
from router.requests import GenerateRequest
from router.row_groups import chain_of, urgency_of
from router.simulation import Arrival, FleetResult, FleetSpec, Simulation
from shared.hashing import TOKEN_SIZE_BYTES
from shared.types import RequestId, Sampling, WorkerId
from shared.vtime import run_virtual


def simulate_batch(
    spec: FleetSpec,
    policy: Policy,
    rows: Sequence[Arrival],
    *,
    max_under_way: int,
    is_planned: bool = True,
    beside: Iterable[Arrival] = (),
) -> FleetResult:
    """Run rows that all are there at the beginning, so many of them at a time: by a plan, or in their order.

    Requests `beside` come at their own times; their outcomes follow those of the rows. Equal arguments give equal
    results. Raises `ConfigError` for a fleet that cannot be.
    """
    return run_virtual(_simulate(spec, policy, rows, max_under_way, is_planned, beside))


async def _simulate(
    spec: FleetSpec,
    policy: Policy,
    rows: Sequence[Arrival],
    max_under_way: int,
    is_planned: bool,
    beside: Iterable[Arrival],
) -> FleetResult:
    clock = asyncio.get_running_loop().time
    run = _run_planned if is_planned else _run_in_order
    async with Simulation(spec).running(policy) as simulation:
        simulation.began_at_s = began_at_s = clock()
        async with asyncio.TaskGroup() as group:
            group.create_task(run(simulation, rows, max_under_way))
            for index, arrival in enumerate(beside, start=len(rows)):
                await asyncio.sleep(max(0.0, began_at_s + arrival.at_s - clock()))
                group.create_task(simulation.carry(index, arrival, 0))
        return simulation.result(clock() - began_at_s)


async def _run_planned(simulation: Simulation, rows: Sequence[Arrival], max_under_way: int) -> None:
    """Run rows as a batch's planner has them run."""
    router = simulation.routers[0]

    async def outline(index: int) -> Outline[int]:
        row = rows[index]
        keys = router.keys(GenerateRequest(RequestId(""), row.token_ids, Sampling(max_tokens=1)))
        num_tokens = len(row.token_ids) // TOKEN_SIZE_BYTES
        return Outline(index, chain_of(keys), num_tokens, urgency_of(row.priority, None))

    async def carry(index: int, body: object, packed: bytes | None, worker: WorkerId | None) -> None:
        await simulation.carry(index, rows[index], 0, worker)

    run = PlannedRun(
        outline,
        carry,
        block_size_tokens=simulation.spec.block_size_tokens,
        max_under_way=max_under_way,
        fleet=lambda: fleet_of(router),
        offload=_at_once,
    )
    await run.run(iter(range(len(rows))))


async def _run_in_order(simulation: Simulation, rows: Sequence[Arrival], max_under_way: int) -> None:
    """Run rows in their order, as places become free."""
    indices = iter(range(len(rows)))

    async def take() -> None:
        for index in indices:
            await simulation.carry(index, rows[index], 0)

    async with asyncio.TaskGroup() as group:
        for _ in range(max_under_way):
            group.create_task(take())


async def _at_once(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Threads have no place in virtual time."""
    return function(*args, **named)
