"""The engine's requests of all routers: starts, pumps, counts and frees them. Knows no connections."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from itertools import count

from shared.errors import ContextTooLong, EngineError, InvalidRequest, KvrouteError
from shared.hashing import TOKEN_SIZE_BYTES, unpack_tokens
from shared.messages import Submit
from shared.transport.faults import fault_of
from shared.transport.session import RequestKey, Session
from shared.types import FinishReason, RequestId
from worker.engines.base import Engine, EngineDelta, EngineRequest, RichEngineDelta
from worker.prefill_backlog import PrefillBacklog, Prompt

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Live:
    """One request under way."""

    session: Session
    key: RequestKey
    engine_request: EngineRequest
    num_sent_tokens: int = 0
    is_prefilled: bool = False
    """Whether the engine has told something of it."""
    is_told: bool = False
    """Whether the router has been told the end."""
    fault: KvrouteError | None = None
    """The error that ends it; without one a request that is stopped ends with `ABORT`."""
    is_stopping: bool = False
    """Whether the engine is being told to free it, which must not be interrupted."""
    task: asyncio.Task[None] | None = None


class EngineRequests:
    """Every request that routers have under way on one engine.

    Invariants: each live request has one pump task; it leaves the books when that task is done and not before, exactly
    once; by then its router has been told its end and the engine has been told to free it.
    """

    def __init__(self, engine: Engine, max_model_len_tokens: int) -> None:
        self.num_live = 0
        self.num_unended = 0
        """Live requests whose end has not been told yet: the load that goes out beside the news of an end."""
        self._engine = engine
        self._max_model_len_tokens = max_model_len_tokens
        self._backlog = PrefillBacklog()
        self._live: dict[Session, dict[RequestKey, _Live]] = {}
        self._numbers = count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued_prefill_tokens(self) -> int:
        """Uncached prompt tokens that are still to be computed."""
        return self._backlog.num_tokens(self._engine.num_prefilled_tokens)

    def num_live_of(self, session: Session) -> int:
        return len(self._live.get(session, ()))

    async def wait_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def start(self, session: Session, submit: Submit) -> None:
        """Begin one request. Modifies.

        Raises `InvalidRequest` or `ContextTooLong` if it cannot be served, `Outpaced` if too much is before it.
        """
        key = (submit.request, submit.attempt)
        if key in self._live.get(session, ()):
            raise InvalidRequest(f"request {submit.request}, attempt {submit.attempt} is already under way")
        live = _Live(session, key, self._checked(submit))
        prompt = Prompt(submit.token_ids, submit.salt, submit.adapter)
        num_prefilled = self._engine.num_prefilled_tokens
        num_shared_tokens = self._backlog.admit(prompt, submit.max_queued_tokens, num_prefilled)
        self._live.setdefault(session, {})[key] = live
        self.num_live += 1
        self.num_unended += 1
        self._backlog.add(live, prompt, max(submit.matched_tokens, num_shared_tokens), num_prefilled)
        self._idle.clear()
        live.task = asyncio.create_task(self._pump(live), name=f"kvroute-pump-{live.engine_request.request}")
        live.task.add_done_callback(lambda task: self._end(live, task))

    def cancel(self, session: Session, key: RequestKey) -> None:
        """Have the engine free one request; its router is told `ABORT`. Unknown requests are no error."""
        live = self._live.get(session, {}).get(key)
        if live is not None:
            self._stop(live)

    def cancel_all(self, session: Session) -> None:
        """Free every request of a session that is gone."""
        for live in self._live.get(session, {}).values():
            self._stop(live)

    async def fail_all(self, error: KvrouteError) -> None:
        """End every request with `error`, and wait until all are ended."""
        for requests in self._live.values():
            for live in requests.values():
                live.fault = error
                self._stop(live)
        await self._idle.wait()

    def _checked(self, submit: Submit) -> EngineRequest:
        try:
            token_ids = unpack_tokens(submit.token_ids)
        except ValueError as error:
            raise InvalidRequest(f"token_ids: {error}") from error
        # The last byte of each id, the sign's, read as text: of 8,192 ids in 5 us, where their least takes 100.
        if not token_ids or not submit.token_ids[TOKEN_SIZE_BYTES - 1 :: TOKEN_SIZE_BYTES].isascii():
            raise InvalidRequest("token_ids: empty, or a negative id")
        if submit.sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {submit.sampling.max_tokens} is less than 1")
        if len(token_ids) >= self._max_model_len_tokens:
            raise ContextTooLong(
                f"a prompt of {len(token_ids)} tokens leaves no room for an answer: "
                f"the model's context is {self._max_model_len_tokens} tokens"
            )
        # Routers choose request ids, and two may choose the same: the number makes them differ.
        engine_id = RequestId(f"{submit.request}#{next(self._numbers)}")
        return EngineRequest(
            engine_id,
            token_ids,
            submit.sampling,
            submit.salt,
            submit.adapter,
            submit.priority,
            submit.traceparent,
        )

    def _stop(self, live: _Live) -> None:
        # The pump may be waiting for the engine or for a slow router: both end now, and it tells the engine on its way
        # out. A second cancel would interrupt just that.
        if live.task is not None and not live.is_stopping:
            live.is_stopping = True
            live.task.cancel()

    async def _pump(self, live: _Live) -> None:
        """Run one request and have the engine free it, however it ends."""
        try:
            await self._carry(live)
        except KvrouteError as error:
            live.fault = live.fault or error
        except Exception:
            _logger.exception("engine failed on request %s", live.engine_request.request)
            live.fault = live.fault or EngineError("the engine failed on this request; the worker's log says why")
        finally:
            live.is_stopping = True
            # Dropping the iterator frees nothing in an engine.
            if not live.is_told:
                await self._engine.cancel(live.engine_request.request)

    async def _carry(self, live: _Live) -> None:
        """Carry the engine's deltas to the session, no faster than the router takes them."""
        session = live.session
        deltas = self._engine.generate(live.engine_request)
        try:
            async for delta in deltas:
                if session.is_full:
                    await session.room()
                self._pass_on(live, delta)
        finally:
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()
        if not live.is_told:
            raise EngineError("the engine ended the request without a reason")

    def _pass_on(self, live: _Live, delta: EngineDelta) -> None:
        if not live.is_prefilled and (delta.token_ids or delta.cached_tokens is not None):
            live.is_prefilled = True
            self._backlog.note_prefilled(live, len(live.engine_request.token_ids) - (delta.cached_tokens or 0))
        if delta.finish is not None and not live.is_told:
            live.is_told = True
            self.num_unended -= 1
        live.session.push(
            live.key,
            live.num_sent_tokens,
            delta.token_ids,
            finish=delta.finish,
            cached_tokens=delta.cached_tokens,
        )
        if isinstance(delta, RichEngineDelta):
            live.session.add_more(live.key, delta.logprobs, delta.parts)
        live.num_sent_tokens += len(delta.token_ids)

    def _end(self, live: _Live, task: asyncio.Task[None]) -> None:
        """Close the books on a request, also on one whose pump was stopped before it began."""
        if not task.cancelled() and task.exception() is not None:
            _logger.error("freeing request %s failed", live.engine_request.request, exc_info=task.exception())
        if not live.is_told:
            live.is_told = True
            self.num_unended -= 1
            if live.fault is None:
                live.session.push(live.key, live.num_sent_tokens, finish=FinishReason.ABORT)
            else:
                live.session.push(live.key, live.num_sent_tokens, fault=fault_of(live.fault))
        self._backlog.drop(live, self._engine.num_prefilled_tokens)
        self.num_live -= 1
        requests = self._live[live.session]
        del requests[live.key]
        if not requests:
            del self._live[live.session]
        if not self.num_live:
            self._idle.set()
