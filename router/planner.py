"""Plans a batch: which of its groups of rows a worker is given next, and who helps whom at the end.

Owns what of the planned rows is handed out, and to whom. Knows no clock, reads no file and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.open_groups import TakenGroups, WaitingGroups
from router.row_groups import Group, Pace
from shared.types import WorkerId

Item = TypeVar("Item")

_REMEMBERED_GROUPS = 8
"""Of what a seat has worked on, that which it may still hold."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker runs at once: more would only wait there, or go where it is not expected."""

    num_rows: int
    num_blocks: int | None = None
    """`None` where that is not known."""


ANY_ROOM = Room(1 << 30)
_NO_ROOM = Room(0)


@dataclass(slots=True, eq=False)
class Seat(Generic[Item]):
    """One worker's place at the plan: the group that it stays with, and what of it is under way."""

    worker: WorkerId | None = None
    """`None`: any, where nobody tells which there are."""
    room: Room = ANY_ROOM
    group: Group[Item] | None = None
    num_under_way: int = 0
    blocks_under_way: int = 0
    held: list[bytes] = field(default_factory=list)
    """Chains of the last rows of the groups that it had, the latest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Generic[Item]):
    """A row that is handed out."""

    item: Item
    seat: Seat[Item]
    num_blocks: int
    """Blocks that it needs beside those that it shares with the row before it."""


class Planner(Generic[Item]):
    """Owns the groups and the seats.

    A seat has no more rows under way than its worker runs at once. It stays with its group until that is empty, then
    takes the group that shares most with what it had before, of those that nobody has taken and that are most urgent;
    where there is none, it takes a part of the largest group of another seat, if that ends sooner so. Each row is
    handed out once.
    """

    def __init__(self, *, max_under_way: int) -> None:
        self._max_under_way = max_under_way
        self._waiting: WaitingGroups[Item] = WaitingGroups()
        self._taken: TakenGroups[Item] = TakenGroups()
        self._worker_to_seat: dict[WorkerId | None, Seat[Item]] = {None: Seat()}
        self.num_waiting = 0
        """Rows that are planned and not handed out."""
        self.num_under_way = 0
        self.num_divided = 0
        """Times that a part of a group went to another seat."""
        self.pace = Pace()

    @property
    def seats(self) -> Collection[Seat[Item]]:
        return self._worker_to_seat.values()

    def add(self, groups: Sequence[Group[Item]]) -> None:
        """Take groups into the plan. Modifies."""
        for group in groups:
            self.num_waiting += len(group)
            self._waiting.add(group)

    def seat(self, worker_to_room: Mapping[WorkerId, Room]) -> bool:
        """Have a seat for each of these workers; false if there was one for each. Modifies.

        What a seat that goes has left is for the others; its rows under way stay what they are.
        """
        for worker, room in worker_to_room.items():
            if worker in self._worker_to_seat:
                self._worker_to_seat[worker].room = room
        if self._worker_to_seat.keys() == worker_to_room.keys() or not worker_to_room:
            return False
        for gone in self._worker_to_seat.keys() - worker_to_room.keys():
            seat = self._worker_to_seat.pop(gone)
            self._put_back(seat)
            seat.room = _NO_ROOM
        for worker, room in worker_to_room.items():
            if worker not in self._worker_to_seat:
                self._worker_to_seat[worker] = Seat(worker, room)
        return True

    def take(self, seat: Seat[Item]) -> Turn[Item] | None:
        """The seat's next row; `None` if it may have none now. Modifies."""
        most = min(seat.room.num_rows, max(1, -(-self._max_under_way // len(self.seats))))
        if seat.num_under_way >= most or self.num_under_way >= self._max_under_way or not self.num_waiting:
            return None
        group = seat.group
        first = self._waiting.first_urgency
        if not group or (first is not None and first < group.urgency):
            group = self._change_group(seat)
            if group is None:
                return None
        num_blocks = group.next_blocks(self.pace)
        if (
            seat.num_under_way
            and seat.room.num_blocks is not None
            and seat.blocks_under_way + num_blocks > seat.room.num_blocks
        ):
            return None
        turn = Turn(group.plan.items[group.start], seat, num_blocks)
        seat.held[0] = group.chain
        group.start += 1
        self.num_waiting -= 1
        self.num_under_way += 1
        seat.num_under_way += 1
        seat.blocks_under_way += num_blocks
        return turn

    def finish(self, turn: Turn[Item]) -> None:
        """A row that was handed out has its result. Modifies."""
        self.num_under_way -= 1
        turn.seat.num_under_way -= 1
        turn.seat.blocks_under_way -= turn.num_blocks

    def _put_back(self, seat: Seat[Item]) -> None:
        """What a seat has left of its group is for all. Modifies."""
        if seat.group:
            self._waiting.add(seat.group)
        if seat.group is not None:
            self._taken.remove(seat.group)
            seat.group = None

    def _change_group(self, seat: Seat[Item]) -> Group[Item] | None:
        """Give a seat the group that it is to go on with, if there is one. Modifies."""
        self._put_back(seat)
        group = self._next_group(seat)
        if group is not None:
            self._taken.add(group)
            seat.group = group
            seat.held = [group.chain, *seat.held[: _REMEMBERED_GROUPS - 1]]
        return group

    def _next_group(self, seat: Seat[Item]) -> Group[Item] | None:
        if self._waiting.first_urgency is not None:
            return self._waiting.pop_nearest(seat.held, self.pace)
        part = self._taken.part_of_largest(self.pace)
        self.num_divided += part is not None
        return part
