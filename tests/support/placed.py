"""An actor in place of a worker: tells where it is."""

from __future__ import annotations

import ray


class Placed:
    """Lives where Ray puts it."""

    def node_id(self) -> str:
        """The node that it is on."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id
