"""Brings one worker's engine in line with what the pin board wants of it, and tells the board what has come of that.

Sole owner of one worker's wanted pins and of which of them its engine keeps. Decides nothing about room: the engine's
pool has the budget and refuses.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from shared.directory.pin_board import BoardId, PinBoard, PinReport, PinSpec, PinState, Revision, WantedPin, WorkerPins
from shared.errors import ClientError, DirectoryUnavailable, KvrouteError, PinRefused, UnknownPin
from shared.hashing import block_keys, root_key, unpack_tokens
from shared.types import BlockKey, WorkerInfo
from worker.engines.base import Engine

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 500
_LONGEST_PAUSE_S = 60.0
"""Between two attempts at a pin that fails: each costs the engine the whole prompt."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A pin as the board has it."""

    revision: Revision
    spec: PinSpec | None
    """`None` where the board's record cannot be read; it is asked for again with every heartbeat."""
    expires_at_s: float | None = None
    """On the loop's clock; only for putting it back, since it is the store that ends a pin."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A pin that the engine keeps. Without content it is not known from where it comes."""

    num_blocks: int
    num_tokens: int
    revision: Revision | None = None
    content: tuple[bytes, str, str] | None = None
    keys: frozenset[BlockKey] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the engine does not keep what is wanted. What is refused stays so, unless room was lacking and appears."""

    revision: Revision
    message: str
    num_attempts: int = 1
    try_again_at_s: float | None = None
    """On the loop's clock; `None`: it is refused."""
    is_for_room: bool = False


class Pinner:
    """Follows the board with every heartbeat, and pins and unpins one prefix at a time until nothing differs.

    Two tasks: reports go on while a long prompt is computed. A store that is away changes nothing, and one that came
    back empty is given back what this worker knows. `engine_was_reset` makes it ask the engine what it still keeps. A
    pin that fails never stops the others, and is tried again after pauses that grow; an engine that dies is the
    business of whoever watches it.
    """

    def __init__(
        self,
        board: PinBoard,
        engine: Engine,
        info: WorkerInfo,
        *,
        budget_blocks: int,
        rng: random.Random,
        lease_s: float = 5.0,
        heartbeat_s: float = 1.0,
    ) -> None:
        self._board = board
        self._engine = engine
        self._info = info
        self._budget_blocks = budget_blocks
        self._rng = rng
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._tasks: list[asyncio.Task[None]] = []
        self._has_news = asyncio.Event()
        """There is something new to report."""
        self._has_work = asyncio.Event()

        self._board_id: BoardId | None = None
        self._known: dict[str, _Known] = {}
        self._held: dict[str, _Held] = {}
        self._failures: dict[str, _Failure] = {}
        self._must_look = True
        """Whether only the engine knows what it keeps."""
        self._lost_at_s: float | None = None
        self.num_pinned = 0
        """Pins made, those made again included."""
        self.num_refused = 0
        self.num_faults = 0
        """Unexpected errors; the first is logged whole."""

    @property
    def pins(self) -> WorkerPins:
        """What the worker says of its pins now."""
        held = self._held.values()
        shared_keys = frozenset[BlockKey]().union(*(one.keys for one in held))
        reports = [report for name in sorted(self._known) if (report := self._report_of(name)) is not None]
        return WorkerPins(
            self._info.instance,
            self._budget_blocks,
            len(shared_keys) + sum(one.num_blocks for one in held if not one.keys),
            tuple(reports),
        )

    def start(self) -> None:
        """Follow the board from now on. The worker holds its id by then, since reports go by it."""
        for name, task in (("following", self._follow_on()), ("pinning", self._work_on())):
            self._tasks.append(asyncio.create_task(task, name=f"{name} of {self._info.worker}"))

    async def stop(self) -> None:
        """Follow no more. What the engine keeps stays; the last report goes with its lease. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def engine_was_reset(self) -> None:
        """The engine's cache was reset, and pins may have gone with it. Never waits or raises."""
        self._must_look = True
        self._has_work.set()

    # Following the board.

    async def _follow_on(self) -> None:
        while True:
            self._has_news.clear()
            try:
                await self._follow()
                self._has_work.set()
                await self._board.report(self._info.worker, self.pins, self._lease_s)
                self._note_answer()
            except DirectoryUnavailable as error:
                self._note_loss(error)
                # News are told when the store is back.
                self._has_news.clear()
            except Exception:
                self._note_fault("follows its pins")
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._has_news.wait()
            except TimeoutError:
                pass

    async def _follow(self) -> None:
        """Learn what is wanted now. Changes nothing before the board has told all of it."""
        wanted = await self._board.follow(self._new_board_id(), self._kept())
        while self._board_id not in (None, wanted.board):
            await self._put_back(wanted.board)
            self._board_id = wanted.board
            wanted = await self._board.follow(self._new_board_id(), self._kept())
        self._board_id = wanted.board
        self._known = {name: await self._learn(name, pin) for name, pin in wanted.pins.items()}
        self._failures = {name: failure for name, failure in self._failures.items() if name in self._known}

    async def _put_back(self, board: BoardId) -> None:
        """Give a store that has lost its memory what this worker knows of it."""
        logger.warning("worker %s finds the store empty and puts its pins back: %s", self._info.worker, self._kept())
        for name in self._kept():
            known = self._known[name]
            left_s = None if known.expires_at_s is None else known.expires_at_s - asyncio.get_running_loop().time()
            if known.spec is not None and (left_s is None or left_s > 0):
                await self._board.put_back(known.spec, left_s, board)

    async def _learn(self, name: str, pin: WantedPin) -> _Known:
        """A pin with its tokens, which are asked for where they are not known yet."""
        known = self._known.get(name)
        if known is None or known.revision != pin.revision or known.spec is None:
            spec = await self._board.spec(name)
            if spec is not None and spec.revision != pin.revision and known is not None:
                return known  # renewed in between: the next heartbeat tells of it
            known = _Known(pin.revision, spec if spec is not None and spec.revision == pin.revision else None)
        left_s = pin.expires_in_s
        return replace(known, expires_at_s=None if left_s is None else asyncio.get_running_loop().time() + left_s)

    def _kept(self) -> list[str]:
        """Names of the pins that this worker is to keep."""
        return [name for name, known in self._known.items() if known.spec and known.spec.is_for(self._info.worker)]

    def _report_of(self, name: str) -> PinReport | None:
        """What is told of a pin; `None` if it is not for this worker."""
        known, held, failure = self._known[name], self._held.get(name), self._failures.get(name)
        if known.spec is None:
            message = "its record in the store cannot be read; put the pin again"
            return PinReport(name, known.revision, PinState.REFUSED, message=message + _still_kept(held))
        if not known.spec.is_for(self._info.worker):
            return None
        if held is not None and held.revision == known.revision:
            return PinReport(name, known.revision, PinState.PINNED, held.num_blocks, held.num_tokens)
        if failure is not None and failure.revision == known.revision:
            if failure.try_again_at_s is None:
                message = failure.message + _still_kept(held)
                return PinReport(name, known.revision, PinState.REFUSED, message=message)
            return PinReport(name, known.revision, PinState.WARMING, message=failure.message)
        return PinReport(name, known.revision, PinState.WARMING)

    # Changing the engine.

    async def _work_on(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            try:
                await self._bring_in_line()
            except KvrouteError as error:
                logger.debug("worker %s does not hear of its engine's pins: %s", self._info.worker, error)
            except Exception:
                self._note_fault("changes its pins")

    async def _bring_in_line(self) -> None:
        """Do what differs, each at most once; what fails is tried again with a later heartbeat."""
        tried: set[tuple[str, Revision | None]] = set()
        while True:
            if self._must_look:
                await self._look()
            step = self._next_step(tried)
            if step is None:
                return
            await step

    async def _look(self) -> None:
        """Ask the engine what it keeps."""
        self._must_look = False
        try:
            kept = await self._engine.pins()
        except BaseException:
            self._must_look = True
            raise
        held = {pin.name: self._held.get(pin.name) or _Held(pin.num_blocks, pin.num_tokens) for pin in kept}
        lost = sorted(self._held.keys() - held.keys())
        self._held = held
        if lost:
            logger.warning("the engine of worker %s has lost pins, which are made again: %s", self._info.worker, lost)
            self._room_appeared()
            self._has_news.set()

    def _next_step(self, tried: set[tuple[str, Revision | None]]) -> Coroutine[Any, Any, None] | None:
        """What to do next, noted in `tried`. Room is made before it is taken."""
        for name in self._held:
            known = self._known.get(name)
            is_wanted = known is not None and (known.spec is None or known.spec.is_for(self._info.worker))
            if self._board_id is not None and not is_wanted and (name, None) not in tried:
                tried.add((name, None))
                return self._unpin(name)
        for name in sorted(self._kept()):
            spec, held, failure = self._known[name].spec, self._held.get(name), self._failures.get(name)
            if spec is None or (name, spec.revision) in tried:
                continue
            if held is not None and held.content == spec.content:
                self._adopt(spec, held)
            elif failure is None or failure.revision != spec.revision or _is_due(failure):
                tried.add((name, spec.revision))
                return self._pin(spec)
        return None

    def _adopt(self, spec: PinSpec, held: _Held) -> None:
        """A renewed pin of the same tokens is kept already."""
        if held.revision != spec.revision:
            self._held[spec.name] = replace(held, revision=spec.revision)
            self._has_news.set()

    async def _pin(self, spec: PinSpec) -> None:
        try:
            token_ids = unpack_tokens(spec.token_ids)
            pinned = await self._engine.pin(spec.name, token_ids, salt=spec.salt, adapter=spec.adapter)
        except ClientError as error:
            self.num_refused += 1
            logger.warning("worker %s does not keep pin %s: %s", self._info.worker, spec.name, error)
            self._note_refusal(spec, error)
            return
        except Exception as error:
            # What the engine keeps after a failure that it did not foresee, only it knows.
            self._must_look = True
            if not isinstance(error, KvrouteError):
                self._note_fault(f"makes pin {spec.name}")
            self._note_failure(spec, error)
            return
        if spec.name in self._held:
            self._room_appeared()
        root = root_key(self._info.scheme, salt=spec.salt, adapter=spec.adapter)
        keys = block_keys(spec.token_ids, self._info.scheme.block_size_tokens, root)[: pinned.num_blocks]
        self._held[spec.name] = _Held(
            pinned.num_blocks, pinned.num_tokens, spec.revision, spec.content, frozenset(keys)
        )
        self._failures.pop(spec.name, None)
        self.num_pinned += 1
        self._has_news.set()
        logger.info("worker %s keeps %s blocks of pin %s", self._info.worker, pinned.num_blocks, spec.name)

    async def _unpin(self, name: str) -> None:
        try:
            await self._engine.unpin(name)
        except UnknownPin:
            pass  # gone with a reset that is still to be looked at
        except Exception as error:
            self._must_look = True
            if not isinstance(error, KvrouteError):
                self._note_fault(f"gives up pin {name}")
            return
        self._held.pop(name, None)
        self._room_appeared()
        self._has_news.set()

    def _room_appeared(self) -> None:
        """What was refused for want of room is worth another try."""
        self._failures = {name: failure for name, failure in self._failures.items() if not failure.is_for_room}
        self._has_work.set()

    def _note_refusal(self, spec: PinSpec, error: ClientError) -> None:
        self._failures[spec.name] = _Failure(spec.revision, _message(error), is_for_room=isinstance(error, PinRefused))
        self._has_news.set()

    def _note_failure(self, spec: PinSpec, error: Exception) -> None:
        """The first pause is a heartbeat, and each is twice the one before."""
        former = self._failures.get(spec.name)
        num_failed = former.num_attempts if former is not None and former.revision == spec.revision else 0
        pause_s = min(self._heartbeat_s * 2.0 ** min(num_failed, 32), max(self._heartbeat_s, _LONGEST_PAUSE_S))
        message = f"attempt {num_failed + 1} failed, the next one follows {pause_s:g} s later: {_message(error)}"
        try_again_at_s = asyncio.get_running_loop().time() + pause_s
        self._failures[spec.name] = _Failure(spec.revision, message, num_failed + 1, try_again_at_s)
        self._has_news.set()

    def _note_loss(self, error: DirectoryUnavailable) -> None:
        if self._lost_at_s is None:
            self._lost_at_s = asyncio.get_running_loop().time()
            logger.warning("worker %s cannot read the pin board, its pins stay: %s", self._info.worker, error)

    def _note_answer(self) -> None:
        if self._lost_at_s is not None:
            lost_s = asyncio.get_running_loop().time() - self._lost_at_s
            self._lost_at_s = None
            logger.warning("worker %s reads the pin board again after %.1f s", self._info.worker, lost_s)

    def _note_fault(self, what: str) -> None:
        level = logging.DEBUG if self.num_faults else logging.ERROR
        self.num_faults += 1
        logger.log(level, "worker %s %s: unexpected error", self._info.worker, what, exc_info=True)

    def _new_board_id(self) -> BoardId:
        # The instance is mixed in since two lives of a worker may be handed equally seeded generators.
        return BoardId(f"{self._rng.getrandbits(128) ^ int(self._info.instance, 16):032x}")


def _is_due(failure: _Failure) -> bool:
    """Whether what has failed may be tried again now."""
    return failure.try_again_at_s is not None and asyncio.get_running_loop().time() >= failure.try_again_at_s


def _still_kept(held: _Held | None) -> str:
    """What a refusal leaves under the name, for the end of its message."""
    return f"; the former prompt is still kept ({held.num_blocks} blocks)" if held is not None else ""


def _message(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_MESSAGE_CHARS]
