"""A small real server that speaks as `vllm serve` 0.32 does: HTTP, Prometheus metrics, KV events and their replay.

Bodies, headers and events have the form that was recorded from a real one. Tokens and blocks are a simulated engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import zmq
import zmq.asyncio
from aiohttp import web

from shared.errors import ContextTooLong, InvalidRequest
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme, FinishReason, RequestId, Sampling
from tests.support.tokenizers import byte_level_tokenizer
from worker.engines.base import BlockChange, EngineRequest
from worker.engines.profiles import LatencyProfile
from worker.engines.simulated import answer
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions

PROFILE = LatencyProfile("fast", 2e-4, 1e-6, 1e-10, 1e-6, 1e-9)
VOCABULARY_SIZE = 256
_END_SEQ = (-1).to_bytes(8, "big", signed=True)
_CONFIG = ("block_size", "num_gpu_blocks", "enable_prefix_caching")


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """What a server is started with."""

    model: str = "tiny"
    root: str = "tiny"
    block_size: int = 32
    num_blocks: int = 64
    max_model_len: int = 1024
    max_num_seqs: int = 8
    has_events: bool = True
    has_replay: bool = True
    has_metrics: bool = True
    has_prompt_tokens_details: bool = True
    is_dev_mode: bool = True
    buffer_steps: int = 10_000
    topic: str = "kv@w0"
    is_array_encoded: bool = False
    """vLLM before 0.26."""
    has_byte_hashes: bool = False
    """VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""
    event_block_size: int | None = None
    """What events say, where that is not the truth."""
    adapters: tuple[str, ...] = ()
    api_key: str = ""
    num_ranks: int = 1
    profile: LatencyProfile = PROFILE


@dataclass(frozen=True, slots=True)
class _Block:
    """What an event tells of one block."""

    parent: BlockKey | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[str, ...] | None
    adapter: str | None


class _Rank:
    """One engine of a server, with its event sockets."""

    def __init__(self, options: FakeOptions, context: zmq.asyncio.Context, rank: int) -> None:
        self.options = options
        self.rank = rank
        self.scheme = CacheScheme(options.model, options.block_size)
        simulated = SimulatorOptions(
            options.profile,
            self.scheme,
            num_blocks=options.num_blocks,
            max_model_len_tokens=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            vocabulary_size=VOCABULARY_SIZE,
        )
        self.engine = SimulatorEngine(simulated, self._on_blocks, lambda reason: None)
        self.sent: list[bytes] = []
        self.num_lost = 0
        """Batches from now on that the subscription does not bring."""
        self.num_tokens = 0
        self._blocks: dict[BlockKey, _Block] = {}
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self.pub: Any = None

    def bind(self, events: str, replay: str) -> None:
        self.pub = self._context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.bind(events)
        if self.options.has_replay:
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            router.bind(replay)
            self._task = asyncio.create_task(self._serve_replay(router))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.close()

    def name_blocks(self, token_ids: Sequence[int], output: Sequence[int], salt: str, adapter: str) -> str:
        """Remember what blocks of a prompt and its answer consist of; the salt that the simulated engine is given."""
        inner = f"{adapter}\0{salt}" if adapter else salt
        tokens = [*token_ids, *output]
        size = self.options.block_size
        parent: BlockKey | None = None
        for number, key in enumerate(block_keys(pack_tokens(tokens), size, root_key(self.scheme, salt=inner))):
            extras = (*((adapter,) if adapter else ()), *((salt,) if salt and not number else ()))
            block = tuple(tokens[number * size : (number + 1) * size])
            self._blocks[key] = _Block(parent, block, extras or None, adapter or None)
            parent = key
        return inner

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Send one batch, unless it is to be lost."""
        if self.options.is_array_encoded:
            payload = msgpack.packb([1764438000.25, [[*event.values()] for event in events], self.rank])
        else:
            payload = msgpack.packb([1764438000.25, events, self.rank])
        self.send(len(self.sent), payload)
        self.sent.append(payload)

    def send(self, seq: int, payload: bytes) -> None:
        if self.num_lost:
            self.num_lost -= 1
        elif self.pub is not None:
            # A PUB socket never waits: what it cannot send is dropped.
            self.pub.send_multipart([self.options.topic.encode(), seq.to_bytes(8, "big"), payload])

    def _on_blocks(self, change: BlockChange) -> None:
        events = [{"type": "AllBlocksCleared"}] if change.is_reset else []
        events += [self._stored(key) for key in change.stored]
        if change.removed:
            hashes = [self._hash(key) for key in change.removed]
            events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})
        self.publish(events)

    def _stored(self, key: BlockKey) -> dict[str, Any]:
        block = self._blocks[key]
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(key)],
            "parent_block_hash": None if block.parent is None else self._hash(block.parent),
            "token_ids": list(block.token_ids),
            "block_size": self.options.event_block_size or self.options.block_size,
            "lora_id": None if block.adapter is None else 1,
            "medium": "GPU",
            "lora_name": block.adapter,
            "extra_keys": [None if block.extra_keys is None else list(block.extra_keys)],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    def _hash(self, key: BlockKey) -> int | bytes:
        return key * 2 if self.options.has_byte_hashes else int.from_bytes(key[:8], "big")

    async def _serve_replay(self, router: Any) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            topic = self.options.topic.encode()
            for seq in range(max(0, len(self.sent) - self.options.buffer_steps), len(self.sent)):
                if seq >= int.from_bytes(start, "big"):
                    await router.send_multipart([client, b"", topic, seq.to_bytes(8, "big"), self.sent[seq]])
            await router.send_multipart([client, b"", b"", _END_SEQ, b""])


@dataclass
class FakeVllm:
    """One life of a server; `start`, then `stop` or `kill`. Another life at the same ports is another object."""

    options: FakeOptions = field(default_factory=FakeOptions)
    port: int = 0
    event_ports: tuple[int, ...] = ()
    """Of the first rank: events and replay."""
    started_at_s: float = 1.0
    answer_with: Any = None
    """Called with each completion's request in place of computing it, if set."""
    num_open: int = 0
    """Completions under way."""
    num_asked: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_healthy: bool = True
    is_hanging: bool = False
    num_failing_metrics: int = 0
    """Answers of `/metrics` from now on that are none."""
    is_tokenizer_other: bool = False
    num_foreign_running: int = 0
    ranks: list[_Rank] = field(default_factory=list)
    transports: set[Any] = field(default_factory=set)
    """Of completions under way."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def attach(self) -> str:
        """The value of `--attach` for it."""
        events = f",events=tcp://127.0.0.1:{self.event_ports[0]}" if self.options.has_events else ""
        replay = f",replay=tcp://127.0.0.1:{self.event_ports[1]}" if events and self.options.has_replay else ""
        seqs = f",max-num-seqs={self.options.max_num_seqs}"
        return f"{self.url}{events}{replay}{seqs}"

    async def start(self) -> FakeVllm:
        self.context = zmq.asyncio.Context()
        self.port = self.port or free_ports(1)[0]
        self.event_ports = self.event_ports or free_ports(self.options.num_ranks)
        for number in range(self.options.num_ranks):
            rank = _Rank(self.options, self.context, number)
            self.ranks.append(rank)
            if self.options.has_events:
                self._bind_rank(rank, number)
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/tokenize", self._tokenize),
            ]
        )
        if self.options.has_metrics:
            app.add_routes([web.get("/metrics", self._metrics)])
        if self.options.is_dev_mode:
            app.add_routes([web.post("/reset_prefix_cache", self._reset)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        return self

    def _bind_rank(self, rank: _Rank, number: int) -> None:
        first, second = (port + number for port in self.event_ports)
        rank.bind(f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{second}")

    async def stop(self) -> None:
        """End as a process does that is killed: what is under way breaks off."""
        for transport in self.transports:
            transport.abort()
        for rank in self.ranks:
            await rank.close()
        await self.runner.cleanup()
        self.context.destroy(linger=0)

    async def restarted(self, **changes: Any) -> FakeVllm:
        """Another life at the same addresses, after the end of this one."""
        await self.stop()
        options = replace(self.options, **changes)
        return await FakeVllm(options, self.port, self.event_ports, self.started_at_s + 1.0).start()

    # What it answers.

    async def _health(self, request: web.Request) -> web.Response:
        while self.is_hanging:
            await asyncio.sleep(0.01)
        return web.Response(status=200 if self.is_healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.options.api_key and request.headers.get("Authorization") != f"Bearer {self.options.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        names = [(self.options.model, None), *((adapter, self.options.model) for adapter in self.options.adapters)]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 1796010030,
                "owned_by": "vllm",
                "root": self.options.root,
                "parent": parent,
                "max_model_len": self.options.max_model_len if parent is None else None,
            }
            for name, parent in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        token_ids = byte_level_tokenizer().encode(body["prompt"]).ids + [0] * self.is_tokenizer_other
        return web.json_response({"count": len(token_ids), "max_model_len": 1024, "tokens": token_ids})

    async def _reset(self, request: web.Request) -> web.Response:
        for rank in self.ranks:
            await rank.engine.reset_cache()
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.num_failing_metrics:
            self.num_failing_metrics -= 1
            return web.Response(status=500)
        lines = [f"process_start_time_seconds {self.started_at_s}"]
        for rank in self.ranks:
            stats = rank.engine.stats()
            labels = f'engine="{rank.rank}",model_name="{self.options.model}"'
            config = {
                "block_size": self.options.block_size,
                "num_gpu_blocks": self.options.num_blocks + 1,
                "enable_prefix_caching": True,
            }
            told = ",".join(f'{name}="{config[name]}"' for name in _CONFIG)
            lines += [
                f"vllm:num_requests_running{{{labels}}} {float(stats.num_running + self.num_foreign_running)}",
                f"vllm:num_requests_waiting{{{labels}}} {float(stats.num_waiting)}",
                f"vllm:kv_cache_usage_perc{{{labels}}} {stats.kv_used_blocks / self.options.num_blocks}",
                f"vllm:prompt_tokens_total{{{labels}}} {float(rank.engine.num_prefilled_tokens)}",
                f"vllm:generation_tokens_total{{{labels}}} {float(rank.num_tokens)}",
                f'vllm:cache_config_info{{{told},engine="{rank.rank}"}} 1.0',
            ]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        self.headers.append(dict(request.headers))
        if self.answer_with is not None:
            answered: web.StreamResponse = await self.answer_with(request)
            return answered
        body = await request.json()
        self.bodies.append(body)
        model = body["model"]
        if model != self.options.model and model not in self.options.adapters:
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        prompt = body["prompt"]
        if any(token_id < 0 for token_id in prompt):
            return _error(400, "Input should be greater than or equal to 0", "Bad Request", "body.prompt")
        if not 0 < body["top_p"] <= 1:
            return _error(400, f"top_p must be in (0, 1], got {body['top_p']}.", "BadRequestError", "top_p")
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if any(token_id >= VOCABULARY_SIZE for token_id in prompt):
            error = {"message": f"Token id {max(prompt)} is out of vocabulary", "type": "BadRequestError", "code": 400}
            await response.write(_event({"error": error}) + b"data: [DONE]\n\n")
            return response
        if schema.get("type") == "banana":
            error = {"message": 'Unsupported type "banana"', "type": "BadRequestError", "param": None, "code": 400}
            await response.write(_event({"error": error}) + b"data: [DONE]\n\n")
            return response
        rank = self.ranks[int(request.headers.get("X-data-parallel-rank", "0"))]
        self.num_open += 1
        self.transports.add(request.transport)
        try:
            await self._compute(rank, body, response)
        except (InvalidRequest, ContextTooLong) as error:
            await response.write(_event({"error": {"message": str(error), "code": 400}}) + b"data: [DONE]\n\n")
        finally:
            self.num_open -= 1
            self.transports.discard(request.transport)
        return response

    async def _compute(self, rank: _Rank, body: dict[str, Any], response: web.StreamResponse) -> None:
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        stops = frozenset(body["stop_token_ids"])
        output = answer(pack_tokens(prompt), max_tokens, VOCABULARY_SIZE, stops)
        adapter = body["model"] if body["model"] != self.options.model else ""
        salt = rank.name_blocks(prompt, output, body.get("cache_salt", ""), adapter)
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True, stop_token_ids=tuple(stops))
        asked = EngineRequest(
            RequestId(f"cmpl-{self.num_asked}"), prompt, sampling, salt, priority=body.get("priority", 0)
        )
        head = {"id": asked.request, "object": "text_completion", "created": 1796010044, "model": body["model"]}
        cached_tokens, num_tokens = 0, 0
        async for delta in rank.engine.generate(asked):
            cached_tokens = delta.cached_tokens if delta.cached_tokens is not None else cached_tokens
            num_tokens += len(delta.token_ids)
            rank.num_tokens += len(delta.token_ids)
            choice = {
                "index": 0,
                "text": "x" * len(delta.token_ids),
                "logprobs": _logprobs(delta.token_ids, body.get("logprobs")),
                "finish_reason": delta.finish and FinishReason(delta.finish).value,
                "stop_reason": None,
                "prompt_token_ids": prompt if num_tokens == len(delta.token_ids) else None,
                "token_ids": list(delta.token_ids),
            }
            await response.write(_event({**head, "choices": [choice]}))
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        if self.options.has_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        await response.write(_event({**head, "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")


def _logprobs(token_ids: Sequence[int], num_top: int | None) -> dict[str, Any] | None:
    """Of made-up tokens, with names as `return_tokens_as_token_ids` has them: the token is the likeliest."""
    if num_top is None:
        return None
    top = [{f"token_id:{token_id + place}": -0.5 - place for place in range(num_top + 1)} for token_id in token_ids]
    names = [f"token_id:{token_id}" for token_id in token_ids]
    offsets = list(range(len(token_ids)))
    return {"tokens": names, "token_logprobs": [-0.5] * len(names), "top_logprobs": top, "text_offset": offsets}


def free_ports(num_ranks: int) -> tuple[int, int]:
    """Where so many consecutive ports are free, twice.

    Not among those that the system hands out, one of which would be somebody else's before a server is back.
    """
    rng = random.SystemRandom()
    while True:
        first = rng.randrange(10_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + 2 * num_ranks):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first, first + num_ranks


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _error(status: int, message: str, kind: str, param: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)
