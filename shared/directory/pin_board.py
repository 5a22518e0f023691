"""The pin board: which prefixes operators want kept on which workers, and what each worker says has come of it.

It holds wishes, never blocks. Each worker brings its own engine in line with what it reads here, so that restarts, late
joiners, an expired pin and one that is given up are all the same to it.

A board has an identity, made with it. A worker that finds another board than the one it knew has met a store that lost
its memory, which is not to be taken for the wish to unpin everything; it puts back what it knows. What was given up on
a board stays given up there.

Nothing lives for ever without an owner: what no worker follows any more is gone a day later, and a worker's report goes
with its lease. Every method raises `DirectoryUnavailable` when the store does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Protocol

from shared.errors import ConfigError, PinRefused
from shared.hashing import TOKEN_SIZE_BYTES
from shared.telemetry import Readings
from shared.types import Instance, WorkerId

MAX_PINS = 256
MAX_PIN_TOKENS = 1 << 20
MAX_PIN_WORKERS = 4096
MAX_REMOVED = 1024
"""Revisions that a board remembers as given up. One that is forgotten could come back only with a worker that has been
away ever since and meets a store that has lost its memory meanwhile."""
FOLLOWED_S = 86_400.0
"""How long a pin and its board outlive the last worker that followed them: a weekend's rest costs a warm-up."""
_MAX_TEXT_CHARS = 1024
"""Longest salt, adapter and worker id."""
_MAX_SHOWN_CHARS = 80
"""Of a refused name in its error."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ID = re.compile(r"[0-9a-f]{32}")

Revision = NewType("Revision", str)
"""One putting of one pin: 32 hex digits, never used again."""
BoardId = NewType("BoardId", str)
"""One life of a board: 32 hex digits."""


def check_name(name: str) -> str:
    """The name, if a pin may have it. Raises `ConfigError`."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= _MAX_SHOWN_CHARS else name[:_MAX_SHOWN_CHARS] + "..."
        raise ConfigError(f"name {shown!r}: a pin's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return name


def check_revision(text: str) -> Revision:
    """The text, if it can be a revision. Raises `ValueError`."""
    if not _ID.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no revision")
    return Revision(text)


@dataclass(frozen=True, slots=True)
class PinSpec:
    """A prefix that is wanted, and where. Raises `ValueError` where it breaks a limit."""

    name: str
    token_ids: bytes
    """The prompt, as `hashing.pack_tokens` gives it."""
    revision: Revision
    salt: str = ""
    adapter: str = ""
    workers: tuple[WorkerId, ...] = ()
    """Who is to keep it; empty: every worker, those that come later too."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError("no name of a pin")
        check_revision(self.revision)
        num_bytes = len(self.token_ids)
        if num_bytes % TOKEN_SIZE_BYTES or not 0 < num_bytes <= MAX_PIN_TOKENS * TOKEN_SIZE_BYTES:
            raise ValueError(f"{num_bytes} bytes are not 1 to {MAX_PIN_TOKENS} tokens")
        if len(self.workers) > MAX_PIN_WORKERS:
            raise ValueError(f"{len(self.workers)} workers; the limit is {MAX_PIN_WORKERS}")
        if max(map(len, (self.salt, self.adapter, *self.workers))) > _MAX_TEXT_CHARS:
            raise ValueError(f"a text of more than {_MAX_TEXT_CHARS} characters")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_SIZE_BYTES

    @property
    def content(self) -> tuple[bytes, str, str]:
        """What the blocks of the pin follow from."""
        return self.token_ids, self.salt, self.adapter

    def is_for(self, worker: WorkerId) -> bool:
        return not self.workers or worker in self.workers


@dataclass(frozen=True, slots=True)
class WantedPin:
    """What is told of a pin without its tokens."""

    revision: Revision
    expires_in_s: float | None = None
    """By the store's clock; `None`: it stays until it is given up."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """All pins of a board at one moment."""

    board: BoardId
    pins: Mapping[str, WantedPin]


class PinState(StrEnum):
    """What has come of a pin on one worker."""

    WARMING = "warming"
    PINNED = "pinned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PinReport:
    """One pin on one worker."""

    name: str
    revision: Revision
    state: PinState
    num_blocks: int = 0
    num_tokens: int = 0
    """Tokens in those blocks."""
    message: str = ""
    """Why it is refused, or why it is not there yet."""


@dataclass(frozen=True, slots=True)
class WorkerPins:
    """All that one worker says of its pins. Raises `ValueError` for more of them than a board holds."""

    instance: Instance
    budget_blocks: int
    """Most blocks that pins may hold together on this worker."""
    num_pinned_blocks: int
    """Distinct blocks: what two pins share counts once."""
    pins: tuple[PinReport, ...] = ()

    def __post_init__(self) -> None:
        if len(self.pins) > MAX_PINS:
            raise ValueError(f"{len(self.pins)} pins; the limit is {MAX_PINS}")

    def of(self, name: str, revision: Revision) -> PinReport | None:
        """What is said of this putting of the pin."""
        return next((pin for pin in self.pins if (pin.name, pin.revision) == (name, revision)), None)


class PinBoard(Protocol):
    """Wanted pins by name, and the workers' reports, for one namespace."""

    async def put(self, spec: PinSpec, ttl_s: float | None, *, replacing: Revision | None = None) -> bool:
        """Want a pin from now on, for `ttl_s` by the store's clock, in place of what has its name. Modifies.

        With `replacing`, only where that revision still stands; says whether it has changed anything. Makes the board
        where there is none. Raises `PinRefused` when the board is full.
        """
        ...

    async def put_back(self, spec: PinSpec, ttl_s: float | None, board: BoardId) -> bool:
        """Want a pin that another board had, if this is the board that stands now. Modifies.

        Changes nothing where the name is taken, the board is full, or that revision was given up on this board.
        """
        ...

    async def remove(self, name: str, *, revision: Revision | None = None) -> bool:
        """Want a pin no longer; with a revision, only if it is that one. Modifies; false if it is not there."""
        ...

    async def look(self) -> Wanted | None:
        """What is wanted; `None` where there is no board. Does not modify."""
        ...

    async def follow(self, fresh: BoardId, kept: Iterable[str] = ()) -> Wanted:
        """`look` for a worker: what is wanted lives on as its own, with the pins named in `kept`. Modifies.

        Makes the board, as `fresh`, where there is none. Pins that have expired, or that nobody has kept for
        `FOLLOWED_S`, are dropped.
        """
        ...

    async def spec(self, name: str) -> PinSpec | None:
        """One pin, tokens and all; `None` if it is not there or cannot be read, which is counted. Does not modify."""
        ...

    async def report(self, worker: WorkerId, pins: WorkerPins, lease_s: float) -> None:
        """Tell what has come of a worker's pins; forgotten after `lease_s`. Modifies."""
        ...

    async def reports(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerPins]:
        """What workers have told; those that are away are left out. Does not modify."""
        ...

    async def clear(self) -> None:
        """Drop the board and all that is on it, but for the reports, which go with their leases. Modifies."""
        ...

    def expose(self, readings: Readings) -> None:
        """Have what is counted here told as metrics. Modifies `readings`."""
        ...

    async def close(self) -> None:
        """Release connections. The store keeps what it has."""
        ...


def full_board(name: str) -> PinRefused:
    """The error of a board that has no room for one more pin."""
    return PinRefused(f"pin {name!r}: there are {MAX_PINS} pins already, which is the limit; unpin one first")


@dataclass(slots=True)
class _Entry:
    spec: PinSpec
    expires_at_s: float | None
    kept_until_s: float


@dataclass(slots=True)
class _Board:
    board: BoardId
    lives_until_s: float
    entries: dict[str, _Entry] = field(default_factory=dict)
    removed: dict[Revision, None] = field(default_factory=dict)

    def give_up(self, name: str) -> None:
        self.removed[self.entries.pop(name).spec.revision] = None
        while len(self.removed) > MAX_REMOVED:
            del self.removed[next(iter(self.removed))]


class MemoryPinBoard:
    """`PinBoard` in one process's memory: the reference meaning of the protocol, for tests and virtual time.

    Atomic because no method awaits anything. `clock` gives seconds and stands for the store's time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._board: _Board | None = None
        self._reports: dict[WorkerId, tuple[WorkerPins, float]] = {}

    async def put(self, spec: PinSpec, ttl_s: float | None, *, replacing: Revision | None = None) -> bool:
        board = self._live_board()
        former = board.entries.get(spec.name) if board is not None else None
        if replacing is not None and (former is None or former.spec.revision != replacing):
            return False
        if board is None:
            # A revision is as good a fresh id as any.
            board = self._board = _Board(BoardId(spec.revision), 0.0)
        if former is not None:
            board.give_up(spec.name)
        elif len(board.entries) >= MAX_PINS:
            raise full_board(spec.name)
        self._enter(board, spec, ttl_s)
        return True

    async def put_back(self, spec: PinSpec, ttl_s: float | None, board: BoardId) -> bool:
        live = self._live_board()
        if live is None or live.board != board or spec.name in live.entries:
            return False
        if spec.revision in live.removed or len(live.entries) >= MAX_PINS:
            return False
        self._enter(live, spec, ttl_s)
        return True

    async def remove(self, name: str, *, revision: Revision | None = None) -> bool:
        board = self._live_board()
        if board is None or name not in board.entries:
            return False
        if revision is not None and board.entries[name].spec.revision != revision:
            return False
        board.give_up(name)
        return True

    async def look(self) -> Wanted | None:
        board = self._live_board()
        return None if board is None else self._wanted(board)

    async def follow(self, fresh: BoardId, kept: Iterable[str] = ()) -> Wanted:
        board = self._live_board()
        if board is None:
            board = self._board = _Board(fresh, 0.0)
        board.lives_until_s = self._clock() + FOLLOWED_S
        for name in kept:
            if name in board.entries:
                board.entries[name].kept_until_s = board.lives_until_s
        return self._wanted(board)

    async def spec(self, name: str) -> PinSpec | None:
        board = self._live_board()
        return board.entries[name].spec if board is not None and name in board.entries else None

    async def report(self, worker: WorkerId, pins: WorkerPins, lease_s: float) -> None:
        self._reports[worker] = (pins, self._clock() + lease_s)

    async def reports(self, workers: Iterable[WorkerId]) -> dict[WorkerId, WorkerPins]:
        now_s = self._clock()
        self._reports = {worker: told for worker, told in self._reports.items() if told[1] > now_s}
        return {worker: self._reports[worker][0] for worker in workers if worker in self._reports}

    async def clear(self) -> None:
        self._board = None

    def expose(self, readings: Readings) -> None:
        """Nothing is counted here."""

    async def close(self) -> None:
        """Nothing to release; what is on the board stays."""

    def _enter(self, board: _Board, spec: PinSpec, ttl_s: float | None) -> None:
        now_s = self._clock()
        board.lives_until_s = max(board.lives_until_s, now_s + FOLLOWED_S)
        board.entries[spec.name] = _Entry(spec, None if ttl_s is None else now_s + ttl_s, now_s + FOLLOWED_S)

    def _live_board(self) -> _Board | None:
        """The board, without what has expired on it."""
        now_s = self._clock()
        board = self._board
        if board is None or board.lives_until_s <= now_s:
            self._board = None
            return None
        for name, entry in list(board.entries.items()):
            ends_s = (entry.kept_until_s,) if entry.expires_at_s is None else (entry.kept_until_s, entry.expires_at_s)
            if min(ends_s) <= now_s:
                del board.entries[name]
        return board

    def _wanted(self, board: _Board) -> Wanted:
        now_s = self._clock()
        return Wanted(
            board.board,
            {
                name: WantedPin(entry.spec.revision, None if entry.expires_at_s is None else entry.expires_at_s - now_s)
                for name, entry in sorted(board.entries.items())
            },
        )
