"""A process with a router of its own on a running deployment, to be killed.

Usage: `python -m tests.support.router_child RUN_DIR NUM_REQUESTS MAX_TOKENS`. Tells each item on stdout: the request's
number and its new tokens, as one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from router import launch, runfile
from router.requests import GenerateRequest
from router.service import Router
from shared.config import Settings
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling
from tests.support.streams import Streamed, streams


async def tell(router: Router, number: int, one: Streamed) -> None:
    sampling = Sampling(one.max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(RequestId(one.name), pack_tokens(one.prompt), sampling)
    async for item in router.generate(request, one.trace):
        sys.stdout.write(json.dumps([number, item.token_ids]) + "\n")
        sys.stdout.flush()


async def main(run_dir: Path, num_requests: int, max_tokens: int) -> None:
    run = runfile.running(run_dir)
    async with launch.attached(run, Settings(**run.settings), lambda line: None) as serving:
        asked = streams("child", num_requests, max_tokens)
        await asyncio.gather(*(tell(serving.router, number, one) for number, one in enumerate(asked)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
