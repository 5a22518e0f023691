"""Where Ray puts workers' actors: whole on one node, on different nodes, and elsewhere when a node goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from router import cluster
from router.placement import WorkerResources
from shared.errors import ConfigError
from tests.support.placed import Placed

ray = pytest.importorskip("ray", reason="needs Ray")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
DEADLINE_S = 600.0
PAIR = WorkerResources(num_cpus=1, num_gpus=2)
"""A worker of two GPUs, as one of tensor parallel size 2."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[Any]:
    """A head without a GPU and two nodes with four each, which are only numbers."""
    built = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        for _ in range(2):
            built.add_node(num_cpus=2, num_gpus=4)
        cluster.connect_ray(built.address, num_local_cpus=0, environment={"PYTHONPATH": os.getcwd()})
        yield built
    finally:
        cluster.leave_ray()
        built.shutdown()


def start(name: str, resources: WorkerResources = PAIR) -> Any:
    return cluster.start_actor(Placed, name, resources, is_detached=True)


async def node_of(actor: Any) -> str:
    node_id: str = await cluster.call(actor.node_id, timeout_s=DEADLINE_S, what="actor")
    return node_id


async def until_free(num_gpus: float) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while sum(node.free.get("GPU", 0.0) for node in cluster.nodes()) != num_gpus:
            await asyncio.sleep(0.1)


async def test_workers_spread_over_nodes_and_give_their_places_back(nodes: Any) -> None:
    names = ["kvroute:a", "kvroute:b"]
    actors = [start(name) for name in names]
    places = [await node_of(actor) for actor in actors]
    assert len(set(places)) == 2
    await until_free(4.0)
    for actor, name in zip(actors, names, strict=True):
        cluster.kill_actor(actor, name)
    await until_free(8.0)


async def test_name_whose_actor_was_killed_from_outside_can_be_started_again(nodes: Any) -> None:
    first = start("kvroute:c")
    await node_of(first)
    ray.kill(first, no_restart=True)
    async with asyncio.timeout(DEADLINE_S):
        while cluster.find_actor("kvroute:c") is not None:
            await asyncio.sleep(0.1)
    second = start("kvroute:c")
    await node_of(second)
    await until_free(6.0)
    cluster.kill_actor(second, "kvroute:c")
    await until_free(8.0)


async def test_no_room_is_told_with_what_each_node_has(nodes: Any) -> None:
    wide = WorkerResources(num_cpus=1, num_gpus=6)
    with pytest.raises(ConfigError) as caught:
        cluster.check_resources(1, wide)
    told = str(caught.value)
    assert told.startswith("too many workers: 1 workers need 1 CPU and 6 GPU each, on one node each; ")
    assert "the Ray cluster has room for 0" in told
    assert told.count("4 GPU (4 free)") == 2
    assert cluster.missing_room(4, PAIR) is None
    assert cluster.missing_room(5, PAIR) is not None


async def test_worker_of_a_lost_node_starts_again_elsewhere_and_new_nodes_take_what_waits(nodes: Any) -> None:
    wide = WorkerResources(num_cpus=1, num_gpus=4)
    names = ["kvroute:d", "kvroute:e"]
    actors = {name: start(name, wide) for name in names}
    places = {name: await node_of(actor) for name, actor in actors.items()}
    assert len(set(places.values())) == 2
    lost = nodes.worker_nodes.copy().pop()
    (name,) = (name for name, place in places.items() if place == lost.node_id)
    nodes.remove_node(lost, allow_graceful=False)
    added = nodes.add_node(num_cpus=2, num_gpus=4)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                place = await asyncio.wait_for(actors[name].node_id.remote(), 5.0)
            except (ray.exceptions.RayError, TimeoutError):
                place = None
            if place not in (None, places[name]):
                break
            await asyncio.sleep(0.1)
    assert place == added.node_id
    for each in names:
        cluster.kill_actor(actors[each], each)
    await until_free(8.0)
