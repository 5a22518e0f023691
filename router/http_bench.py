"""Measures what the HTTP service costs: a router with its front in this process, workers and clients in others.

Counted is all processor time of this process, threads included: from a request's first byte to its answer's last one,
with parsing, tokenising, hashing, routing, the connection to the workers and detokenising. Beside it stands what a
server takes that only reads and answers the same, measured in turn: the part that is not the router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from router.http import Backend, Front
from router.http_floor import serving_floor
from router.http_server import bind, serving_http
from router.keys import KeyRing
from router.policies import make_policy
from router.serve import set_apart_what_stays
from router.service import Router
from router.tokenizer import Tokenizer
from shared.config import load_settings
from shared.directory.base import WorkerRecord
from shared.directory.memory import MemoryDirectory
from shared.hashing import block_keys, pack_tokens, parity_key, root_key
from shared.telemetry import Metrics
from shared.transport.base import OnChange, WorkerClient
from shared.transport.client import connect_worker
from shared.types import CacheScheme, Epoch, EventBatch, Holder, RouterId, WorkerId, WorkerInfo
from worker.bench_host import INSTANCE, MAX_MODEL_LEN_TOKENS, MAX_NUM_SEQS, SECRET, address_of
from worker.engines.demo_model import prepare_model

_SEED = 0
_NUM_WORKERS = 8
_NUM_CLIENTS = 16
_STEP_S = 0.02
_ANSWER_TOKENS = 16
_SHORT_TOKENS, _LONG_TOKENS, _EARLIER_TOKENS = 200, 8192, 7500
_NUM_CONVERSATIONS = 8
_MESSAGE_TOKENS = 250
"""Of each earlier message; what is earlier alternates between user and assistant."""
_LEASE_S = 1e6
MODEL = "smollm2"
_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
]


async def measure(
    say: Callable[[str], None],
    *,
    num_requests: int = 1000,
    num_rounds: int = 3,
    num_stream_tokens: int = 200,
    num_streams: int = 128,
) -> dict[str, float]:
    """All figures by name."""
    folder = await asyncio.to_thread(prepare_model, MODEL, load_settings(flags={}, environment={}).model_cache_dir)
    tokenizer = await asyncio.to_thread(Tokenizer, folder)
    rng = random.Random(_SEED)
    figures: dict[str, float] = {"seed": float(_SEED), "num_requests": float(num_requests)}
    with tempfile.TemporaryDirectory(prefix="kvroute-") as name:
        async with Rig(Path(name), tokenizer).running(step_s=0.0) as rig:
            for kind in ("short", "long"):
                say(f"{num_rounds} times {num_requests} {kind} requests, half of them streamed")
                figures |= await _measure_requests(rig, kind, rng, num_requests, num_rounds)
            say("short requests, one after the other")
            figures["added_latency_ms_p50"] = await _measure_latency(rig, rng)
        async with Rig(Path(name), tokenizer).running(step_s=_STEP_S) as rig:
            say(f"{num_rounds} times {num_streams} streams of {num_stream_tokens} tokens, one each {_STEP_S:g} s")
            figures |= await _measure_streams(rig, rng, num_rounds, num_streams, num_stream_tokens)
    return figures


async def _measure_requests(
    rig: Rig, kind: str, rng: random.Random, num_requests: int, num_rounds: int
) -> dict[str, float]:
    rounds, floors = [], []
    conversations = _conversations(rng) if kind == "long" else [[]]
    if kind == "long":
        await rig.hold(conversations)
    for number in range(num_rounds + 1):
        # The first round warms up, with each conversation's earlier messages among others.
        size = num_requests if number else 8 * len(conversations)
        bodies = [
            chat_body(rng, conversations[index % len(conversations)], kind, is_streamed=index % 2 == 1)
            for index in range(size)
        ]
        done = await rig.load(bodies, _NUM_CLIENTS)
        floor = await rig.load(bodies, _NUM_CLIENTS, port=rig.floor_port)
        if number:
            rounds.append(done)
            floors.append(floor)
    cpu_s, floor_cpu_s = (min(done.cpu_s for done in loads) for loads in (rounds, floors))
    return {
        f"rps_{kind}": median(num_requests / done.wall_s for done in rounds),
        f"floor_cpu_s_per_1000_{kind}": 1e3 * floor_cpu_s / num_requests,
        f"{kind}_over_floor": cpu_s / floor_cpu_s,
        f"cpu_s_per_1000_{kind}": 1e3 * cpu_s / num_requests,
        f"cpu_s_per_1000_{kind}_max": 1e3 * max(done.cpu_s for done in rounds) / num_requests,
        f"prompt_tokens_{kind}": rounds[-1].num_prompt_tokens / num_requests,
    }


async def _measure_latency(rig: Rig, rng: random.Random) -> float:
    """What workers that answer at once leave of a request's time, from client to client."""
    done = await rig.load([chat_body(rng, [], "short", is_streamed=False, num_tokens=1) for _ in range(300)], 1)
    return 1e3 * median(done.latencies_s)


async def _measure_streams(
    rig: Rig, rng: random.Random, num_rounds: int, num_streams: int, num_tokens: int
) -> dict[str, float]:
    rates = []
    for number in range(num_rounds + 1):
        bodies = [
            chat_body(rng, [], "short", is_streamed=True, num_tokens=num_tokens if number else 10)
            for _ in range(num_streams)
        ]
        done = await rig.load(bodies, num_streams)
        if number:
            rates.append(done.num_tokens / done.cpu_s)
    return {
        "num_streams": float(num_streams),
        "stream_tokens_per_s_per_core": max(rates),
        "stream_tokens_per_s_per_core_min": min(rates),
    }


@dataclass(frozen=True, slots=True)
class _Done:
    """One load, as clients and this process saw it."""

    cpu_s: float
    wall_s: float
    latencies_s: list[float]
    num_tokens: int
    num_prompt_tokens: int


class Rig:
    """A router and its front, between workers and clients of other processes."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._scheme = CacheScheme(MODEL, 64)
        self._directory = MemoryDirectory(self._scheme, asyncio.get_running_loop().time)
        self._num_batches = 0
        self.port = self.floor_port = 0

    @contextlib.asynccontextmanager
    async def running(self, *, step_s: float, engine: str = "instant") -> AsyncIterator[Rig]:
        pipe = asyncio.subprocess.PIPE
        workers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker.bench_host", str(self._folder), str(_NUM_WORKERS), str(step_s), engine),
            stdin=pipe,
            stdout=pipe,
        )
        try:
            assert workers.stdout is not None
            assert await workers.stdout.readline() == b"ready\n"
            async with self._router() as router:
                front = self._front(router)
                self.router, self.front = router, front
                listener = bind("127.0.0.1", 0)
                self.port = listener.getsockname()[1]
                async with serving_http(front, [listener], front.limits), serving_floor() as self.floor_port:
                    await set_apart_what_stays()
                    yield self
        finally:
            if workers.stdin is not None:
                workers.stdin.close()
            await workers.wait()

    async def hold(self, conversations: Sequence[Sequence[dict[str, str]]]) -> None:
        """Tell the directory that a worker each holds the earlier messages."""
        for number, messages in enumerate(conversations):
            token_ids = pack_tokens(self._tokenizer.render_chat(messages, add_generation_prompt=False))
            keys = block_keys(token_ids, self._scheme.block_size_tokens, root_key(self._scheme))
            worker = WorkerId(f"w{number % _NUM_WORKERS}")
            holder = Holder(worker, Epoch(INSTANCE))
            await self._directory.apply(EventBatch(holder, 1 + number // _NUM_WORKERS, tuple(keys), ()))

    async def load(self, bodies: Sequence[bytes], num_clients: int, *, port: int | None = None) -> _Done:
        """Have all bodies answered, by the router's front unless another port is named.

        Raises `AssertionError` where one was not.
        """
        path = self._folder / "bodies"
        path.write_bytes(b"\n".join(bodies))
        pipe = asyncio.subprocess.PIPE
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router.http_load", str(port or self.port), str(path), str(num_clients)),
            stdin=pipe,
            stdout=pipe,
            limit=64 << 20,
        )
        assert clients.stdout is not None
        assert clients.stdin is not None
        assert await clients.stdout.readline() == b"ready\n"
        started_cpu_s = time.process_time()
        clients.stdin.write(b"\n")
        told: dict[str, Any] = json.loads(await clients.stdout.readline())
        cpu_s = time.process_time() - started_cpu_s
        await clients.wait()
        assert told["num_failed"] == 0, f"{told['num_failed']} requests failed"
        return _Done(cpu_s, told["wall_s"], told["latencies_s"], told["num_tokens"], told["num_prompt_tokens"])

    @contextlib.asynccontextmanager
    async def _router(self) -> AsyncIterator[Router]:
        router_id = RouterId("bench")
        rng = random.Random(_SEED)
        own_key = parity_key(self._scheme, self._tokenizer.fingerprint)

        def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
            return connect_worker(record.info, router_id, SECRET, on_change=on_change, rng=rng)

        for number in range(_NUM_WORKERS):
            worker = WorkerId(f"w{number}")
            info = WorkerInfo(
                worker,
                INSTANCE,
                address_of(self._folder, worker),
                self._scheme,
                own_key,
                num_blocks=1 << 20,
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len_tokens=MAX_MODEL_LEN_TOKENS,
                engine="instant",
                eviction="none",
            )
            await self._directory.register(info, Epoch(INSTANCE), _LEASE_S)
        router = Router(
            router_id,
            self._directory,
            connect,
            make_policy("cost"),
            scheme=self._scheme,
            parity_key=own_key,
            metrics=Metrics(),
            rng=rng,
        )
        async with router:
            yield router

    def _front(self, router: Router) -> Front:
        backend = Backend.over(router, self._tokenizer, MODEL, MAX_MODEL_LEN_TOKENS, "cost")
        return Front(backend, KeyRing.of_one("", asyncio.get_running_loop().time), name="bench")


def _conversations(rng: random.Random) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": ("user", "assistant")[number % 2], "content": _text(rng, _MESSAGE_TOKENS)}
            for number in range(_EARLIER_TOKENS // (_MESSAGE_TOKENS + 5))
        ]
        for _ in range(_NUM_CONVERSATIONS)
    ]


def chat_body(
    rng: random.Random,
    earlier: Sequence[dict[str, str]],
    kind: str,
    *,
    is_streamed: bool,
    num_tokens: int = _ANSWER_TOKENS,
) -> bytes:
    num_new_tokens = _SHORT_TOKENS if kind == "short" else _LONG_TOKENS - _EARLIER_TOKENS
    last = {"role": "user", "content": _text(rng, num_new_tokens - 10)}
    body = {"model": MODEL, "messages": [*earlier, last], "max_tokens": num_tokens, "temperature": 0.0}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def _text(rng: random.Random, num_words: int) -> str:
    """So many words of one token each."""
    return " ".join(rng.choices(_WORDS, k=num_words))
