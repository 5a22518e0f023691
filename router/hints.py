"""What this router just sent where: prefixes that a worker is about to hold, before the directory can know."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.types import BlockKey, WorkerId

SETTLE_S = 2.0
"""How long a promise outlives the first token: ample for the worker's events to reach the directory."""


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """The full blocks of one prompt that one worker is about to hold."""

    worker: WorkerId
    keys: tuple[BlockKey, ...]


class Hints:
    """Owns the promises of this router. A promise lasts until it is withdrawn, or `SETTLE_S` after its first token.

    A fixed lifetime from the send on would expire under a long prefill, just when a burst needs it most.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._worker_to_num_promises: dict[WorkerId, Counter[BlockKey]] = {}
        self._live: set[Promise] = set()
        self._settled: deque[tuple[float, Promise]] = deque()

    def __len__(self) -> int:
        """Number of promises that count now."""
        self._expire()
        return len(self._live)

    def promise(self, worker: WorkerId, keys: Sequence[BlockKey]) -> Promise:
        """Count `keys` as held by `worker` from now on. Modifies."""
        promise = Promise(worker, tuple(keys))
        self._live.add(promise)
        self._worker_to_num_promises.setdefault(worker, Counter()).update(promise.keys)
        return promise

    def settle(self, promise: Promise) -> None:
        """The first token is here: the directory takes over soon. Modifies."""
        self._settled.append((self._clock() + SETTLE_S, promise))

    def withdraw(self, promise: Promise) -> None:
        """The promise will not be kept: cancelled or failed. Modifies; a promise that has ended is no error."""
        if promise not in self._live:
            return
        self._live.discard(promise)
        # A prompt shorter than a block promises nothing: its worker may have no counts at all.
        key_to_num = self._worker_to_num_promises.get(promise.worker, Counter())
        for key in promise.keys:
            key_to_num[key] -= 1
            if not key_to_num[key]:
                del key_to_num[key]
        if not key_to_num:
            self._worker_to_num_promises.pop(promise.worker, None)

    def forget(self, worker: WorkerId) -> None:
        """Withdraw everything promised to a worker that is gone or begins a new life. Modifies."""
        for promise in [promise for promise in self._live if promise.worker == worker]:
            self.withdraw(promise)

    def num_promised_blocks(self, worker: WorkerId, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of `keys` are promised to `worker`."""
        self._expire()
        promised = self._worker_to_num_promises.get(worker)
        if not promised:
            return 0
        return next((index for index, key in enumerate(keys) if key not in promised), len(keys))

    def _expire(self) -> None:
        now = self._clock()
        while self._settled and self._settled[0][0] <= now:
            self.withdraw(self._settled.popleft()[1])
