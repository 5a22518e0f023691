"""An engine without a model: takes the time that a latency profile says, on the loop's clock, real or virtual.

Everything but the arithmetic is real: chunked prefill, continuous batching, block pool, eviction rule, preemption.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from shared.errors import EngineError, InvalidRequest, PinRefused
from shared.hashing import TOKEN_SIZE_BYTES, root_key
from shared.types import BlockKey, FinishReason, RequestId, Sampling
from worker.auditor import digest_of
from worker.blocks import BlockPool
from worker.engines.base import (
    BlockChange,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    EngineStats,
    OnBlocks,
    OnDeath,
    PinnedPrefix,
    PoolUse,
    StepFit,
    check_length,
)
from worker.engines.simulated import Listener, Simulated, State
from worker.engines.simulator_batch import Batch, Plan
from worker.engines.simulator_options import SimulatorOptions, check_sizes
from worker.engines.simulator_requests import DeltaReader, check_sampling, packed
from worker.latency import StepTimes
from worker.sequences import ResidentChanges, Sequence

_STEPS_BETWEEN_FITS = 32
"""A fit takes longer than everything else that a step costs here, and hardly moves with one step more."""


class SimulatorEngine:
    """`Engine` on a block pool and a clock. `start` once, then everything else, then `close`.

    Nothing runs while there is nothing to compute. Steps follow each other without a pause, and what comes in during
    one waits for its end. Step times are measured as those of a real engine are, and fitted the same way; in place of
    one sample for each of many equal steps in a row, the fit gets one for all of them, and is solved anew every
    32 samples.
    """

    def __init__(self, options: SimulatorOptions, on_blocks: OnBlocks, on_death: OnDeath) -> None:
        """Raises `ConfigError` where sizes do not fit each other."""
        profile = options.profile
        self._options = options
        self._profile = profile
        self._on_blocks = on_blocks
        self._on_death = on_death
        self._max_num_seqs = options.max_num_seqs or profile.max_num_seqs
        self._step_budget_tokens = options.step_budget_tokens or profile.step_budget_tokens
        self._pin_budget_blocks = check_sizes(options, self._max_num_seqs, self._step_budget_tokens)
        self._changes = ResidentChanges()
        self._pool = BlockPool(
            options.num_blocks,
            options.scheme.block_size_tokens,
            options.eviction,
            max_sequence_tokens=options.max_model_len_tokens,
            pin_budget_blocks=self._pin_budget_blocks,
            changes=self._changes,
        )
        self._batch = Batch(
            self._pool,
            max_num_seqs=self._max_num_seqs,
            step_budget_tokens=self._step_budget_tokens,
            vocabulary_size=options.vocabulary_size,
            tokens_per_delta=options.tokens_per_delta,
        )
        self._live: dict[RequestId, Simulated] = {}
        self._arriving: dict[Simulated, asyncio.TimerHandle] = {}
        """Those that no step can take yet."""
        self._last_arrival_s = 0.0
        self._plan: Plan | None = None
        self._planned_at_s = 0.0
        self._planned_s = 0.0
        """How long its steps take."""
        self._timer: asyncio.Handle | None = None
        """Of the end of the plan under way, or of the beginning of the next."""
        self._death: str | None = None
        self._times = StepTimes()
        self._fit = StepFit()
        self._num_steps_to_fit = 1
        if options.is_warm:
            self._warm_up()
        self._num_pins = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called with whatever changes `stats`; for the owner to set."""
        self.busy_s = 0.0
        """Time in steps so far."""

    @property
    def pool(self) -> BlockPool:
        """To be looked at, not changed."""
        return self._pool

    @property
    def num_preemptions(self) -> int:
        return self._batch.num_preemptions

    async def start(self) -> EngineInfo:
        return self.info

    @property
    def info(self) -> EngineInfo:
        """What `start` gives."""
        return EngineInfo(
            name=f"simulator {self._profile.name}",
            num_blocks=self._options.num_blocks,
            max_num_seqs=self._max_num_seqs,
            max_model_len_tokens=self._options.max_model_len_tokens,
            step_budget_tokens=self._step_budget_tokens,
            eviction=self._options.eviction,
            pin_budget_blocks=self._pin_budget_blocks,
        )

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        stream = DeltaReader()
        sequence = self.submit(
            request.request,
            packed(request.token_ids, self._options.vocabulary_size),
            request.sampling,
            stream,
            salt=request.salt,
            adapter=request.adapter,
            priority=request.priority,
        )
        try:
            async with aclosing(stream.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._remove(sequence)

    def submit(
        self,
        request: RequestId,
        packed_prompt: bytes,
        sampling: Sampling,
        listener: Listener,
        *,
        salt: str = "",
        adapter: str = "",
        priority: int = 0,
    ) -> Simulated:
        """Begin one request whose deltas go to `listener`: what `generate` is made of, without a task for each request.

        Raises `InvalidRequest`, `ContextTooLong` or `EngineError` as `generate` does. Token ids are taken as they are.
        """
        if adapter:
            raise InvalidRequest(f"this engine has no adapter {adapter!r}", param="adapter")
        check_sampling(sampling)
        stops = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= self._options.eos_token_ids
        return self._add(
            request, packed_prompt, listener, salt, max_tokens=sampling.max_tokens, stops=stops, priority=priority
        )

    def _add(
        self,
        request: RequestId,
        packed_prompt: bytes,
        listener: Listener,
        salt: str,
        *,
        max_tokens: int,
        stops: frozenset[int] = frozenset(),
        priority: int = 0,
        keep: Callable[[Sequence], None] | None = None,
    ) -> Simulated:
        self._check_alive()
        num_tokens = len(packed_prompt) // TOKEN_SIZE_BYTES
        check_length(num_tokens, self._options.max_model_len_tokens)
        if request in self._live:
            raise InvalidRequest(f"request {request} is already being computed")
        sequence = Simulated(
            request,
            packed_prompt,
            root_key(self._options.scheme, salt=salt),
            listener,
            max_output_tokens=min(max_tokens, self._options.max_model_len_tokens - num_tokens),
            stop_token_ids=stops,
            priority=priority,
            keep=keep,
        )
        self._live[request] = sequence
        if self._profile.request_s:
            loop = asyncio.get_running_loop()
            # One after another: of requests sent at the same moment an idle engine's next step finds the first alone.
            self._last_arrival_s = max(loop.time(), self._last_arrival_s) + self._profile.request_s
            self._arriving[sequence] = loop.call_at(self._last_arrival_s, self._arrive, sequence)
            self.on_change()
        else:
            self._arrive(sequence)
        return sequence

    def _arrive(self, sequence: Simulated) -> None:
        self._arriving.pop(sequence, None)
        self._batch.add(sequence)
        self.on_change()
        self._interrupt()

    async def cancel(self, request: RequestId) -> None:
        sequence = self._live.get(request)
        if sequence is not None:
            self.abort(sequence)

    def abort(self, sequence: Simulated) -> None:
        """What `cancel` does, at once. A sequence that has ended is no error."""
        if sequence.state is not State.ENDED:
            self._remove(sequence)
            sequence.listener.push(EngineDelta((), FinishReason.ABORT, sequence.cached_tokens or 0), 0.0)

    @property
    def num_prefilled_tokens(self) -> int:
        return self._batch.num_prefilled_tokens

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._batch.num_running,
            num_waiting=self._batch.num_waiting + len(self._arriving),
            kv_used_blocks=self._pool.num_used_blocks,
            step_fit=self._fit,
            pool=PoolUse.of(self._pool.num_pinned_blocks, self._pool.num_free),
        )

    async def resident(self) -> set[BlockKey]:
        self._check_alive()
        self._tell_blocks()
        return self._pool.resident()

    async def look(self) -> set[BlockKey]:
        self._check_alive()
        return self._pool.resident()

    async def pool_digest(self) -> tuple[int, bytes] | None:
        self._check_alive()
        return digest_of(self._pool.resident())

    async def pool_statistics(self) -> dict[str, Any]:
        """Figures of the pool as of now."""
        return asdict(self._pool.statistics())

    # Pins.

    async def pin(self, name: str, token_ids: list[int], *, salt: str = "", adapter: str = "") -> PinnedPrefix:
        self._check_alive()
        if adapter:
            raise InvalidRequest(f"this engine has no adapter {adapter!r}", param="adapter")
        packed_tokens = packed(token_ids, self._options.vocabulary_size, f"pin {name!r}: ")
        check_length(len(token_ids), self._options.max_model_len_tokens)
        num_blocks = len(token_ids) // self._options.scheme.block_size_tokens
        if not num_blocks:
            raise PinRefused(
                f"pin {name!r}: {len(token_ids)} tokens do not fill a block of {self._options.scheme.block_size_tokens}"
            )
        self._pool.check_pin(name, packed_tokens, root_key(self._options.scheme, salt=salt))
        refusals: list[PinRefused] = []

        def keep(held: Sequence) -> None:
            try:
                self._pool.pin(name, held, now_s=asyncio.get_running_loop().time())
            except PinRefused as error:
                refusals.append(error)

        self._num_pins += 1
        stream = DeltaReader()
        sequence = self._add(
            RequestId(f"kvroute-pin-{self._num_pins}"), packed_tokens, stream, salt, max_tokens=1, keep=keep
        )
        try:
            async with aclosing(stream.deltas()) as deltas:
                async for _ in deltas:
                    pass
        finally:
            self._remove(sequence)
        if refusals:
            raise refusals[0]
        return PinnedPrefix(name, num_blocks, num_blocks * self._options.scheme.block_size_tokens)

    async def unpin(self, name: str) -> None:
        self._check_alive()
        self._pool.unpin(name)

    async def pins(self) -> list[PinnedPrefix]:
        self._check_alive()
        block_size = self._options.scheme.block_size_tokens
        return [PinnedPrefix(pin.name, len(pin.blocks), len(pin.blocks) * block_size) for pin in self._pool.pins()]

    # Ends.

    async def reset_cache(self) -> None:
        self._check_alive()
        self._pool.forget_free()
        self._tell_blocks()

    async def close(self) -> None:
        self._stop("the engine is closed")

    def die(self, reason: str) -> None:
        """Die now, as an engine's process does that is killed. Tells `on_death`, once."""
        if self._death is None:
            self._stop(reason)
            self._on_death(reason)

    def _stop(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = reason
        if self._timer is not None:
            self._timer.cancel()
        self._live.clear()
        arriving, self._arriving = self._arriving, {}
        for sequence, timer in arriving.items():
            timer.cancel()
            sequence.state = State.ENDED
            sequence.listener.fail(EngineError(reason))
        self._batch.fail_all(EngineError(reason))

    # Steps.

    def _warm_up(self) -> None:
        """Learn from steps of each kind, full and half full, that nobody has waited for."""
        budget = self._step_budget_tokens
        for num_tokens in (budget, budget // 2):
            plan = Plan(num_tokens, num_tokens * budget / 2, 0, 0, 1)
            self._times.add(plan.duration_s(self._profile, 1), num_tokens, 0)
        for num_seqs in (self._max_num_seqs, max(1, self._max_num_seqs // 2)):
            plan = Plan(0, 0.0, num_seqs, num_seqs * budget, 1)
            self._times.add(plan.duration_s(self._profile, 1), 0, num_seqs)
        self._fit = self._times.fit()

    def _interrupt(self) -> None:
        """Something has come or gone: begin if nothing runs, and plan anew after the step that is under way."""
        loop = asyncio.get_running_loop()
        if self._plan is None:
            if self._timer is None:
                # What comes in at the same moment shares the first step.
                self._timer = loop.call_soon(self._begin)
        elif self._plan.num_steps > 1:
            num_begun = self._num_begun(self._plan, loop.time() - self._planned_at_s)
            if num_begun < self._plan.num_steps:
                self._plan.num_steps = num_begun
                self._set_timer(self._plan)

    def _num_begun(self, plan: Plan, elapsed_s: float) -> int:
        """How many of a plan's steps have begun by now, the one under way included: at least one."""
        low, high = 1, plan.num_steps
        while low < high:
            middle = (low + high) // 2
            if plan.duration_s(self._profile, middle) > elapsed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _begin(self) -> None:
        self._timer = None
        self._plan = self._batch.plan()
        self.on_change()
        if self._plan is not None:
            self._planned_at_s = asyncio.get_running_loop().time()
            self._set_timer(self._plan)

    def _set_timer(self, plan: Plan) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._planned_s = plan.duration_s(self._profile, plan.num_steps)
        self._timer = asyncio.get_running_loop().call_at(self._planned_at_s + self._planned_s, self._end)

    def _end(self) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        duration_s = self._planned_s
        self.busy_s += duration_s
        self._times.add(duration_s / plan.num_steps, plan.num_prefill_tokens, plan.num_decode_seqs)
        self._num_steps_to_fit -= 1
        if not self._num_steps_to_fit:
            self._fit = self._times.fit()
            self._num_steps_to_fit = _STEPS_BETWEEN_FITS
        last_step_s = duration_s
        if plan.num_steps > 1:
            last_step_s -= plan.duration_s(self._profile, plan.num_steps - 1)
        self._batch.complete(self._planned_at_s + duration_s, last_step_s)
        self._tell_blocks()
        self._begin()

    def _remove(self, sequence: Simulated) -> None:
        """Forget a sequence, and free it if it has not ended."""
        if self._live.get(sequence.request) is sequence:
            del self._live[sequence.request]
        if sequence.state is not State.ENDED and self._death is None:
            arrival = self._arriving.pop(sequence, None)
            if arrival is None:
                self._batch.remove(sequence)
            else:
                arrival.cancel()
                sequence.state = State.ENDED
            self.on_change()
            self._interrupt()

    def _tell_blocks(self) -> None:
        stored, removed = self._changes.take()
        if stored or removed:
            self._on_blocks(BlockChange(stored, removed))

    # Checks.

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)
