"""What this router just sent where: prefixes that a worker is about to hold, before the directory can know."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.types import BlockKey, WorkerId

SETTLE_S = 2.0
"""How long a promise outlives the first token: ample for the worker's events to reach the directory, which take their
time however fast the workers compute. What the directory knows the promise says no more."""


OnChange = Callable[[WorkerId, Sequence[BlockKey], int], None]
"""Called with a worker, a chain and a depth when the chain's blocks from that depth on become, or cease to be, promised
to the worker."""


@dataclass(frozen=True, slots=True, eq=False)
class Promise:
    """The full blocks of one prompt that one worker is about to hold."""

    worker: WorkerId
    keys: Sequence[BlockKey]
    """Belongs to the request: nobody changes it."""


class Hints:
    """Owns the promises of this router. A promise lasts until it is withdrawn, or `SETTLE_S` after its first token.

    A fixed lifetime from the send on would expire under a long prefill, just when a burst needs it most.

    Invariant: a worker's bit is set exactly for the keys of its live promises. A key stands for all blocks before it as
    well, so along a chain bits only go out, and every look is a binary search.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key_to_bits: dict[BlockKey, int] = {}
        self._worker_to_more: dict[WorkerId, dict[BlockKey, int]] = {}
        """For each worker the keys that several promises share: how many there are beside the first."""
        self._worker_to_num_promises: dict[WorkerId, int] = {}
        self._worker_to_bit: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []
        """By number of their bit; `None` where the number is free."""
        self._free_numbers: list[int] = []
        self._live: set[Promise] = set()
        self._settled: deque[tuple[float, Promise]] = deque()
        self.on_change: OnChange | None = None
        self.num_promised = 0
        self.num_withdrawn = 0
        """Promises that ended, those included whose time was over."""

    def __len__(self) -> int:
        """Number of promises that count now."""
        self.expire()
        return len(self._live)

    def promise(self, worker: WorkerId, keys: Sequence[BlockKey]) -> Promise:
        """Count `keys` as held by `worker` from now on. Modifies."""
        promise = Promise(worker, keys)
        self._live.add(promise)
        self.num_promised += 1
        if keys:
            bit = self._bit_of(worker)
            self._worker_to_num_promises[worker] += 1
            key_to_bits, key_to_more = self._key_to_bits, self._worker_to_more[worker]
            num_own = self._depth(keys, bit)
            num_known = self._depth(keys, 0, num_own)
            for key in keys[:num_own]:
                key_to_more[key] = key_to_more.get(key, 0) + 1
            for key in keys[num_own:num_known]:
                key_to_bits[key] |= bit
            for key in keys[num_known:]:
                key_to_bits[key] = bit
            self._tell(promise, num_own)
        return promise

    def settle(self, promise: Promise) -> None:
        """The first token is here: the directory takes over soon. Modifies."""
        self._settled.append((self._clock() + SETTLE_S, promise))

    def withdraw(self, promise: Promise) -> None:
        """The promise will not be kept: cancelled or failed. Modifies; a promise that has ended is no error."""
        if promise not in self._live:
            return
        self._live.discard(promise)
        self.num_withdrawn += 1
        if not promise.keys:
            return
        worker = promise.worker
        bit, key_to_bits, key_to_more = self._worker_to_bit[worker], self._key_to_bits, self._worker_to_more[worker]
        num_left = 0
        for key in promise.keys:
            more = key_to_more.get(key)
            if more is None:
                break
            num_left += 1
            if more > 1:
                key_to_more[key] = more - 1
            else:
                del key_to_more[key]
        for key in promise.keys[num_left:]:
            bits = key_to_bits[key]
            if bits == bit:
                del key_to_bits[key]
            else:
                key_to_bits[key] = bits ^ bit
        self._worker_to_num_promises[worker] -= 1
        if not self._worker_to_num_promises[worker]:
            del self._worker_to_num_promises[worker], self._worker_to_more[worker]
            number = self._worker_to_bit.pop(worker).bit_length() - 1
            self._workers[number] = None
            self._free_numbers.append(number)
        self._tell(promise, num_left)

    def forget(self, worker: WorkerId) -> None:
        """Withdraw everything promised to a worker that is gone or begins a new life. Modifies."""
        for promise in [promise for promise in self._live if promise.worker == worker]:
            self.withdraw(promise)

    def promised(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        """How many leading blocks of `keys` are promised to each worker; who is promised none is absent."""
        self.expire()
        found: dict[WorkerId, int] = {}
        key_to_bits = self._key_to_bits
        bits = key_to_bits.get(keys[0], 0) if keys else 0
        depth = 0
        while bits:
            depth = self._depth(keys, bits, depth)
            rest = key_to_bits.get(keys[depth], 0) & bits if depth < len(keys) else 0
            gone, bits = bits ^ rest, rest
            while gone:
                number = gone.bit_length() - 1
                gone ^= 1 << number
                worker = self._workers[number]
                assert worker is not None, "a bit that is set is a worker's"
                found[worker] = depth
        return found

    def num_promises(self, worker: WorkerId, key: BlockKey) -> int:
        """Of how many requests a block is promised to a worker that it is promised to."""
        return 1 + self._worker_to_more[worker].get(key, 0)

    def expire(self) -> None:
        """End the promises whose time is over. Modifies."""
        if self._settled:
            now = self._clock()
            while self._settled and self._settled[0][0] <= now:
                self.withdraw(self._settled.popleft()[1])

    def _tell(self, promise: Promise, depth: int) -> None:
        if self.on_change is not None and depth < len(promise.keys):
            self.on_change(promise.worker, promise.keys, depth)

    def _depth(self, keys: Sequence[BlockKey], bits: int, start: int = 0) -> int:
        """How many leading blocks of `keys` all workers of `bits` are promised, at least `start`; of 0, anybody."""
        key_to_bits = self._key_to_bits
        low, high, step = start, len(keys), 1
        while low < high:
            # Strides that double, since most promises cover little of a chain; then halves.
            at = min(low + step, high) - 1
            known = key_to_bits.get(keys[at])
            if known is not None and known & bits == bits:
                low = at + 1
                step *= 2
            else:
                high = at
                step = max(1, (high - low) // 2)
        return low

    def _bit_of(self, worker: WorkerId) -> int:
        bit = self._worker_to_bit.get(worker)
        if bit is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._workers[number] = worker
            else:
                number = len(self._workers)
                self._workers.append(worker)
            bit = self._worker_to_bit[worker] = 1 << number
            self._worker_to_more[worker] = {}
            self._worker_to_num_promises[worker] = 0
        return bit
