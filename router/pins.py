"""Pins of a running deployment: shown and given up. What `kvroute warmup` asks for is `router.warmup`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from router.runfile import Run
from router.tables import or_dash, table
from shared.config import Settings
from shared.directory import connect_directory, open_pin_board
from shared.directory.base import Directory
from shared.directory.pin_board import (
    PinBoard,
    PinReport,
    PinSpec,
    PinState,
    Revision,
    WantedPin,
    WorkerPins,
    check_name,
)
from shared.errors import ConfigError, DirectoryUnavailable
from shared.types import CacheScheme, WorkerId, WorkerInfo

Say = Callable[[str], None]

_POLLS_PER_HEARTBEAT = 4


@contextlib.asynccontextmanager
async def connected(run: Run, settings: Settings) -> AsyncIterator[tuple[Directory, PinBoard]]:
    """The deployment's directory and pin board. Raises `DirectoryUnavailable` where its store does not answer."""
    scheme = CacheScheme(settings.model_name, settings.block_size)
    async with contextlib.AsyncExitStack() as stack:
        directory = await connect_directory(run.redis_url, scheme)
        stack.push_async_callback(directory.close)
        board = open_pin_board(run.redis_url, scheme)
        stack.push_async_callback(board.close)
        yield directory, board


async def live_infos(directory: Directory, run: Run) -> dict[WorkerId, WorkerInfo]:
    """The deployment's workers that hold a lease."""
    return {
        record.info.worker: record.info for record in await directory.workers() if record.info.worker in run.workers
    }


def of_this_life(
    told: Mapping[WorkerId, WorkerPins], live: Mapping[WorkerId, WorkerInfo]
) -> dict[WorkerId, WorkerPins]:
    """Reports of workers as they live now; what a life before this one has said is void."""
    return {worker: pins for worker, pins in told.items() if worker in live and pins.instance == live[worker].instance}


async def unpin(run: Run, settings: Settings, name: str) -> None:
    """Want a pin no longer; workers give it up with their next heartbeat.

    Raises:
        ConfigError: there is no such pin; names those that are there.
    """
    check_name(name)
    async with connected(run, settings) as (_, board):
        if not await board.remove(name):
            wanted = await board.look()
            known = ", ".join(sorted(wanted.pins)) if wanted is not None else ""
            raise ConfigError(f"no pin {name!r}; pins are: {known or 'none'}")


async def pin_state(run: Run, settings: Settings) -> dict[str, Any]:
    """What `kvroute pins` shows, as plain values; workers that are away are part of it."""
    own = list(map(WorkerId, run.workers))
    async with connected(run, settings) as (directory, board):
        wanted = await board.look()
        pins = sorted(wanted.pins.items()) if wanted is not None else []
        specs = {name: await board.spec(name) for name, _ in pins}
        targets = {name: spec.workers if spec is not None and spec.workers else own for name, spec in specs.items()}
        live = {record.info.worker: record.info for record in await directory.workers()}
        told = of_this_life(await board.reports({*own}.union(*targets.values())), live)
    return {
        "pins": [_pin(name, pin, specs[name], targets[name], told) for name, pin in pins],
        "workers": [
            {
                "worker": worker,
                "is_away": worker not in told,
                "num_pinned_blocks": told[worker].num_pinned_blocks if worker in told else None,
                "pin_budget_blocks": told[worker].budget_blocks if worker in told else None,
            }
            for worker in own
        ],
    }


def pin_text(state: Mapping[str, Any]) -> str:
    """The state of the pins as two tables."""
    rows = [("pin", "worker", "state", "blocks", "tokens", "expires in", "message")]
    for pin in state["pins"]:
        expires_in_s = pin["expires_in_s"]
        expiry = "-" if expires_in_s is None else f"{max(0.0, expires_in_s):.0f} s"
        for row in pin["workers"]:
            blocks, tokens = or_dash(row["num_blocks"]), or_dash(row["num_tokens"])
            rows.append((pin["name"], row["worker"], row["state"], blocks, tokens, expiry, row["message"]))
    budget_rows = [("worker", "pinned", "budget")]
    budget_rows += [
        (worker["worker"], or_dash(worker["num_pinned_blocks"]), or_dash(worker["pin_budget_blocks"]))
        for worker in state["workers"]
    ]
    tables = [table(rows)] if state["pins"] else ["no pins"]
    return "\n\n".join([*tables, table(budget_rows)])


async def forget_pins(run: Run, settings: Settings, say: Say) -> None:
    """Take what a deployment that has ended wanted off a store that outlives it.

    Pins for certain workers go with the workers. A pin for all belongs to every worker of its model and block size on
    that store: it stays while one of another deployment lives, and goes with the board where none does.
    """
    try:
        async with connected(run, settings) as (directory, board):
            own = set(map(WorkerId, run.workers))
            if not {record.info.worker for record in await directory.workers()} - own:
                await board.clear()
                return
            wanted = await board.look()
            for name, pin in wanted.pins.items() if wanted is not None else ():
                spec = await board.spec(name)
                if spec is not None and spec.workers and own.issuperset(spec.workers):
                    await board.remove(name, revision=pin.revision)
    except (ConfigError, DirectoryUnavailable) as error:
        say(f"pins stay in the store, at most for a day: {error}")


async def hand_over(run: Run, settings: Settings, leaving: WorkerId, heir: WorkerId, say: Say) -> None:
    """Have `heir` keep what is wanted of `leaving` by name, and wait until it keeps all that is wanted of it.

    A pin that the heir has no room for is told, and so is one that it still computes after `start_timeout_s`.
    """
    try:
        async with connected(run, settings) as (directory, board):
            wanted = await board.look()
            for name, pin in wanted.pins.items() if wanted is not None else ():
                spec = await board.spec(name)
                if spec is not None and leaving in spec.workers:
                    workers = tuple(dict.fromkeys(heir if worker == leaving else worker for worker in spec.workers))
                    renewed = replace(spec, workers=workers, revision=new_revision())
                    # Whoever puts it anew meanwhile knows the heir already.
                    await board.put(renewed, pin.expires_in_s, replacing=pin.revision)
            await _wait_for_pins(directory, board, heir, settings, say)
    except DirectoryUnavailable as error:
        say(f"pins of worker {leaving} are not handed over: {error}")


async def _wait_for_pins(directory: Directory, board: PinBoard, worker: WorkerId, settings: Settings, say: Say) -> None:
    """Wait until a worker keeps or refuses every pin that is wanted of it."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + settings.start_timeout_s
    specs: dict[Revision, PinSpec | None] = {}
    while True:
        live = {record.info.worker: record.info for record in await directory.workers()}
        told = of_this_life(await board.reports([worker]), live).get(worker)
        wanted = await board.look()
        name_to_report: dict[str, PinReport | None] = {}
        for name, pin in wanted.pins.items() if wanted is not None else ():
            if pin.revision not in specs:
                specs[pin.revision] = await board.spec(name)
            spec = specs[pin.revision]
            if spec is not None and spec.is_for(worker):
                name_to_report[name] = told.of(name, pin.revision) if told is not None else None
        warming = [name for name, report in name_to_report.items() if not report or report.state is PinState.WARMING]
        if not warming or worker not in live or loop.time() >= give_up_at_s:
            break
        await asyncio.sleep(settings.heartbeat_s / _POLLS_PER_HEARTBEAT)
    for name, report in name_to_report.items():
        if report is not None and report.state is PinState.REFUSED:
            say(f"worker {worker} does not keep pin {name}: {report.message}")
        elif name in warming:
            say(f"worker {worker} does not keep pin {name} yet, and goes on with it")


def new_revision() -> Revision:
    """One that nobody has used."""
    return Revision(secrets.token_hex(16))


def _pin(
    name: str,
    pin: WantedPin,
    spec: PinSpec | None,
    targets: Iterable[WorkerId],
    told: Mapping[WorkerId, WorkerPins],
) -> dict[str, Any]:
    return {
        "name": name,
        "is_for_all": spec is not None and not spec.workers,
        "num_prompt_tokens": spec.num_tokens if spec is not None else None,
        "expires_in_s": pin.expires_in_s,
        "workers": [_row(worker, told.get(worker), name, pin.revision) for worker in targets],
    }


def _row(worker: WorkerId, told: WorkerPins | None, name: str, revision: Revision) -> dict[str, Any]:
    report = told.of(name, revision) if told is not None else None
    is_pinned = report is not None and report.state is PinState.PINNED
    return {
        "worker": worker,
        "state": report.state.value if report is not None else "away" if told is None else PinState.WARMING.value,
        "num_blocks": report.num_blocks if report is not None and is_pinned else None,
        "num_tokens": report.num_tokens if report is not None and is_pinned else None,
        "message": report.message if report is not None else "",
    }
