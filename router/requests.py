"""What the front ends (batch, HTTP, library) hand to the router, and what they get back: token ids, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shared.hashing import TOKEN_SIZE_BYTES
from shared.messages import MessagePart, TokenLogprobs
from shared.types import FinishReason, RequestId, Sampling, WorkerId

_AFTER_ALL_INTERACTIVE = 1 << 31
"""Over every priority that a request may name."""


class ServiceClass(StrEnum):
    """What a request is for."""

    INTERACTIVE = "interactive"
    """Somebody waits for it."""
    BATCH = "batch"
    """Gets what interactive requests leave."""


CLASSES = tuple(ServiceClass)
"""The most urgent first."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One tokenised request for one sequence."""

    request: RequestId
    token_ids: bytes
    """Prompt, as `hashing.pack_tokens` gives it."""
    sampling: Sampling
    salt: str = ""
    """Tenant salt: requests of different salts never share blocks."""
    adapter: str = ""
    priority: int = 0
    """Lower goes first, among the tenant's own."""
    tenant: str = ""
    """Whose share of the workers it counts in. Requests without one are all of one tenant."""
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    deadline_at_s: float | None = None
    """When its last token must be there at the latest, on the loop's clock; `None` for whenever."""
    worker: WorkerId | None = None
    """Who is to take it while it is there: then the policy says when, and nobody else gets it. `None`: whom the policy
    finds best."""
    traceparent: str = ""
    """The caller's span, as W3C Trace Context has it in the header of that name; empty where there is none."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_SIZE_BYTES

    @property
    def worker_priority(self) -> int:
        """Its priority among all that a worker has of all routers, which knows no classes: lower goes first."""
        if self.service_class is ServiceClass.BATCH:
            return _AFTER_ALL_INTERACTIVE + max(0, self.priority)
        return self.priority


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens of one request."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RichGenerated(Generated):
    """New tokens of a request of which more is told than tokens."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they are asked for."""
    parts: tuple[MessagePart, ...] = ()
    """What has become certain with these tokens, where a worker reads the answer."""


@dataclass(slots=True)
class Attempt:
    """One worker's turn with a request. Times are seconds of the loop's clock."""

    worker: WorkerId
    asked_at_s: float
    """When it began to look for a worker."""
    matched_at_s: float
    """When the directory had answered."""
    weighed_at_s: float
    """When the decision began that bound it."""
    bound_at_s: float
    first_token_at_s: float | None = None
    ended_at_s: float | None = None
    error: str | None = None
    """Code of the error that ended it."""
    is_refused: bool = False
    """Whether the worker did not take it, since requests of others had come first."""


@dataclass(slots=True)
class RequestTrace:
    """What happened to one request, filled in by the router as it goes. Times are seconds of the loop's clock.

    What is told of tokens and of the first token's time is that of the first token, whoever ends the answer.
    """

    accepted_at_s: float | None = None
    """When a front took the request, which then parsed and tokenised it; `None` where that is not told."""
    received_at_s: float = 0.0
    """When the router was handed the request, tokenised."""
    bound_at_s: float | None = None
    """When the request was sent to the worker that answers it."""
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    finished_at_s: float | None = None
    worker: WorkerId | None = None
    matched_tokens: int = 0
    """What the router expected the worker's cache to give."""
    cached_tokens: int | None = None
    """What the engine says its cache gave; `None` until it says so. Some say so with the answer's end, some never."""
    is_cache_counted: bool = False
    """Whether that is among the router's figures."""
    num_output_tokens: int = 0
    possible_tokens: int = 0
    """What a cache of endless size would have given, as far as this router remembers."""
    num_attempts: int = 0
    num_refusals: int = 0
    """Times that it was sent to a worker which others had reached first, and weighed again."""
    num_continuations: int = 0
    """Attempts that went on from tokens already handed out."""
    explain: Callable[[], str] | None = None
    """Gives the decision in words and numbers, when somebody asks."""
    failed_workers: list[WorkerId] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    error: str | None = None
    """Code of the error that ended it."""
    span: Any = None
    """The request's own, where spans are recorded."""
