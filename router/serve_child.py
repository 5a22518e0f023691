"""One server process of several: serves over workers that run already, until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from router import launch, runfile
from router.http_server import listen, serving_http
from router.serve import make_front, open_files, read_keys
from router.siblings import listen_for_siblings
from shared.config import Settings
from shared.errors import KvrouteError
from shared.telemetry import set_up_logging

logger = logging.getLogger(__name__)


async def serve(order: dict[str, Any]) -> None:
    """Carry out an order that `router.serve` has made."""
    settings = Settings(**order["settings"])
    set_up_logging(settings.log_level, settings.log_format)
    run = runfile.Run(**{**order["run"], "workers": tuple(order["run"]["workers"])})
    folder, number, num_routers = Path(order["folder"]), int(order["number"]), int(order["num_routers"])
    entries = await asyncio.to_thread(read_keys, settings)
    told_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told_to_end.set)
    files = await asyncio.to_thread(open_files, settings)
    async with launch.attached(run, settings, lambda line: None) as serving:
        front = make_front(serving, entries, files=files, folder=folder, num_routers=num_routers)
        with listen(settings.host, order["port"], is_shared=True) as shared, listen_for_siblings(folder, number) as own:
            async with serving_http(front, [shared, own], front.limits):
                sys.stdout.write("ready\n")
                sys.stdout.flush()
                ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
                cut = asyncio.create_task(told_to_end.wait())
                await asyncio.wait([ended, cut], return_when=asyncio.FIRST_COMPLETED)
                draining = asyncio.create_task(front.drain(settings.drain_timeout_s))
                await asyncio.wait([draining, cut], return_when=asyncio.FIRST_COMPLETED)
                cut.cancel()
                draining.cancel()


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
