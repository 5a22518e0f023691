"""Which workers fit on which nodes, and what is said where they do not."""

from __future__ import annotations

import pytest

from router.placement import Node, WorkerResources, describe_room, num_workers_that_fit


def node(number: int, *, cpus: float = 8, gpus: float = 0, free_gpus: float | None = None) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    return Node(f"n{number}", f"10.0.0.{number}", total, {**total, "GPU": gpus if free_gpus is None else free_gpus})


@pytest.mark.parametrize(
    ("num_gpus", "gpus_of_nodes", "num_fit"),
    [
        (1, [1, 1, 0], 2),
        (2, [2, 3, 1], 2),  # a tensor-parallel group is on one node: what is left over is of no use
        (4, [2, 2], 0),
        (0.5, [1, 1], 4),
        (0.1, [0.3], 3),  # 0.3 / 0.1 is less than 3 in floating point
        (0, [0, 0], 16),
    ],
)
def test_worker_fits_where_one_node_has_all_that_it_asks_for(
    num_gpus: float, gpus_of_nodes: list[float], num_fit: int
) -> None:
    nodes = [node(number, gpus=gpus) for number, gpus in enumerate(gpus_of_nodes)]
    assert num_workers_that_fit(WorkerResources(num_cpus=1, num_gpus=num_gpus), nodes) == num_fit


def test_processors_count_as_well_as_gpus() -> None:
    nodes = [node(1, cpus=1, gpus=8), node(2, cpus=0, gpus=8)]
    assert num_workers_that_fit(WorkerResources(num_cpus=1, num_gpus=1), nodes) == 1


def test_what_is_missing_is_told_node_by_node() -> None:
    nodes = [node(2), node(1, gpus=4, free_gpus=1)]
    assert describe_room(3, WorkerResources(num_cpus=1, num_gpus=2), nodes) == (
        "3 workers need 1 CPU and 2 GPU each, on one node each; the Ray cluster has room for 2, and for 0 with what is "
        "free: node n1 (10.0.0.1) has 8 CPU (8 free) and 4 GPU (1 free); node n2 (10.0.0.2) has 8 CPU (8 free)"
    )


def test_a_large_cluster_is_not_told_node_by_node() -> None:
    told = describe_room(1, WorkerResources(num_cpus=1, num_gpus=1), [node(number) for number in range(100)])
    assert told.count("has 8 CPU") == 8
    assert told.endswith("; and so on for 92 more")
