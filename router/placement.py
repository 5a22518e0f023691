"""Where workers find room: what each asks of its node, and what a cluster's nodes have. Asks Ray nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MAX_NODES_NAMED = 8


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What one worker asks of its node. Never of two: the GPUs of a tensor-parallel group talk all the time."""

    num_cpus: int
    num_gpus: float

    @property
    def kind_to_amount(self) -> dict[str, float]:
        """In Ray's words; nothing that is not asked for."""
        wanted = {"CPU": float(self.num_cpus), "GPU": self.num_gpus}
        return {kind: amount for kind, amount in wanted.items() if amount}

    def __str__(self) -> str:
        return " and ".join(f"{amount:g} {kind}" for kind, amount in self.kind_to_amount.items())


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the cluster, with its resources by kind."""

    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def __str__(self) -> str:
        has = [
            f"{self.total.get(kind, 0.0):g} {kind} ({self.free.get(kind, 0.0):g} free)"
            for kind in ("CPU", "GPU")
            if kind == "CPU" or self.total.get(kind)
        ]
        return f"node {self.name} ({self.address}) has {' and '.join(has)}"


def num_workers_that_fit(resources: WorkerResources, nodes: Iterable[Node], *, is_free: bool = False) -> int:
    """How many workers the nodes can hold, of all that they have or of what is free now."""
    return sum(_num_on(resources, node.free if is_free else node.total) for node in nodes)


def _num_on(resources: WorkerResources, have: Mapping[str, float]) -> int:
    # Ray counts in ten-thousandths.
    return min(int(have.get(kind, 0.0) / amount + 1e-4) for kind, amount in resources.kind_to_amount.items())


def describe_room(num_workers: int, resources: WorkerResources, nodes: Iterable[Node]) -> str:
    """What the workers ask for, how many of them fit, and what each node has."""
    nodes = sorted(nodes, key=lambda node: node.address)
    num_fit = num_workers_that_fit(resources, nodes)
    num_free = num_workers_that_fit(resources, nodes, is_free=True)
    named = [str(node) for node in nodes[:_MAX_NODES_NAMED]]
    if len(nodes) > _MAX_NODES_NAMED:
        named.append(f"and so on for {len(nodes) - _MAX_NODES_NAMED} more")
    return (
        f"{num_workers} workers need {resources} each, on one node each; the Ray cluster has room for {num_fit}, "
        f"and for {num_free} with what is free: {'; '.join(named)}"
    )
