"""A router and its workers over a real store, with counts of what requests waited for and a comparison with the truth.

Every part has connections of its own, as processes have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from router.service import Router
from shared.directory.base import Directory, Match
from shared.directory.mirrored import MirroredDirectory
from shared.directory.redis import RedisDirectory
from shared.errors import DirectoryUnavailable
from shared.hashing import block_keys, pack_tokens, root_key
from shared.transport.channel import open_channel
from shared.transport.inspection import inspect_worker
from shared.types import BlockKey, Instance, RouterId, WorkerId
from tests.support.fakes import fake_tokens
from tests.support.rack import SCHEME, SECRET, Rack, ask, prompt, rack
from tests.support.stores import LONG_LEASE_S, PATIENT_S, wait_until
from tests.support.worker_child import FIRST_KEYS, instance_of

Reading = Literal["read through", "mirrored"]
READINGS: tuple[Reading, ...] = ("read through", "mirrored")
"""A router that asks the store for each match, and one that matches from a mirror, as routers do by default."""
NUM_REQUESTS = 12
"""In one round of requests."""
NUM_PREFIXES = 4
NUM_PREFIX_TOKENS = 160
_IMPATIENT_S = 0.1
"""Deadline of calls to a store that does not answer at all, whatever the machine does."""


class CountingDirectory(RedisDirectory):
    """Counts matches, and of those that failed the ones that waited for the store first."""

    num_matches = 0
    num_failed_matches = 0

    async def match(self, keys: Sequence[BlockKey], workers: Iterable[WorkerId]) -> Mapping[WorkerId, Match]:
        self.num_matches += 1
        try:
            return await super().match(keys, workers)
        except DirectoryUnavailable:
            self.num_failed_matches += 1
            raise

    @property
    def num_waited(self) -> int:
        return self.num_failed_matches - self.num_spared


class WorkerProcess:
    """A worker of one deployment that is a process of its own; see `worker_child`."""

    def __init__(self, url: str, name: str, folder: Path, *, life: int = 1, clock_offset_s: float = 0.0) -> None:
        self.worker, self.instance = WorkerId(name), instance_of(life)
        self._arguments = (url, name, str(life), str(folder), str(clock_offset_s))
        self._address = f"unix:{folder}/{name}-{life}.sock"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> WorkerProcess:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.worker_child", *self._arguments),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        await self.wait_for("ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def wait_for(self, word: str) -> None:
        """Until the process tells it on stdout."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        async with asyncio.timeout(PATIENT_S):
            told = await process.stdout.readline()
        assert told.decode().strip() == word, await self.kill()

    async def stall_in_a_snapshot(self) -> None:
        """Have it publish a snapshot of several chunks, until the first of them is in the store."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await process.stdin.drain()
        await self.wait_for("staged")

    async def kill(self) -> str:
        """As by a crash, unless it is dead already; all that it has logged."""
        process = self._process
        assert process is not None
        if process.returncode is None:
            process.kill()
        _, logged = await process.communicate()
        return logged.decode()

    async def resident(self) -> set[BlockKey]:
        """What its engine holds by its own account."""
        connect = functools.partial(open_channel, self._address)
        found = await inspect_worker(connect, self.worker, self.instance, RouterId("truth"), SECRET)
        return set(found.keys)


@dataclass(slots=True)
class Deployment:
    """A router over workers in this process and in others."""

    rack: Rack
    router: Router
    directory: Directory
    """The router's."""
    inner: CountingDirectory
    """What the router asks the store through: its directory, or what that mirrors."""
    publishers: RedisDirectory
    processes: list[WorkerProcess] = field(default_factory=list)
    num_asked: int = 0

    async def ask_all(self, *, max_tokens: int = 8) -> None:
        """One round of requests of a few prefixes, one after the other, each answered in full."""
        for _ in range(NUM_REQUESTS):
            self.num_asked += 1
            token_ids = prompt(self.num_asked % NUM_PREFIXES, NUM_PREFIX_TOKENS, self.num_asked)
            answer, _ = await ask(self.router, f"request-{self.num_asked}", token_ids, max_tokens)
            assert answer == fake_tokens(token_ids, max_tokens)

    async def wait_for_truth(self) -> None:
        """Until store and router know the workers that there are, and tell of each what its engine holds."""
        async with asyncio.timeout(2 * PATIENT_S):
            while not await self._is_true():
                await asyncio.sleep(0.02)
        assert not any(slot.publisher.is_evicted for slot in self.rack.worker_to_slot.values())

    async def _is_true(self) -> bool:
        slots = self.rack.worker_to_slot
        if not all(slot.publisher.is_quiet and slot.publisher._lost_at_s is None for slot in slots.values()):
            return False
        truth = {worker: (slot.info.instance, await slot.engine.resident()) for worker, slot in slots.items()}
        truth |= {process.worker: (process.instance, await process.resident()) for process in self.processes}
        prompts = [pack_tokens(prompt(number, NUM_PREFIX_TOKENS, number)) for number in range(NUM_PREFIXES)]
        chains = [block_keys(token_ids, SCHEME.block_size_tokens, root_key(SCHEME)) for token_ids in prompts]
        try:
            for chain in (*chains, FIRST_KEYS):
                if await self.directory.match(chain, truth) != _true_matches(truth, chain):
                    return False
            held = {worker: await self.inner.resident(worker) for worker in truth}
            listed = {record.info.worker: record.info.instance for record in await self.inner.workers()}
        except DirectoryUnavailable:
            return False
        if (
            not listed
            == self.router.fleet.worker_to_instance
            == {one: instance for one, (instance, _) in truth.items()}
        ):
            return False
        mirrored = held
        if isinstance(self.directory, MirroredDirectory):
            if not truth.keys() <= self.directory._mirror.shown:
                return False  # one that holds nothing would look as if it were there
            mirrored = {worker: self.directory.mirrored(worker) or set() for worker in truth}
        return held == mirrored == {worker: keys for worker, (_, keys) in truth.items()}

    def lose_patience(self) -> None:
        """Give every call up soon."""
        self._set_deadlines(_IMPATIENT_S)

    def regain_patience(self) -> None:
        """Undo that, and end the breaker's rest."""
        self._set_deadlines(PATIENT_S)
        for server in self.inner._connection._servers.primaries:
            server.breaker._rests_until_s = 0.0

    def _set_deadlines(self, deadline_s: float) -> None:
        self.inner._match_deadline_s = deadline_s
        self.publishers._publish_deadline_s = deadline_s
        if isinstance(self.directory, MirroredDirectory):
            feed: Any = self.directory._feed
            feed._deadline_s = deadline_s

    async def until_everybody_has_noticed(self) -> None:
        """Until the router and each publisher have met the outage of the store."""
        publishers = [slot.publisher for slot in self.rack.worker_to_slot.values()]
        await wait_until(
            # A call that began before the outage, with all its patience, may be the one to notice.
            lambda: self.inner.is_resting and all(publisher._lost_at_s is not None for publisher in publishers),
            deadline_s=2 * PATIENT_S,
        )


def _true_matches(
    truth: Mapping[WorkerId, tuple[Instance, set[BlockKey]]], chain: Sequence[BlockKey]
) -> dict[WorkerId, Match]:
    worker_to_match = {
        worker: Match(instance, next((depth for depth, key in enumerate(chain) if key not in held), len(chain)))
        for worker, (instance, held) in truth.items()
    }
    return {worker: match for worker, match in worker_to_match.items() if match.num_blocks}


@contextlib.asynccontextmanager
async def deployment(
    url: str, reading: Reading, *, num_workers: int = 3, processes: Sequence[WorkerProcess] = (), rest_s: float = 0.05
) -> AsyncIterator[Deployment]:
    """A deployment that has answered a round of requests; its router's breaker rests for `rest_s`.

    Leases are long, so that a machine that stalls is no fault of its own.
    """
    patience = {"match_deadline_s": PATIENT_S, "publish_deadline_s": PATIENT_S}
    publishers = RedisDirectory(url, SCHEME, **patience)
    inner = CountingDirectory(url, SCHEME, **patience, rest_s=rest_s)
    directory: Directory = inner
    if reading == "mirrored":
        directory = mirrored = MirroredDirectory(inner, inner.feed("router", deadline_s=PATIENT_S), refresh_s=0.1)
        mirrored.start()
    try:
        async with rack(num_workers, publishers, heartbeat_s=0.2, lease_s=LONG_LEASE_S, num_blocks=1 << 14) as built:
            built.directory = directory
            async with built.router(refresh_s=0.1) as router:
                deployed = Deployment(built, router, directory, inner, publishers, list(processes))
                await deployed.ask_all()
                await deployed.wait_for_truth()
                yield deployed
    finally:
        await directory.close()
        await publishers.close()


# What is told in the log, less what differs from run to run.
_BEGINNING = re.compile(
    r"the directory's store (misses|answers again)|worker \S+ (cannot publish|publishes again|left|cannot be reached)"
)


def told(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """Every line of warning or worse that ours have logged, by what it is about."""
    lines = [
        re.sub(r" at 127\.0\.0\.1:\d+", "", record.getMessage())
        for record in caplog.records
        if record.levelno >= logging.WARNING and re.match("router|worker|shared", record.name)
    ]
    return Counter(found[0] if (found := _BEGINNING.match(line)) else line for line in lines)
