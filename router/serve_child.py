"""One server process of several: serves over workers that run already, until its standard input ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from router import attach, runfile
from router.http_server import bind, serving_http
from router.serve import make_front, open_files, read_keys, set_apart_what_stays
from router.serve_dashboard import words_of
from router.sibling_words import Place, telling_siblings
from router.siblings import BEAT, BEAT_S
from router.workers import Workers, serving_of
from shared.config import Settings
from shared.errors import KvrouteError
from shared.telemetry import set_up_logging

logger = logging.getLogger(__name__)


async def serve(order: dict[str, Any]) -> None:
    """Carry out an order that `router.serve` has made."""
    settings = Settings(**order["settings"])
    set_up_logging(settings.log_level, settings.log_format)
    workers = await _workers(settings, order["run"])
    place = Place(Path(order["folder"]), int(order["number"]), int(order["num_routers"]))
    entries = await asyncio.to_thread(read_keys, settings)
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    files = await asyncio.to_thread(open_files, settings)
    async with serving_of(workers, _nobody) as serving:
        front = make_front(serving, entries, files=files, place=place)
        with bind(settings.host, order["port"], is_shared=True) as shared, place.listen() as own:
            async with (
                telling_siblings(own, words_of(serving)),
                serving_http(front, [shared], front.limits),
            ):
                await set_apart_what_stays()
                sys.stdout.write("ready\n")
                sys.stdout.flush()
                beating = asyncio.create_task(_beat())
                ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
                cut = asyncio.create_task(told_to_end.wait())
                await asyncio.wait([ended, cut], return_when=asyncio.FIRST_COMPLETED)
                draining = asyncio.create_task(front.drain(settings.drain_timeout_s))
                await asyncio.wait([draining, cut], return_when=asyncio.FIRST_COMPLETED)
                for task in (cut, draining, beating):
                    task.cancel()


async def _beat() -> None:
    """Tell the first process again and again that this loop turns. One that does not read holds up nobody."""
    descriptor = sys.stdout.fileno()
    os.set_blocking(descriptor, False)
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(OSError):
            os.write(descriptor, BEAT)


async def _workers(settings: Settings, run: dict[str, Any] | None) -> Workers:
    """Those of the first process."""
    if run is None:
        servers = await attach.find_servers(settings, _nobody)
        return Workers(servers.settings, servers=servers)
    return Workers(settings, runfile.Run(**{**run, "workers": tuple(run["workers"])}))


def _nobody(line: str) -> None:
    """The first process has told it already."""


def main() -> None:
    order = json.loads(sys.stdin.readline())
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(order))
    except KvrouteError as error:
        logger.error("server process %s ends: %s", order["number"], error)
        sys.exit(1)


if __name__ == "__main__":
    main()
