"""An OpenAI-compatible `vllm serve` that somebody else runs, behind the `Engine` protocol.

Requests go over HTTP with token ids, KV events come over ZMQ. The server is neither started nor ended here, and serves
others beside us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from shared.errors import ConfigError, EngineError, InvalidRequest, KvrouteError, PinRefused, UnknownPin
from shared.types import BlockKey, FinishReason, RequestId
from worker.engines.attached_answers import (
    CompletionStream,
    ServedModels,
    ServerMetrics,
    another_process,
    completion_body,
)
from worker.engines.attached_beat import Beat
from worker.engines.attached_events import AttachedEvents
from worker.engines.attached_http import ServerClient, ServerGone, drain
from worker.engines.attached_options import AttachedOptions
from worker.engines.attached_steps import StreamSteps
from worker.engines.base import (
    EngineDelta,
    EngineInfo,
    EngineRequest,
    EngineStats,
    OnBlocks,
    OnDeath,
    PinnedPrefix,
    check_length,
    refuse_more,
)

logger = logging.getLogger(__name__)

_NO_PINS = "the server is somebody else's, and lets nobody keep blocks in its pool"


class _Live:
    """One request under way and how to interrupt it."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.response: aiohttp.ClientResponse | None = None
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.is_cancelled = True
        if not self.cancelled.done():
            self.cancelled.set_result(None)
        if self.response is not None:
            self.response.close()


class AttachedEngine:
    """One engine of one server, in one life of its process: `start` once, then everything else, then `close`.

    When the process ends, or another one answers in its place, `on_death` is told: what was known of the cache is worth
    nothing then, and a new `AttachedEngine` begins from nothing.
    """

    def __init__(self, options: AttachedOptions, on_blocks: OnBlocks, on_death: OnDeath) -> None:
        self._options = options
        self._server = options.server
        self._on_blocks = on_blocks
        self._on_death = on_death
        self._client = ServerClient(options.server, timeout_s=options.timeout_s)
        self._events: AttachedEvents | None = None
        self._steps: StreamSteps | None = None
        self._beat: Beat | None = None
        self._poll: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        """Set to have the server looked at now."""
        self._live: dict[RequestId, _Live] = {}
        self._adapters: frozenset[str] = frozenset()
        self._metrics = ServerMetrics()
        self._num_foreign = 0
        """Requests of others on this engine, as of the last look."""
        self._num_blocks = 0
        self._max_model_len_tokens = 0
        self._num_prefilled_tokens = 0
        self._death: str | None = None
        self._is_closed = False
        self._has_warned_of_cached_tokens = False

    @property
    def is_cache_aware(self) -> bool:
        """Whether `on_blocks` and `resident` describe this engine's cache."""
        return self._events is not None and self._events.is_cache_aware

    async def start(self) -> EngineInfo:
        """Find the server and what it serves. Raises `ConfigError` for one that can never be used as it is asked for,
        `EngineError` for one that does not answer now.
        """
        self._steps = StreamSteps(asyncio.get_running_loop().time)
        self._client.open()
        try:
            return await self._start()
        except KvrouteError as error:
            await self.close()
            kind = ConfigError if isinstance(error, ConfigError) else EngineError
            raise kind(f"--attach {self._server.url}: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> EngineInfo:
        options, server = self._options, self._server
        models = await self._client.models()
        if not await self._client.is_healthy():
            raise EngineError("the server says that its engine is dead")
        self._check_model(models)
        await self._check_tokens()
        self._adapters = models.adapters
        self._metrics = await self._client.metrics(server.rank)
        self._max_model_len_tokens = models.max_model_len_tokens or 0
        if not self._max_model_len_tokens:
            raise EngineError("it does not tell the longest context of its model (max_model_len)")
        if server.events is not None:
            self._events = AttachedEvents(options, self._on_blocks, self._died)
            if (refusal := self._refusal()) is None:
                await self._events.start()
            else:
                self._events.refuse(refusal)
        else:
            logger.warning("%s publishes no KV events: only hints tell what it holds", server.worker)
        self._num_blocks = self._count_blocks()
        self._beat = Beat(self._client.is_healthy)
        self._poll = asyncio.create_task(self._watch(), name=f"attached-{server.worker}")
        version = await self._client.version()
        return EngineInfo(
            name=f"vllm serve {version}".rstrip(),
            num_blocks=self._num_blocks,
            max_num_seqs=server.max_num_seqs,
            max_model_len_tokens=self._max_model_len_tokens,
            step_budget_tokens=server.max_num_batched_tokens,
            eviction="stock",
            is_cache_aware=self._events is None or self._events.is_cache_aware,
            tells_blocks=self._events is not None,
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        self._check_alive()
        await self._check(request)
        body = completion_body(request, self._options.model, self._max_tokens(request))
        assert self._steps is not None
        live = self._live[request.request] = _Live()
        stream = CompletionStream(request.sampling.logprobs)
        held: list[int] = []
        is_ended = False
        self._steps.submitted(request.request, len(request.token_ids))
        try:
            async with self._answer(body, live) as response:
                async for data in response.content.iter_any():
                    token_ids = stream.feed(data)
                    if token_ids:
                        self._note_tokens(request, token_ids)
                    if stream.finish is not None:
                        # What the cache gave comes last, and the end must not come before it.
                        held += token_ids
                    elif token_ids:
                        yield stream.delta_of(token_ids)
                    if stream.is_done:
                        break
                else:
                    stream.feed(b"\n")  # what is left is all there is of its line
                if stream.is_done:
                    is_ended = True
                    yield self._end_of(stream, held)
                    await drain(response)
        except InvalidRequest as error:
            if request.sampling.json_schema:
                error.param = error.param or "response_format"  # of a schema servers tell no field
            raise
        except ServerGone:
            # Having closed the connection ourselves looks the same.
            if not live.is_cancelled and stream.finish is None:
                self._look.set()
                raise
        finally:
            del self._live[request.request]
            self._steps.ended(request.request, stream.cached_tokens if is_ended else None)
            if not self._live:
                self._look.set()
        if live.is_cancelled and not is_ended:
            yield EngineDelta((), FinishReason.ABORT)
        elif not is_ended:
            yield self._end_of(stream, held)

    async def cancel(self, request: RequestId) -> None:
        live = self._live.get(request)
        if live is not None:
            live.cancel()

    @property
    def num_prefilled_tokens(self) -> int:
        """Of a prompt that the server is computing it tells nothing: each counts whole, with its first token."""
        return self._num_prefilled_tokens

    def stats(self) -> EngineStats:
        assert self._steps is not None
        return EngineStats(
            num_running=self._steps.num_running,
            num_waiting=self._steps.num_waiting,
            kv_used_blocks=self._kv_used_blocks(),
            step_fit=self._steps.fit(),
            is_cache_aware=self._events is None or self._events.is_cache_aware,
            is_in_touch=self._beat is not None and self._beat.is_in_touch,
            num_foreign=self._num_foreign,
        )

    async def resident(self) -> set[BlockKey]:
        self._check_alive()
        return await self._events.resident() if self._events is not None else set()

    async def look(self) -> set[BlockKey]:
        return await self.resident()

    async def pool_digest(self) -> tuple[int, bytes] | None:
        return None

    async def pin(self, name: str, token_ids: list[int], *, salt: str = "", adapter: str = "") -> PinnedPrefix:
        raise PinRefused(f"pin {name!r}: {_NO_PINS}")

    async def unpin(self, name: str) -> None:
        raise UnknownPin(f"no pin {name!r}: {_NO_PINS}")

    async def pins(self) -> list[PinnedPrefix]:
        return []

    async def reset_cache(self) -> None:
        self._check_alive()
        await self._client.reset_cache()
        if self._events is not None:
            self._events.forget()

    async def close(self) -> None:
        self._is_closed = True
        if self._beat is not None:
            await self._beat.stop()
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        if self._events is not None:
            await self._events.close()
        for live in list(self._live.values()):
            live.cancel()
        await self._client.close()

    # Starting.

    def _check_model(self, models: ServedModels) -> None:
        if self._options.model not in models.names:
            raise ConfigError(f"it serves {', '.join(models.names)}, and not {self._options.model}")

    async def _check_tokens(self) -> None:
        """Raises `ConfigError` for a server whose tokenizer is another one: it would answer other prompts."""
        probe = self._options.probe
        if probe is None:
            return
        token_ids = await self._client.tokenise(self._options.model, probe.text)
        if token_ids is None:
            logger.warning("%s does not tokenise: that its tokenizer is ours is taken for granted", self._server.worker)
        elif token_ids != probe.token_ids:
            raise ConfigError(
                f"--tokenizer: not the server's own: of {json.dumps(probe.text)} it makes {len(token_ids)} tokens that "
                f"are not our {len(probe.token_ids)}"
            )

    def _refusal(self) -> str | None:
        """Why our keys cannot describe the engine's cache, as far as its metrics tell; None if they can."""
        announced, told = self._options.scheme.block_size_tokens, self._metrics.block_size_tokens
        if self._metrics.has_prefix_cache is False:
            return "its prefix cache is off"
        if told is not None and told != announced:
            return f"the engine's blocks have {told} tokens, those of the others {announced}"
        return None

    def _count_blocks(self) -> int:
        if self._metrics.num_blocks is not None and self._metrics.num_blocks > 1:
            return self._metrics.num_blocks - 1  # one is vLLM's placeholder
        longest = -(-self._max_model_len_tokens // self._options.scheme.block_size_tokens)
        logger.warning(
            "%s does not tell the size of its cache: taken to hold %d of its longest requests",
            self._server.worker,
            self._server.max_num_seqs,
        )
        return longest * self._server.max_num_seqs

    # Answering.

    @contextlib.asynccontextmanager
    async def _answer(self, body: dict[str, Any], live: _Live) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's answer, which `cancel` closes, and which is not waited for any more from then on."""
        async with contextlib.AsyncExitStack() as stack:
            entering = asyncio.ensure_future(stack.enter_async_context(self._client.completion(body)))
            try:
                pending: set[asyncio.Future[Any]] = {entering, live.cancelled}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not entering.done():
                    entering.cancel()
                    await asyncio.wait({entering})
            if live.is_cancelled:
                if not entering.cancelled() and entering.exception() is None:
                    entering.result().close()
                raise ServerGone("cancelled")
            live.response = entering.result()
            yield live.response

    def _note_tokens(self, request: EngineRequest, token_ids: list[int]) -> None:
        assert self._steps is not None
        assert self._beat is not None
        self._beat.heard()
        if self._steps.is_waiting(request.request):
            self._num_prefilled_tokens += len(request.token_ids)
        self._steps.told(request.request, len(token_ids))

    def _end_of(self, stream: CompletionStream, held: list[int]) -> EngineDelta:
        if stream.finish is None:
            raise EngineError("the server ended the answer without a reason")
        if stream.cached_tokens is None and not self._has_warned_of_cached_tokens:
            self._has_warned_of_cached_tokens = True
            logger.warning(
                "%s does not tell what its cache gave (vLLM does with --enable-prompt-tokens-details)",
                self._server.worker,
            )
        return stream.delta_of(held, stream.finish, stream.cached_tokens)

    def _max_tokens(self, request: EngineRequest) -> int:
        return min(request.sampling.max_tokens, self._max_model_len_tokens - len(request.token_ids))

    async def _check(self, request: EngineRequest) -> None:
        """Raises for what the server would refuse late or take for something else."""
        check_length(len(request.token_ids), self._max_model_len_tokens)
        refuse_more(request.sampling, "servers that kvroute is attached to", names=("reading",))
        if request.request in self._live:
            raise InvalidRequest(f"request {request.request} is already being computed")
        if request.adapter and request.adapter not in self._adapters:
            # Servers take new adapters while they run.
            self._adapters = (await self._client.models()).adapters
            if request.adapter not in self._adapters:
                raise InvalidRequest(f"this server has no adapter {request.adapter!r}", param="adapter")

    # Watching.

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)
        if self._is_closed:
            raise EngineError("the engine is closed")

    async def _watch(self) -> None:
        """Look at the server's health and load, now and then and where something has failed."""
        num_missed = 0
        while self._death is None:
            self._look.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await self._look.wait()
            try:
                await self._look_at_server()
                num_missed = 0
            except ServerGone as error:
                self._died(str(error))
            except KvrouteError as error:
                num_missed += 1
                if num_missed >= self._options.num_missed:
                    self._died(f"{num_missed} looks in a row found no answer: {error}")
            except Exception:
                logger.exception("looking at %s failed", self._server.worker)

    async def _look_at_server(self) -> None:
        if not await self._client.is_healthy():
            self._died("the server says that its engine is dead")
            return
        assert self._steps is not None
        num_before = len(self._live)
        metrics = await self._client.metrics(self._server.rank)
        if metrics == ServerMetrics():
            return  # a page that failed says nothing, and must not hide who answered before
        last, self._metrics = self._metrics, metrics
        evidence = another_process(last, metrics)
        if evidence is not None:
            self._died(f"another process answers: {evidence}")
        if metrics.num_running is not None:
            # Own requests that began or ended meanwhile are in the server's count or not: rather none is foreign.
            num_own = max(num_before, len(self._live))
            self._num_foreign = max(0, metrics.num_running + (metrics.num_waiting or 0) - num_own)

    def _kv_used_blocks(self) -> int:
        """The share that the server told last; nothing once nobody is known to compute."""
        if not self._live and not self._num_foreign:
            return 0
        return round((self._metrics.kv_usage or 0.0) * self._num_blocks)

    def _died(self, reason: str) -> None:
        if self._death is None and not self._is_closed:
            self._death = f"server {self._server.worker}: {reason}"
            for live in self._live.values():
                if live.response is not None:
                    live.response.close()
            self._on_death(self._death)
