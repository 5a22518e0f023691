"""What an attached engine's steps cost, as the answers to own requests show it. Asks the server nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.types import RequestId
from worker.engines.base import StepFit
from worker.latency import StepTimes


@dataclass(slots=True)
class _Step:
    """One step, from its beginning until the next one begins to tell."""

    began_at_s: float
    ended_at_s: float
    """When its first token came."""
    last_began_at_s: float
    """When the step before began."""
    told: set[RequestId] = field(default_factory=set)
    num_firsts: int = 0
    """Requests whose first token it brought."""
    num_pieces: int = 1
    """Tokens of one request that came together: so many steps are told as one."""
    is_clear: bool = True
    """Whether it is known what it computed."""
    num_open: int = 0
    """Of `firsts`, those that have not ended, which is when they tell what the cache gave."""
    num_prefill_tokens: int = 0
    is_over: bool = False


class StreamSteps:
    """Measures steps by the time between their tokens.

    A step gives each running request one piece of its answer. So a new one has begun when a request tells that has told
    in this step already, or one that was submitted after this step began. A step lasts from the first token of the one
    before to its own; after an idle time from the submit, so that it includes the way to the server and back.

    Only steps of known content count: none while a request waits that was there before the step began, since some of
    its prompt may be in it, and none of several pieces with a prefill among them. What others compute on the same
    server is not seen: it makes the fitted times longer, which is what routers should know.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times = StepTimes()
        self._request_to_prompt_tokens: dict[RequestId, int] = {}
        """Live requests."""
        self._waiting: dict[RequestId, float] = {}
        """Those without a first token, and when each was submitted, in that order."""
        self._request_to_first: dict[RequestId, _Step] = {}
        """The step that brought the first token of a live request."""
        self._idle_until_s = 0.0
        """When the first request after the last idle time was submitted."""
        self._step: _Step | None = None

    @property
    def num_running(self) -> int:
        """Live requests that have told something."""
        return len(self._request_to_prompt_tokens) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Live requests that have not."""
        return len(self._waiting)

    def is_waiting(self, request: RequestId) -> bool:
        """Whether a request is live and has told nothing."""
        return request in self._waiting

    def submitted(self, request: RequestId, num_prompt_tokens: int) -> None:
        """A request is on its way to the server. Modifies."""
        now_s = self._clock()
        if not self._request_to_prompt_tokens:
            self._idle_until_s = now_s
        self._waiting[request] = now_s
        self._request_to_prompt_tokens[request] = num_prompt_tokens

    def told(self, request: RequestId, num_tokens: int) -> None:
        """A piece of a live request's answer is here. Modifies."""
        submitted_at_s = self._waiting.pop(request, None)
        step = self._step
        is_new = step is None or request in step.told
        if step is not None and submitted_at_s is not None and submitted_at_s > step.began_at_s:
            is_new = True
        if is_new:
            step = self._begin(self._clock())
        assert step is not None
        step.told.add(request)
        step.num_pieces = max(step.num_pieces, num_tokens)
        if submitted_at_s is not None:
            step.num_firsts += 1
            step.num_open += 1
            self._request_to_first[request] = step
            # One that has waited for longer may have had some of its prompt computed before.
            step.is_clear &= submitted_at_s >= step.last_began_at_s

    def ended(self, request: RequestId, cached_tokens: int | None) -> None:
        """A live request is over; `cached_tokens` is None where nobody tells, or where it was given up. Modifies."""
        self._waiting.pop(request, None)
        num_prompt_tokens = self._request_to_prompt_tokens.pop(request)
        if not self._request_to_prompt_tokens and self._step is not None:
            self._close(self._step)
            self._step = None
        first = self._request_to_first.pop(request, None)
        if first is not None:
            first.num_open -= 1
            first.num_prefill_tokens += num_prompt_tokens - (cached_tokens or 0)
            first.is_clear &= cached_tokens is not None
            self._count(first)

    def fit(self) -> StepFit:
        """What steps cost as of now."""
        return self._times.fit()

    def _begin(self, now_s: float) -> _Step:
        last = self._step
        if last is None:
            self._step = _Step(self._idle_until_s, now_s, self._idle_until_s)
        else:
            self._close(last)
            self._step = _Step(last.ended_at_s, now_s, last.began_at_s)
        return self._step

    def _close(self, step: _Step) -> None:
        """The next step has begun, or there is none. Modifies."""
        oldest_at_s = next(iter(self._waiting.values()), step.ended_at_s)
        step.is_clear &= oldest_at_s > step.began_at_s and not (step.num_firsts and step.num_pieces > 1)
        step.is_over = True
        self._count(step)

    def _count(self, step: _Step) -> None:
        if step.is_over and step.is_clear and not step.num_open:
            duration_s = (step.ended_at_s - step.began_at_s) / step.num_pieces
            self._times.add(duration_s, step.num_prefill_tokens, len(step.told) - step.num_firsts)
