"""Clients of a server that is measured, as a process of their own: cheap, and with nothing of ours in them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LONGEST_ANSWER_BYTES = 64 << 20


@dataclass(slots=True)
class _Tally:
    latencies_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0


async def run(port: int, bodies: list[bytes], num_clients: int) -> dict[str, object]:
    """Send all bodies by so many clients, each with a connection that it keeps."""
    tally = _Tally()
    left = iter(bodies)
    loop = asyncio.get_running_loop()
    started_at_s = loop.time()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_ANSWER_BYTES)
        for body in left:
            sent_at_s = loop.time()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body)
            )
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            if b"transfer-encoding: chunked" in head:
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                answer = await reader.readexactly(length)
            tally.latencies_s.append(loop.time() - sent_at_s)
            _count(tally, head, answer)
        writer.close()

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return {
        "wall_s": loop.time() - started_at_s,
        "latencies_s": tally.latencies_s,
        "num_failed": tally.num_failed,
        "num_tokens": tally.num_tokens,
        "num_prompt_tokens": tally.num_prompt_tokens,
    }


def _count(tally: _Tally, head: bytes, answer: bytes) -> None:
    found = answer.rpartition(b'"usage":')[2]
    if not head.startswith(b"HTTP/1.1 200") or b'"completion_tokens":' not in found:
        tally.num_failed += 1
        return
    tally.num_tokens += _number(found, b'"completion_tokens":')
    tally.num_prompt_tokens += _number(found, b'"prompt_tokens":')


def _number(raw: bytes, name: bytes) -> int:
    return int(raw.split(name)[1].split(b",")[0].split(b"}")[0])


def answer_parent(
    name: str,
    kind: Callable[[str], Any],
    run: Callable[[int, list[bytes], Any], Coroutine[Any, Any, Mapping[str, object]]],
) -> None:
    """What a load generator's process does: read its work, say that it is ready, wait for a line, run, tell figures.

    Its arguments are the server's port, a file of bodies, and one of `run`'s own, named here.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("bodies", type=Path)
    parser.add_argument(name, type=kind)
    arguments = parser.parse_args()
    # Read whole before anything is sent, so that nothing of it counts.
    bodies = arguments.bodies.read_bytes().splitlines()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    sys.stdout.write(json.dumps(asyncio.run(run(arguments.port, bodies, getattr(arguments, name)))) + "\n")


if __name__ == "__main__":
    answer_parent("num_clients", int, run)
