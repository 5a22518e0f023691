"""`kvroute warmup`: has a prefix computed once on running workers and kept there under a name.

Says on the pin board what is wanted and waits for what the workers report; no word goes to a worker directly.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from router import fields
from router.pins import Say, connected, live_infos, new_revision, of_this_life
from router.prompts import Prompt, prompt_tokens, read_prompt
from router.runfile import Run
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.directory.base import Directory
from shared.directory.pin_board import (
    MAX_PIN_TOKENS,
    PinBoard,
    PinReport,
    PinSpec,
    PinState,
    check_name,
)
from shared.errors import ConfigError, DirectoryUnavailable, NoWorker, UnknownPin
from shared.hashing import pack_tokens
from shared.types import WorkerId, WorkerInfo

_MAX_TTL_S = 1e9
_POLLS_PER_HEARTBEAT = 4
_SILENT_LEASES = 3
"""So many leases of a store's silence and nobody waits for it any longer."""


@dataclass(frozen=True, slots=True)
class Order:
    """One call of `kvroute warmup`, checked as far as that goes without a deployment."""

    name: str
    text: str | None
    """A plain prompt; `None` where there are messages."""
    messages: Any
    ttl_s: float | None
    num_workers: int | None
    """`None`: all workers, those that come later too."""
    salt: str
    file: str = ""
    """Where the prompt stands, as errors name it; empty where it was made otherwise."""


def read_order(own: Mapping[str, Any]) -> Order:
    """The order in the command's arguments, its file read.

    Raises:
        ConfigError: an argument is wrong, or the file cannot be read or holds nothing.
    """
    name = check_name(own["name"])
    ttl_s, num_workers = _parse_ttl("--ttl-s", own["ttl_s"]), _parse_num_workers("--workers", own["on_workers"])
    prompt = read_prompt(own)
    return Order(name, prompt.text, prompt.messages, ttl_s, num_workers, prompt.salt, prompt.file)


def tokenise(order: Order, tokenizer: Tokenizer, settings: Settings) -> list[int]:
    """Token ids of what is to be kept, as requests that begin with it will have them.

    Raises:
        ConfigError: the file's prompt cannot be rendered, or a prompt is too short or too long to be kept.
        InvalidRequest: a prompt that stands in no file cannot be rendered.
    """
    prompt = Prompt(order.text, order.messages, order.salt, order.file)
    token_ids = prompt_tokens(prompt, tokenizer, settings, add_generation_prompt=False)
    if len(token_ids) < settings.block_size:
        raise ConfigError(
            f"the prompt has {len(token_ids)} tokens and fills no block of {settings.block_size}, so nothing of it can "
            "be kept"
        )
    if len(token_ids) > MAX_PIN_TOKENS:
        raise ConfigError(f"the prompt has {len(token_ids)} tokens; a pin has at most {MAX_PIN_TOKENS}")
    return token_ids


async def warm_up(
    run: Run, settings: Settings, order: Order, token_ids: list[int], *, say: Say, show: Callable[[str], None]
) -> bool:
    """Want the prefix, wait for what the workers make of it, and tell; whether all of them keep it.

    Where some refuse, the others go on keeping it, without those that come later; where all do, the board is as it was.

    Raises:
        ConfigError: there are too few workers, or the prompt does not fit into their context. Nothing is changed.
        NoWorker: no worker lives.
        PinRefused: there are too many pins already.
        UnknownPin: somebody else has put another in its place or given it up meanwhile, or its time is over.
        DirectoryUnavailable: the store does not answer, or has stopped to; what is known of workers is told.
    """
    async with connected(run, settings) as (directory, board):
        live = await live_infos(directory, run)
        if not live:
            raise NoWorker("`kvroute up` is running, but none of its workers is alive; see `kvroute status`")
        context_tokens = min(info.max_model_len_tokens for info in live.values())
        if len(token_ids) >= context_tokens:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens; with one more that is computed it does not fit into the "
                f"context of {context_tokens}"
            )
        spec = PinSpec(
            order.name,
            pack_tokens(token_ids),
            new_revision(),
            salt=order.salt,
            workers=await _choose(board, live, order),
        )
        former = await _Former.of(board, order.name)
        await board.put(spec, order.ttl_s)
        found = await _wait(directory, board, run, settings, spec, say)
        for worker, report in found.items():
            if report.state is PinState.PINNED:
                show(f"{worker}: {_pinned_text(report, spec)}")
        for name in run.workers:
            if spec.is_for(WorkerId(name)) and name not in found:
                say(f"{name}: away; it makes the pin when it is back")
        refused = {worker: report for worker, report in found.items() if report.state is PinState.REFUSED}
        if refused:
            await _take_back(directory, board, spec, former, refused, say)
        return all(report.state is PinState.PINNED for report in found.values())


@dataclass(frozen=True, slots=True)
class _Former:
    """What had the pin's name before."""

    spec: PinSpec
    expires_at_s: float | None
    """On the loop's clock."""

    @property
    def left_s(self) -> float | None:
        """What is left of its time now; None if it has no end."""
        return None if self.expires_at_s is None else self.expires_at_s - asyncio.get_running_loop().time()

    @classmethod
    async def of(cls, board: PinBoard, name: str) -> _Former | None:
        wanted = await board.look()
        spec = await board.spec(name) if wanted is not None and name in wanted.pins else None
        if wanted is None or spec is None:
            return None
        left_s = wanted.pins[name].expires_in_s
        return cls(spec, None if left_s is None else asyncio.get_running_loop().time() + left_s)


async def _choose(board: PinBoard, live: Mapping[WorkerId, WorkerInfo], order: Order) -> tuple[WorkerId, ...]:
    """The workers that are to keep the prefix; none in particular where all are."""
    if order.num_workers is None:
        return ()
    if order.num_workers > len(live):
        raise ConfigError(f"--workers: {order.num_workers} are asked for, {len(live)} are alive")
    told = of_this_life(await board.reports(live), live)

    def burden(worker: WorkerId) -> tuple[bool, int, WorkerId]:
        pins = told.get(worker)
        keeps_it = pins is not None and any(pin.name == order.name for pin in pins.pins)
        # Who keeps the name already has its blocks, or most of them.
        return not keeps_it, 0 if pins is None else pins.num_pinned_blocks, worker

    return tuple(sorted(sorted(live, key=burden)[: order.num_workers]))


async def _wait(
    directory: Directory, board: PinBoard, run: Run, settings: Settings, spec: PinSpec, say: Say
) -> dict[WorkerId, PinReport]:
    """What each live worker that is to keep the pin says in the end; of some it is still warming when time is up."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + settings.start_timeout_s
    wanted_at_s = heard_at_s = loop.time()
    found: dict[WorkerId, PinReport] = {}
    said: set[str] = set()
    is_silent = False
    try:
        while True:
            try:
                found = await _reports(directory, board, run, spec)
                is_wanted = await _is_wanted(board, spec)
            except DirectoryUnavailable as error:
                silent_s = loop.time() - heard_at_s
                if silent_s > _SILENT_LEASES * settings.lease_s or loop.time() >= give_up_at_s:
                    raise DirectoryUnavailable(_silence_text(spec, found, silent_s, error)) from error
                is_silent = True
                wanted_at_s = loop.time()  # workers have as long as ever once it is back
                news = f"the store does not answer: {error}"
            else:
                is_silent = False
                heard_at_s = loop.time()
                pending = [worker for worker, report in found.items() if report.state is PinState.WARMING]
                if found and not pending:
                    return found
                if is_wanted:
                    wanted_at_s = loop.time()
                elif loop.time() > wanted_at_s + settings.lease_s:  # workers may yet give an emptied store its pins
                    raise UnknownPin(f"pin {spec.name} was given up, or its time was over, before all workers kept it")
                news = f"{spec.num_tokens} tokens are computed on {', '.join(pending) or 'no live worker'}"
                if loop.time() >= give_up_at_s:
                    for worker in pending:
                        why = f": {found[worker].message}" if found[worker].message else ""
                        say(f"{worker}: not done within {settings.start_timeout_s:g} s{why}; it goes on with it")
                    if not found:
                        raise NoWorker(f"{news}; pin {spec.name} stays wanted")
                    return found
            if news not in said:
                said.add(news)
                say(news)
            await asyncio.sleep(settings.heartbeat_s / _POLLS_PER_HEARTBEAT)
    except asyncio.CancelledError:
        if is_silent:
            say(f"workers go on with what they have read of pin {spec.name}; the store does not answer")
        else:
            say(f"pin {spec.name} stays wanted, and workers go on with it; `kvroute unpin {spec.name}` gives it up")
        raise


async def _reports(directory: Directory, board: PinBoard, run: Run, spec: PinSpec) -> dict[WorkerId, PinReport]:
    """What each live worker that is to keep the pin says now."""
    live = {worker: info for worker, info in (await live_infos(directory, run)).items() if spec.is_for(worker)}
    told = of_this_life(await board.reports(live), live)
    warming = PinReport(spec.name, spec.revision, PinState.WARMING)
    return {
        worker: (told[worker].of(spec.name, spec.revision) if worker in told else None) or warming
        for worker in sorted(live)
    }


def _silence_text(
    spec: PinSpec, found: Mapping[WorkerId, PinReport], silent_s: float, error: DirectoryUnavailable
) -> str:
    """What is known of a pin when the store has not answered for so long."""
    states = ", ".join(f"{worker} {report.state}" for worker, report in found.items()) or "nothing"
    return (
        f"the store has not answered for {silent_s:.0f} s ({error}); last told of pin {spec.name}: {states}; "
        "workers go on with what they have read"
    )


async def _is_wanted(board: PinBoard, spec: PinSpec) -> bool:
    """Whether the pin is still wanted. Raises `UnknownPin` where another has taken its place."""
    wanted = await board.look()
    pin = wanted.pins.get(spec.name) if wanted is not None else None
    if pin is not None and pin.revision != spec.revision:
        raise UnknownPin(f"pin {spec.name} was put anew by somebody else, and this one is no longer wanted")
    return pin is not None


async def _take_back(
    directory: Directory,
    board: PinBoard,
    spec: PinSpec,
    former: _Former | None,
    refused: Mapping[WorkerId, PinReport],
    say: Say,
) -> None:
    """After refusals: want the pin only of the others; where there are none, what was wanted before."""
    told = await board.reports(refused)
    for worker, report in refused.items():
        budget = f" ({told[worker].num_pinned_blocks} of {told[worker].budget_blocks} blocks)" if worker in told else ""
        say(f"{worker}: refused: {report.message}{budget}")
    everybody = spec.workers or [record.info.worker for record in await directory.workers()]
    others = tuple(worker for worker in everybody if worker not in refused)
    if others:
        renewed = replace(spec, workers=others, revision=new_revision())
        is_so = await board.put(renewed, await _left_s(board, spec), replacing=spec.revision)
        outcome = f"stays on {', '.join(others)} alone"
    elif former is None or (former.left_s is not None and former.left_s <= 0):
        is_so = await board.remove(spec.name, revision=spec.revision)
        outcome = "is taken back"
    else:
        renewed = replace(former.spec, revision=new_revision())
        is_so = await board.put(renewed, former.left_s, replacing=spec.revision)
        outcome = "stays as it was"
    say(f"pin {spec.name} {outcome if is_so else 'was put anew or given up meanwhile'}")


async def _left_s(board: PinBoard, spec: PinSpec) -> float | None:
    wanted = await board.look()
    pin = wanted.pins.get(spec.name) if wanted is not None else None
    return pin.expires_in_s if pin is not None else None


def _pinned_text(report: PinReport, spec: PinSpec) -> str:
    return f"pinned {report.num_blocks} blocks ({report.num_tokens} of {spec.num_tokens} tokens)"


def _parse_ttl(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        ttl_s = float(text)
    except ValueError:
        ttl_s = math.nan
    if not 0 < ttl_s <= _MAX_TTL_S:
        raise ConfigError(f"{flag}: {fields.brief(text)} must be a number of seconds above 0 and up to {_MAX_TTL_S:g}")
    return ttl_s


def _parse_num_workers(flag: str, text: str) -> int | None:
    if text == "all":
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ConfigError(f"{flag}: {fields.brief(text)} must be `all` or a number above 0")
    return int(text)
