"""What workers hold of a prompt, in tokens: matches of the directory and own promises, joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from router.hints import Hints
from router.policies.base import Ints, Loads
from router.requests import GenerateRequest
from shared.directory.base import Match
from shared.hashing import num_usable_blocks
from shared.types import BlockKey, Instance, WorkerId

_HASH_BYTES = 8
_LOAD_BOUND = 2.0
"""No worker is to get more than twice its share of the requests, as in consistent hashing with bounded loads (Mirrokni,
Thorup and Zadimoghaddam, 2018)."""
_FEW = 4
"""So many may be on one worker anyway: they hardly slow each other down."""


class UnderWay(NamedTuple):
    """What one worker computes of a prompt for a request before: the longest that is promised and not held yet."""

    column: int = 0
    held_tokens: int = 0
    """What the worker holds already."""
    promised_tokens: int = 0
    """What it will hold then; no more where nothing is under way."""


NOTHING_UNDER_WAY = UnderWay()


class Credited(NamedTuple):
    """What workers hold of one prompt."""

    tokens: Ints
    """For each worker."""
    most_tokens: int
    next_hash: int
    """Of the first block that nobody holds."""
    under_way: UnderWay = NOTHING_UNDER_WAY


class Credit:
    """Counts for each column of the loads what its worker would not have to compute. Keeps nothing of any request."""

    def __init__(self, hints: Hints, *, block_size_tokens: int, min_prefix_tokens: int) -> None:
        self._hints = hints
        self._block_size_tokens = block_size_tokens
        self._min_prefix_tokens = min_prefix_tokens
        self._loads: Loads | None = None
        self._num_held = 0
        self._num_routers = 1
        self._num_workers = 0
        self._instances: tuple[Instance, ...] = ()
        self._worker_to_column: dict[WorkerId, int] = {}

    def relay(self, loads: Loads) -> None:
        """Count for these workers from now on; those that compute other keys are never credited. Modifies."""
        self._num_workers = len(loads)
        self._instances = loads.instances
        self._worker_to_column = {
            worker: column for column, worker in enumerate(loads.workers) if loads.is_cache_aware[column]
        }

    def note_loads(self, loads: Loads, num_held: int, num_routers: int) -> None:
        """How many requests there are now, on workers and at each of the routers. Modifies."""
        self._loads, self._num_held, self._num_routers = loads, num_held, num_routers

    def row(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        worker_to_match: Mapping[WorkerId, Match],
        num_before: Callable[[int], int] | None = None,
    ) -> Credited:
        """What the workers hold of a prompt, promises included.

        What a worker is computing and nobody holds counts for as many requests as it is to get: the next ones have
        another worker compute it at the same time, and do not all decode on one. `num_before` tells how many that share
        the block at a depth wait before this one. `None`: it counts for all.
        """
        promised = self._hints.promised(keys)
        credited = self._count(request, keys, worker_to_match, promised)
        promised_tokens = credited.under_way.promised_tokens
        if not promised_tokens or num_before is None:
            return credited
        depth = promised_tokens // self._block_size_tokens - 1
        if any(match.num_blocks > depth for match in worker_to_match.values()):
            return credited
        computing = [worker for worker, num in promised.items() if num > depth]
        own = self._worker_of_place(num_before(depth), keys[depth], computing)
        counted = {worker: num for worker, num in promised.items() if worker == own or num <= depth}
        return self._count(request, keys, worker_to_match, counted)

    def _worker_of_place(self, place: int, key: BlockKey, computing: list[WorkerId]) -> WorkerId | None:
        """Which of those that compute a block gets the request at that place; `None` where none has one left."""
        num_together = self._num_together()
        for worker in reversed(computing):
            num_places = max(0, num_together - self._hints.num_promises(worker, key))
            if place < num_places:
                return worker
            place -= num_places
        return None

    def _num_together(self) -> int:
        """How many requests with one beginning a worker is to get of this router."""
        share = 0.0
        if self._loads is not None:
            num_requests = int(self._loads.num_requests.sum()) + self._num_held * self._num_routers
            share = num_requests / max(1, len(self._loads))
        return max(1, round(max(_FEW, _LOAD_BOUND * share) / self._num_routers))

    def _count(
        self,
        request: GenerateRequest,
        keys: Sequence[BlockKey],
        worker_to_match: Mapping[WorkerId, Match],
        promised: Mapping[WorkerId, int],
    ) -> Credited:
        num_blocks = [0] * self._num_workers
        worker_to_column = self._worker_to_column
        instances = self._instances
        for worker, match in worker_to_match.items():
            column = worker_to_column.get(worker)
            if column is not None and match.instance == instances[column]:
                num_blocks[column] = match.num_blocks
        under_way = NOTHING_UNDER_WAY
        num_usable = num_usable_blocks(request.num_prompt_tokens, self._block_size_tokens)
        for worker, num_promised in promised.items():
            column = worker_to_column.get(worker)
            # Both are prefixes of one chain, so their union is the longer one.
            if column is not None and num_promised > num_blocks[column]:
                tokens_held, tokens_then = (
                    min(number, num_usable) * self._block_size_tokens for number in (num_blocks[column], num_promised)
                )
                if tokens_then > max(tokens_held, under_way.promised_tokens):
                    under_way = UnderWay(column, tokens_held, tokens_then)
                num_blocks[column] = num_promised
        most = max(num_blocks, default=0)
        next_hash = _hash_of(keys[min(most, len(keys) - 1)]) if keys else prefix_hash(request, keys)
        most_tokens = min(most, num_usable) * self._block_size_tokens
        if most_tokens < max(1, self._min_prefix_tokens):
            return Credited(np.zeros(self._num_workers, dtype=np.int64), 0, next_hash)
        tokens = np.array(num_blocks, dtype=np.int64)
        if most > num_usable:
            np.minimum(tokens, num_usable, out=tokens)
        tokens *= self._block_size_tokens
        if self._min_prefix_tokens:
            tokens[tokens < self._min_prefix_tokens] = 0
        return Credited(tokens, most_tokens, next_hash, under_way)


def prefix_hash(request: GenerateRequest, keys: Sequence[BlockKey]) -> int:
    """Of the prompt's first block, or of all of it where it has no full block."""
    return _hash_of(keys[0]) if keys else xxh3_64_intdigest(request.token_ids)


def _hash_of(key: BlockKey) -> int:
    return int.from_bytes(key[:_HASH_BYTES], "little")
