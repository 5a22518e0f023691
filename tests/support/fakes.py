"""An engine without a model: instant or as slow as told, with checkable tokens, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_64

from shared.errors import ContextTooLong, EngineError, InvalidRequest, PinRefused, UnknownPin
from shared.hashing import block_keys, num_usable_blocks, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme, FinishReason, RequestId
from worker.auditor import digest_of
from worker.engines.base import (
    BlockChange,
    EngineDelta,
    EngineInfo,
    EngineRequest,
    EngineStats,
    OnBlocks,
    OnDeath,
    PinnedPrefix,
    StepFit,
)

VOCABULARY = 32_000
Mode = Literal["healthy", "flaky", "slow"]


def fake_tokens(prompt: Iterable[int], num_tokens: int) -> tuple[int, ...]:
    """What `FakeEngine` answers. Each token follows from all before it, so an answer can go on on another engine."""
    state = xxh3_64(pack_tokens(prompt))
    token_ids = []
    for _ in range(num_tokens):
        token_ids.append(state.intdigest() % VOCABULARY)
        state.update(pack_tokens(token_ids[-1:]))
    return tuple(token_ids)


@dataclass(slots=True, eq=False)
class _Live:
    request: EngineRequest
    cancelled: asyncio.Event
    may_go: asyncio.Event
    is_running: bool = False
    num_blocks: int = 0
    num_uncached_tokens: int = 0
    prefill_began_at_s: float | None = None
    """While its prefill is under way."""


class FakeEngine:
    """`Engine` on the loop's clock. A request is live until it ends by itself or is cancelled.

    The cache is a plain LRU of `num_blocks` keys, which live sequences do not hold back; pinned ones stay. `pin_faults`
    names pins that fail, and how; `may_pin` holds pins back while it is cleared.

    `flaky` fails each request with probability `fault_rate`, half way through its answer; `slow` takes ten times as
    long; `dies_after` tokens in all, the engine is dead. With `is_contended`, prefills take turns, as in an engine that
    one of them fills, and each running sequence adds `decode_s_per_seq` to every token.
    """

    def __init__(
        self,
        *,
        token_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        decode_s_per_seq: float = 0.0,
        is_contended: bool = False,
        tokens_per_delta: int = 1,
        mode: Mode = "healthy",
        fault_rate: float = 0.5,
        dies_after: int | None = None,
        rng: random.Random | None = None,
        scheme: CacheScheme | None = None,
        num_blocks: int = 1024,
        max_num_seqs: int = 1024,
        max_model_len_tokens: int = 1 << 20,
        step_budget_tokens: int = 8192,
        pin_budget_blocks: int | None = None,
        on_blocks: OnBlocks | None = None,
        on_death: OnDeath | None = None,
    ) -> None:
        self.num_submitted = 0
        self.num_cancelled = 0
        """Live requests that were cancelled."""
        self.seen: list[EngineRequest] = []
        """Every request, in order of arrival."""
        slowness = 10 if mode == "slow" else 1
        self.token_s = token_s * slowness
        self.prefill_s_per_token = prefill_s_per_token * slowness
        self.decode_s_per_seq = decode_s_per_seq
        self._prefill_turn = asyncio.Lock() if is_contended else None
        self._tokens_per_delta = tokens_per_delta
        self._mode = mode
        self._fault_rate = fault_rate
        self._tokens_to_live = dies_after
        self._rng = rng or random.Random(0)
        self._scheme = scheme
        self._resident: OrderedDict[BlockKey, None] = OrderedDict()
        self._pins: dict[str, tuple[BlockKey, ...]] = {}
        self.pin_faults: dict[str, Exception] = {}
        self.may_pin = asyncio.Event()
        self.may_pin.set()
        self.pin_calls: list[str] = []
        """Names in the order in which they were to be pinned; a `-` in front tells of an unpin."""
        self.num_pins_cancelled = 0
        """Pins that were being computed when somebody cancelled them."""
        self.is_cache_aware = True  # for tests to set
        self.is_in_touch = True  # likewise
        self._num_running = 0
        self._num_prefilled_tokens = 0
        """Of prefills that are over."""
        self._waiting: deque[_Live] = deque()
        self._live: dict[RequestId, _Live] = {}
        self._death: str | None = None
        self._on_blocks = on_blocks
        self.on_death = on_death
        self.info = EngineInfo(
            name="fake 1",
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len_tokens=max_model_len_tokens,
            step_budget_tokens=step_budget_tokens,
            eviction="lru",
            pin_budget_blocks=num_blocks // 2 if pin_budget_blocks is None else pin_budget_blocks,
        )

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def start(self) -> EngineInfo:
        return self.info

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        if request.request in self._live:
            raise AssertionError(f"request {request.request} is live already")
        if self._death is not None:
            raise EngineError(self._death)
        if max(request.token_ids) >= VOCABULARY:
            raise InvalidRequest("a token id is outside the vocabulary", param="token_ids")
        live = self._live[request.request] = _Live(request, asyncio.Event(), asyncio.Event())
        self.num_submitted += 1
        self.seen.append(request)
        try:
            if await self._admitted(live):
                async with aclosing(self._compute(live)) as deltas:
                    async for delta in deltas:
                        yield delta
            else:
                yield EngineDelta((), FinishReason.ABORT, 0)
        except (asyncio.CancelledError, GeneratorExit):
            # As in real engines: a reader that goes away frees nothing, only `cancel` does.
            raise
        except BaseException:
            self._free(live)
            raise
        self._free(live)

    async def cancel(self, request: RequestId) -> None:
        live = self._live.get(request)
        if live is not None:
            self.num_cancelled += 1
            live.cancelled.set()
            live.may_go.set()
            self._free(live)

    @property
    def num_prefilled_tokens(self) -> int:
        return self._num_prefilled_tokens + sum(map(self._num_tokens_under_way, self._live.values()))

    def stats(self) -> EngineStats:
        num_running = sum(live.is_running for live in self._live.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._live) - num_running,
            kv_used_blocks=sum(live.num_blocks for live in self._live.values()) + len(self._pinned()),
            step_fit=StepFit(self.token_s, self.prefill_s_per_token, self.decode_s_per_seq),
            is_cache_aware=self.is_cache_aware,
            is_in_touch=self.is_in_touch,
        )

    async def resident(self) -> set[BlockKey]:
        return set(self._resident)

    async def look(self) -> set[BlockKey]:
        if self._death is not None:
            raise EngineError(self._death)
        return set(self._resident)

    async def pool_digest(self) -> tuple[int, bytes] | None:
        return digest_of(self._resident)

    async def pin(self, name: str, token_ids: list[int], *, salt: str = "", adapter: str = "") -> PinnedPrefix:
        self.pin_calls.append(name)
        try:
            return await self._make_pin(name, token_ids, salt, adapter)
        except asyncio.CancelledError:
            self.num_pins_cancelled += 1
            raise

    async def _make_pin(self, name: str, token_ids: list[int], salt: str, adapter: str) -> PinnedPrefix:
        await self.may_pin.wait()
        if self._death is not None:
            raise EngineError(self._death)
        if name in self.pin_faults:
            raise self.pin_faults[name]
        if len(token_ids) >= self.info.max_model_len_tokens:
            raise ContextTooLong(f"{len(token_ids)} tokens; the context has {self.info.max_model_len_tokens}")
        keys = tuple(self._keys(token_ids, salt, adapter))
        others = self._pinned(but=name)
        if not keys:
            raise PinRefused(f"pin {name!r}: {len(token_ids)} tokens fill no block")
        if len(others | set(keys)) > self.info.pin_budget_blocks:
            raise PinRefused(
                f"pin {name!r}: its {len(keys)} blocks would make {len(others | set(keys))} pinned blocks, "
                f"the budget is {self.info.pin_budget_blocks}, {len(others)} are pinned under other names"
            )
        num_new_tokens = sum(key not in self._resident for key in keys) * self._block_size_tokens
        await asyncio.sleep(num_new_tokens * self.prefill_s_per_token)
        if self._death is not None:
            raise EngineError(self._death)
        self._pins.pop(name, None)
        self._pins[name] = keys
        self._put(list(keys))
        return self._pinned_prefix(name)

    async def unpin(self, name: str) -> None:
        self.pin_calls.append(f"-{name}")
        if self._death is not None:
            raise EngineError(self._death)
        if self._pins.pop(name, None) is None:
            raise UnknownPin(f"no pin {name!r}")

    async def pins(self) -> list[PinnedPrefix]:
        if self._death is not None:
            raise EngineError(self._death)
        return [self._pinned_prefix(name) for name in self._pins]

    async def reset_cache(self) -> None:
        kept = OrderedDict.fromkeys(key for key in self._resident if key in self._pinned())
        self._resident = kept
        if self._on_blocks is not None:
            self._on_blocks(BlockChange(tuple(kept), is_reset=True))

    async def lose_cache(self) -> None:
        """Reset all of the cache, pins included, as engines do after a change of weights."""
        self._pins.clear()
        await self.reset_cache()

    async def close(self) -> None:
        for request in list(self._live):
            await self.cancel(request)

    def die(self, reason: str = "killed") -> None:
        """Die now, as an engine process does that is killed."""
        if self._death is not None:
            return
        self._death = reason
        for live in self._live.values():
            live.cancelled.set()
            live.may_go.set()
        if self.on_death is not None:
            self.on_death(reason)

    def _num_tokens_under_way(self, live: _Live) -> int:
        """Prompt tokens that are computed by now of a prefill that is under way; none where prefills take no turns."""
        if live.prefill_began_at_s is None or self._prefill_turn is None:
            return 0
        elapsed_s = asyncio.get_running_loop().time() - live.prefill_began_at_s
        computed = elapsed_s / self.prefill_s_per_token if self.prefill_s_per_token else live.num_uncached_tokens
        return min(live.num_uncached_tokens, int(computed))

    def _free(self, live: _Live) -> None:
        if self._live.get(live.request.request) is live:
            del self._live[live.request.request]
        if live.is_running:
            live.is_running = False
            self._num_running -= 1
        self._admit()

    async def _admitted(self, live: _Live) -> bool:
        """Wait for a slot; whether it came before the request was cancelled."""
        self._waiting.append(live)
        self._admit()
        await live.may_go.wait()
        if self._death is not None:
            raise EngineError(self._death)
        return not live.cancelled.is_set()

    def _admit(self) -> None:
        while self._waiting and self._num_running < self.info.max_num_seqs:
            live = self._waiting.popleft()
            if not live.cancelled.is_set() and live.request.request in self._live:
                live.is_running = True
                self._num_running += 1
                live.may_go.set()

    async def _compute(self, live: _Live) -> AsyncGenerator[EngineDelta, None]:
        request = live.request
        async with self._prefill_turn or contextlib.nullcontext():
            cached_tokens = self._cached_tokens(request)
            live.num_uncached_tokens = len(request.token_ids) - cached_tokens
            live.prefill_began_at_s = asyncio.get_running_loop().time()
            await self._pass_time(live, live.num_uncached_tokens * self.prefill_s_per_token)
            self._num_prefilled_tokens += live.num_uncached_tokens
            live.prefill_began_at_s = None
            if self._scheme is not None:
                live.num_blocks = -(-len(request.token_ids) // self._scheme.block_size_tokens)
            self._store(request, request.token_ids)
        state = xxh3_64(pack_tokens(request.token_ids))
        answer: list[int] = []
        max_tokens = request.sampling.max_tokens
        fails_at = None
        if self._mode == "flaky" and self._rng.random() < self._fault_rate:
            fails_at = max_tokens // 2
        first_cached_tokens: int | None = cached_tokens
        fresh: list[int] = []
        finish: FinishReason | None = None
        while finish is None:
            await self._pass_time(live, self.token_s + self.decode_s_per_seq * self._num_running)
            if live.cancelled.is_set():
                finish = FinishReason.ABORT
            else:
                self._spend_token(fails_at, len(answer))
                token_id = state.intdigest() % VOCABULARY
                state.update(pack_tokens((token_id,)))
                answer.append(token_id)
                fresh.append(token_id)
                if token_id in request.sampling.stop_token_ids:
                    finish = FinishReason.STOP
                elif len(answer) >= max_tokens:
                    finish = FinishReason.LENGTH
            if finish is not None or len(fresh) >= self._tokens_per_delta:
                if finish is not None:
                    # The last token of an answer is sampled, but never computed.
                    self._store(request, [*request.token_ids, *answer[:-1]])
                yield EngineDelta(tuple(fresh), finish, first_cached_tokens)
                first_cached_tokens = None
                fresh = []

    def _spend_token(self, fails_at: int | None, num_tokens: int) -> None:
        if fails_at == num_tokens:
            raise EngineError("flaky")
        if self._tokens_to_live is not None:
            if self._tokens_to_live == 0:
                self.die("has died after its tokens")
                raise EngineError("has died after its tokens")
            self._tokens_to_live -= 1

    async def _pass_time(self, live: _Live, seconds: float) -> None:
        if seconds:
            try:
                async with asyncio.timeout(seconds):
                    await live.cancelled.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        if self._death is not None:
            raise EngineError(self._death)

    def _cached_tokens(self, request: EngineRequest) -> int:
        if self._scheme is None:
            return 0
        num_blocks = 0
        for key in self._keys(request.token_ids, request.salt, request.adapter):
            if key not in self._resident:
                break
            num_blocks += 1
        usable = num_usable_blocks(len(request.token_ids), self._scheme.block_size_tokens)
        return min(num_blocks, usable) * self._scheme.block_size_tokens

    def _store(self, request: EngineRequest, token_ids: list[int]) -> None:
        """Make a sequence's full blocks the most recently used, each before its parent, and evict the oldest."""
        if self._scheme is None:
            return
        self._put(self._keys(token_ids, request.salt, request.adapter)[: self.info.num_blocks])

    def _put(self, keys: list[BlockKey]) -> None:
        stored = tuple(key for key in keys if key not in self._resident)
        for key in reversed(keys):
            self._resident[key] = None
            self._resident.move_to_end(key)
        pinned = self._pinned()
        removed = []
        while len(self._resident) > self.info.num_blocks:
            oldest = next(key for key in self._resident if key not in pinned)
            del self._resident[oldest]
            removed.append(oldest)
        if self._on_blocks is not None and (stored or removed):
            self._on_blocks(BlockChange(stored, tuple(removed)))

    def _pinned(self, *, but: str | None = None) -> set[BlockKey]:
        return {key for name, keys in self._pins.items() if name != but for key in keys}

    def _pinned_prefix(self, name: str) -> PinnedPrefix:
        num_blocks = len(self._pins[name])
        return PinnedPrefix(name, num_blocks, num_blocks * self._block_size_tokens)

    @property
    def _block_size_tokens(self) -> int:
        assert self._scheme is not None
        return self._scheme.block_size_tokens

    def _keys(self, token_ids: list[int], salt: str, adapter: str) -> list[BlockKey]:
        assert self._scheme is not None
        root = root_key(self._scheme, salt=salt, adapter=adapter)
        return block_keys(pack_tokens(token_ids), self._block_size_tokens, root)
