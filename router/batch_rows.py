"""One row's way from its body to its answer, which a batch run has many of. Writes nothing and counts nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from router.answers import Answer, Generate, answers_to, tokenise, usage_of
from router.batch_file import Row
from router.keys import Caller
from router.known_keys import KnownKeys
from router.openai import Endpoint, ParsedRequest, Usage, completion_body, parse_request
from router.planned_run import Outline
from router.requests import ServiceClass
from router.row_groups import chain_of, urgency_of
from router.tokenizer import Tokenizer
from router.told import Whole
from shared.errors import AttemptsExhausted, DeadlineExceeded, EngineError, NoWorker, QueueFull, TransientError
from shared.hashing import TOKEN_SIZE_BYTES
from shared.types import RequestId, WorkerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How hard a batch pushes and how long it insists."""

    max_in_flight: int = 64
    """Rows under way at once."""
    max_attempts: int = 4
    """Times that a row is tried before a transient error becomes its result. To find the router's queue full, or to
    give way to more urgent requests there, is no try: a row waits for as long as others come first."""
    backoff_s: float = 0.5
    """Wait after a row's first failed attempt; doubles with each further one."""
    max_backoff_s: float = 30.0
    max_errors: int | None = None
    """Failed rows of this run after which it stops; `None`: however many there are."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """An answer, what it answers, and how it is told."""

    answer: Answer
    text: str
    usage: Usage
    body: Mapping[str, Any]


@dataclass(slots=True)
class RowComputer:
    """Computes rows of one run, each as often as it takes, within limits."""

    generate: Generate
    tokenizer: Tokenizer
    known_keys: KnownKeys
    caller: Caller
    """Whose rows they are."""
    served_model: str
    max_model_len_tokens: int
    rng: random.Random
    limits: BatchLimits
    service_class: ServiceClass
    has_reasoning: bool
    """Whether workers tell a chat's reasoning from its content."""
    name: str
    began_at_s: float
    """What deadlines count from."""

    async def outline(self, row: Row) -> Outline[Row]:
        """What a plan needs to know of a row. Whatever is wrong with it is told when it has its turn."""
        item = replace(row, body=None)
        if row.error is not None:
            return Outline(item)
        try:
            parsed = self._parse(row)
            (packed,) = await tokenise(parsed, self.tokenizer, self._salt(parsed))
        except Exception:
            return Outline(item, body=row.body)
        return Outline(
            item,
            chain_of(self.known_keys.of(packed, salt=self._salt(parsed))),
            len(packed) // TOKEN_SIZE_BYTES,
            urgency_of(parsed.priority, parsed.deadline_s),
            row.body,
            packed,
        )

    async def compute(self, row: Row, packed_prompt: bytes | None, worker: WorkerId | None) -> RowResult:
        """Compute a row, on that worker if it is there. Raises what is wrong with the row or the fleet."""
        if row.error is not None:
            raise row.error
        endpoint = cast(Endpoint, row.endpoint)
        parsed = self._parse(row)
        (answer,) = await answers_to(
            parsed,
            self.tokenizer,
            name=f"batch-{self.name}-{row.key}",
            max_model_len_tokens=self.max_model_len_tokens,
            salt=self._salt(parsed),
            tenant=self.caller.tenant,
            service_class=self.service_class,
            has_reasoning=self.has_reasoning,
            packed_prompt=packed_prompt,
            worker=worker,
            since_s=self.began_at_s,
        )
        answer, whole = await self._generate_insisting(answer)
        usage = usage_of([answer], num_choices=1)
        prefix = "chatcmpl" if endpoint is Endpoint.CHAT else "cmpl"
        body = completion_body(
            endpoint,
            response_id=f"{prefix}-{self.name}-{row.key}",
            model=parsed.model,
            created=int(time.time()),
            answers=[whole],
            usage=usage,
        )
        return RowResult(answer, whole.text, usage, body)

    async def _generate_insisting(self, answer: Answer) -> tuple[Answer, Whole]:
        """Generate, and again from the start after a transient error, as often as the limits allow."""
        base = answer.request.request
        num_failed = 0
        for number in itertools.count(1):
            try:
                return await self._generate_once(answer)
            except (NoWorker, AttemptsExhausted, DeadlineExceeded):
                # A request that kills its workers must not be given more of them; a resumed run may try it again.
                raise
            except TransientError as error:
                num_failed += not isinstance(error, QueueFull)
                if num_failed >= self.limits.max_attempts:
                    raise
                logger.info("%s: attempt %d failed: %s", answer.request.request, number, error)
                await asyncio.sleep(self._wait_s(num_failed, error))
                # The attempt before may not be forgotten everywhere yet.
                answer = answer.again(RequestId(f"{base}.{number}"))
        raise AssertionError("counting has no end")

    def _wait_s(self, attempt: int, error: TransientError) -> float:
        # Rows that failed together do not come back together.
        if error.retry_after_s is not None:
            return error.retry_after_s * self.rng.uniform(1.0, 1.5)
        wait_s = min(self.limits.backoff_s * 2.0 ** (attempt - 1), self.limits.max_backoff_s)
        return wait_s * self.rng.uniform(0.5, 1.0)

    async def _generate_once(self, answer: Answer) -> tuple[Answer, Whole]:
        answer.trace.received_at_s = asyncio.get_running_loop().time()
        try:
            return answer, await answer.whole(self.generate)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Nobody cancelled this run: a cancellation that leaks out of the router must not end a place unseen.
            raise EngineError("the request was cancelled within the router") from None

    def _parse(self, row: Row) -> ParsedRequest:
        return parse_request(cast(Endpoint, row.endpoint), row.body, served_model=self.served_model)

    def _salt(self, parsed: ParsedRequest) -> str:
        return self.caller.salted(parsed.cache_salt)
