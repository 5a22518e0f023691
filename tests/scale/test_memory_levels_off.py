"""Prompts with ends of their own come and go, and leave nothing behind: not in the store, nor in any of its readers.

Everything but the engine's computing is real: publisher, store, mirror, router with its hints, connection and host.
`KVROUTE_TEST_CHURN_REQUESTS` sets how many requests there are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from redis.asyncio import Redis

from router.hints import Hints
from shared.directory.embedded import EmbeddedStore
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.hashing import KEY_SIZE_BYTES
from shared.types import WorkerId
from tests.support.deployment import Deployment
from tests.support.rack import SCHEME, ask, rack
from tests.support.stores import LONG_LEASE_S, PATIENT_S, embedded_store, wait_until

__all__ = ["embedded_store"]
NUM_REQUESTS = int(os.environ.get("KVROUTE_TEST_CHURN_REQUESTS", "2000"))
pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900 + NUM_REQUESTS // 20)]

TAIL_BLOCKS = 60
NUM_AT_ONCE = 16
LIVE_BLOCKS = 1024
"""What the engine's pool holds: more than the tails of the requests under way at once, so that each reaches the store
before later ones drive it out."""
W0 = WorkerId("w0")


async def churn(deployed: Deployment, numbers: range, rng: random.Random) -> None:
    """Requests none of whose blocks any other one has, some at once."""
    slot = deployed.rack.worker_to_slot[W0]
    for start in range(0, len(numbers), NUM_AT_ONCE):
        tails = {
            number: list(rng.randbytes(TAIL_BLOCKS * SCHEME.block_size_tokens))
            for number in numbers[start : start + NUM_AT_ONCE]
        }
        await asyncio.gather(
            *(ask(deployed.router, f"request-{number}", tail, max_tokens=1) for number, tail in tails.items())
        )
        await wait_until(lambda: slot.publisher.is_quiet)
        slot.engine.seen.clear()


async def weigh(deployed: Deployment, client: Redis) -> Mapping[str, int]:
    """Bytes of each holder at rest, after its counts have been found to be those of the live set."""
    slot, hints, directory = deployed.rack.worker_to_slot[W0], deployed.router.hints, deployed.directory
    assert isinstance(directory, MirroredDirectory)
    publisher, mirror = slot.publisher, directory._mirror
    tag = f"kvr:{{{SCHEME.namespace}:w0}}:"
    await deployed.rack.settle()
    async with asyncio.timeout(PATIENT_S):
        await directory.caught_up()
        # Heartbeats drop the events that every mirror has read by then; promises end by themselves.
        while len(hints) or await client.xlen(f"{tag}events"):
            await asyncio.sleep(0.1)
    await wait_until(lambda: publisher.is_quiet)
    live = await slot.engine.resident()
    assert len(live) == LIVE_BLOCKS
    assert await directory.resident(W0) == directory.mirrored(W0) == publisher.resident == live
    names = {name.decode() async for name in client.scan_iter()}
    shared = {f"kvr:{{{SCHEME.namespace}}}:{what}" for what in ("workers", "routers")}
    own = {f"{tag}{what}" for what in ("meta", "blocks", "events")}
    assert {name for name in names if ":canary:" not in name} == shared | own
    assert len(names) == 6
    assert (mirror.num_keys, mirror.num_entries, mirror.num_slots, mirror.has_dropped) == (
        LIVE_BLOCKS,
        LIVE_BLOCKS,
        1,
        False,
    )
    assert (publisher.num_pending, slot.host.num_requests) == (0, 0)
    assert_no_promise_left(hints)
    (copy,) = mirror._worker_to_copy.values()
    return {
        "store": int((await client.info("memory"))["used_memory"]),
        "mirror": sum(map(sys.getsizeof, mirror._shards)) + sys.getsizeof(copy.resident),
        "publisher": sys.getsizeof(publisher._resident) + sys.getsizeof(publisher._pending),
    }


def assert_no_promise_left(hints: Hints) -> None:
    assert (hints._worker_to_num_promises, hints._live, list(hints._settled)) == ({}, set(), [])


async def test_tails_that_come_and_go_leave_only_the_live_set(embedded_store: EmbeddedStore) -> None:
    patience: dict[str, Any] = {"match_deadline_s": PATIENT_S, "publish_deadline_s": PATIENT_S}
    publishers, inner = (RedisDirectory(embedded_store.url, SCHEME, **patience) for _ in range(2))
    directory = MirroredDirectory(inner, inner.feed("router", deadline_s=PATIENT_S))
    directory.start()
    rng = random.Random(0)
    num_first = NUM_REQUESTS // 2
    try:
        async with (
            Redis.from_url(embedded_store.url) as client,
            rack(1, publishers, lease_s=LONG_LEASE_S, num_blocks=LIVE_BLOCKS) as built,
        ):
            built.directory = directory
            async with built.router() as router:
                deployed = Deployment(built, router, directory, inner, publishers)
                await directory.caught_up()
                await churn(deployed, range(num_first), rng)
                half_way = await weigh(deployed, client)
                await churn(deployed, range(num_first, NUM_REQUESTS), rng)
                at_the_end = await weigh(deployed, client)
                # Each block went in and, but for those that are live, came out again, through everything.
                num_changes = 2 * NUM_REQUESTS * TAIL_BLOCKS - LIVE_BLOCKS
                assert built.worker_to_slot[W0].publisher.num_block_events == num_changes
                # Where the machine stalls for ten seconds, a mirror loads what it has missed.
                assert directory.num_loads > 1 or directory.num_keys_applied == num_changes
    finally:
        await directory.close()
        await publishers.close()
    # A quarter of what the keys of the second half alone would weigh, were they kept: tables may double now and then.
    allowance_bytes = (NUM_REQUESTS - num_first) * TAIL_BLOCKS * KEY_SIZE_BYTES // 4
    growth = {name: at_the_end[name] - half_way[name] for name in half_way}
    logging.getLogger("tests.scale").info("%s requests; bytes half-way %s, growth %s", NUM_REQUESTS, half_way, growth)
    assert all(grown_bytes < allowance_bytes for grown_bytes in growth.values()), growth
