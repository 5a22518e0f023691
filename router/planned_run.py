"""Runs rows in the order of a plan: reads ahead as far as memory is meant for it, has that planned, hands rows out.

Knows nothing of files, prompts or answers. What is read ahead and not handed out lies in files of its own without a
name, which end with the process, whatever ends it.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from router.planner import Planner, Room, Seat, Turn
from router.row_groups import Draft, Pace, Urgency, planned
from router.service import Router
from shared.types import WorkerId

Item = TypeVar("Item")
Offload = Callable[..., Awaitable[Any]]
"""Has a function called where it does not hold the loop: `asyncio.to_thread`."""

FIRST_ROWS = 4096
"""Rows that are planned before the first of them runs: read in a second or so, and enough to know the large groups."""
_GROWTH = 4
MAX_ROWS = 1 << 18
"""Most rows that are planned together: what a beginning costs for each of them is little by then."""
MAX_STORED_BYTES = 1 << 30
"""Most that is put aside of rows that are planned together, on disk but for the first part of it."""
_MAX_CHAIN_BYTES = 64 << 20
"""Most memory for their chains: those of 260,000 prompts of 64 blocks."""
_IN_MEMORY_BYTES = 32 << 20
_ROWS_PER_SEQ = 1.25
"""Rows under way for each sequence that a worker runs: the next one is there when a place becomes free."""
_BLOCKS_SHARE = 0.9
"""Of a worker's blocks, what rows under way may need: the rest is for answers that are longer than expected."""
_LOOK_S = 1.0
"""Time between two looks at how many workers there are."""


@dataclass(frozen=True, slots=True)
class FleetMeans:
    """The workers that there are, and the means by which a plan weighs rows for them."""

    worker_to_room: Mapping[WorkerId, Room]
    pace: Pace


FleetView = Callable[[], FleetMeans | None]


def no_fleet() -> FleetMeans | None:
    """Where nobody tells which workers there are: rows go to any of them."""
    return None


def fleet_of(router: Router) -> FleetMeans | None:
    """The workers of a router, and what rows take of their time; `None` where there are none now."""
    loads = router.fleet.loads()
    if not len(loads):
        return None
    state = router.queue.fleet_state(loads)
    # An answer shares its steps with those of the other sequences; what it adds to each is to read its own context.
    num_steps = state.mean_output_tokens
    answer_s = num_steps * float(loads.step_s.mean()) / float(loads.max_num_seqs.mean())
    context_s = num_steps * float(loads.decode_s_per_seq.mean())
    context_tokens = state.mean_full_s / state.prefill_s_per_token if state.prefill_s_per_token > 0.0 else 0.0
    rooms = zip(loads.workers, loads.max_num_seqs.tolist(), loads.kv_total_blocks.tolist(), strict=True)
    return FleetMeans(
        {worker: Room(math.ceil(_ROWS_PER_SEQ * seqs), int(_BLOCKS_SHARE * blocks)) for worker, seqs, blocks in rooms},
        Pace(state.prefill_s_per_token, answer_s, num_steps, context_s / context_tokens if context_tokens else 0.0),
    )


def view_of(router: Router) -> FleetView | None:
    """What a plan sees of a router's workers; `None` where its policy does not mind caches: then there is no plan."""
    return (lambda: fleet_of(router)) if router.policy.is_cache_aware else None


@dataclass(frozen=True, slots=True)
class Outline(Generic[Item]):
    """What a plan needs to know of a row, and what is put aside of it until it runs."""

    item: Item
    chain: bytes = b""
    num_prompt_tokens: int = 0
    urgency: Urgency = (0, 0)
    body: Any = None
    """Anything with a form in JSON."""
    packed: bytes | None = None
    """The prompt's tokens; `None` where there are none."""


@dataclass(frozen=True, slots=True)
class _Stored(Generic[Item]):
    item: Item
    store: _Store
    start: int
    body_bytes: int
    packed_bytes: int | None


class _Store:
    """Bodies and tokens of the rows that are planned together; in memory as long as they are small."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        self.num_bytes = 0
        self.chain_bytes = 0
        self.num_left = 0
        """Rows that are not taken out yet."""

    def put(self, outline: Outline[Item]) -> _Stored[Item]:
        body = json.dumps(outline.body, separators=(",", ":")).encode()
        packed = outline.packed
        stored = _Stored(outline.item, self, self.num_bytes, len(body), None if packed is None else len(packed))
        self._file.seek(self.num_bytes)
        self._file.write(body + (packed or b""))
        self.num_bytes += len(body) + len(packed or b"")
        self.chain_bytes += len(outline.chain)
        self.num_left += 1
        return stored

    def take(self, stored: _Stored[Item]) -> tuple[Any, bytes | None]:
        """What was put aside of a row, which is asked for once. Modifies; the last one ends the file."""
        self._file.seek(stored.start)
        body = json.loads(self._file.read(stored.body_bytes))
        packed = None if stored.packed_bytes is None else self._file.read(stored.packed_bytes)
        self.num_left -= 1
        if not self.num_left:
            self.close()
        return body, packed

    def close(self) -> None:
        self._file.close()


class PlannedRun(Generic[Item]):
    """Owns a run's plan and its tasks: each row is run once, at most `max_under_way` of them at a time.

    Never more than twice `max_rows` rows are planned and wait, of twice `max_stored_bytes` and a row. What `carry`
    raises ends the run.
    """

    def __init__(
        self,
        outline: Callable[[Item], Awaitable[Outline[Item] | None]],
        carry: Callable[[Item, Any, bytes | None, WorkerId | None], Awaitable[None]],
        *,
        block_size_tokens: int,
        max_under_way: int,
        fleet: FleetView,
        offload: Offload = asyncio.to_thread,
        first_rows: int = FIRST_ROWS,
        max_rows: int = MAX_ROWS,
        max_stored_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        self._outline = outline
        self._carry = carry
        self._block_size_tokens = block_size_tokens
        self._fleet = fleet
        self._offload = offload
        self._first_rows = min(first_rows, max_rows)
        self._max_rows = max_rows
        self._max_stored_bytes = max_stored_bytes
        self.planner: Planner[_Stored[Item]] = Planner(max_under_way=max_under_way)
        self.most_waiting = self.most_stored_bytes = 0
        """Most rows that were planned and not handed out, and most bytes that were put aside."""
        self._wants_rows = asyncio.Event()
        self._stores: list[_Store] = []

    async def run(self, rows: Iterator[Item]) -> None:
        """Run all rows, each to its end. Cancelling ends those under way."""
        try:
            async with asyncio.TaskGroup() as upkeep:
                looking = upkeep.create_task(self._keep_looking())
                async with asyncio.TaskGroup() as self._tasks:
                    self.look()
                    await self._read(rows)
                looking.cancel()
        finally:
            for store in self._stores:
                store.close()

    async def _read(self, rows: Iterator[Item]) -> None:
        """Have rows planned in ever larger numbers, whenever no more of them wait than may be planned together."""
        size = self._first_rows
        while draft := await self._gathered(rows, size):
            groups = await self._offload(
                planned,
                draft,
                block_size_tokens=self._block_size_tokens,
                num_seats=len(self.planner.seats),
                pace=self.planner.pace,
            )
            self.planner.add(groups)
            self.most_waiting = max(self.most_waiting, self.planner.num_waiting)
            self.most_stored_bytes = max(self.most_stored_bytes, sum(store.num_bytes for store in self._open_stores()))
            self._fill_all()
            size = min(_GROWTH * size, self._max_rows)
            while self._is_far_ahead():
                self._wants_rows.clear()
                await self._wants_rows.wait()

    async def _gathered(self, rows: Iterator[Item], most: int) -> Draft[_Stored[Item]]:
        draft: Draft[_Stored[Item]] = Draft()
        store = _Store()
        self._stores = [*self._open_stores(), store]
        for row in rows:
            outline = await self._outline(row)
            if outline is not None:
                draft.add(store.put(outline), outline.chain, outline.num_prompt_tokens, outline.urgency)
            # Answers must come through while rows are read.
            await asyncio.sleep(0)
            if len(draft) >= most or self._is_much([store]):
                break
        return draft

    def _is_far_ahead(self) -> bool:
        return self.planner.num_waiting > self._max_rows or self._is_much(self._open_stores())

    def _is_much(self, stores: Sequence[_Store]) -> bool:
        return (
            sum(store.num_bytes for store in stores) >= self._max_stored_bytes
            or sum(store.chain_bytes for store in stores) >= _MAX_CHAIN_BYTES
        )

    def _open_stores(self) -> list[_Store]:
        return [store for store in self._stores if store.num_left]

    def _fill_all(self) -> None:
        for seat in list(self.planner.seats):
            self._fill(seat)

    def _fill(self, seat: Seat[_Stored[Item]]) -> None:
        """Have a seat's next rows run, as many as it may have under way."""
        while (turn := self.planner.take(seat)) is not None:
            self._tasks.create_task(self._run_row(turn))
        self._wants_rows.set()

    async def _run_row(self, turn: Turn[_Stored[Item]]) -> None:
        stored = turn.item
        await self._carry(stored.item, *stored.store.take(stored), turn.seat.worker)
        self.planner.finish(turn)
        self._fill(turn.seat)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Take into account which workers there are now, and how fast. Called about once a second."""
        if (fleet := self._fleet()) is not None:
            self.planner.pace = fleet.pace
            self.planner.seat(fleet.worker_to_room)
        # Who got nothing while others had all that may be under way is not left out for longer than this.
        self._fill_all()
