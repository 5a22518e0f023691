"""Engine steps as the worker's process sees them: how many, how long, and what was in them."""

from __future__ import annotations

from collections.abc import Callable

from worker.engines.base import StepFit
from worker.latency import StepTimes


class StepMeter:
    """Measures steps by the time between their reports, from outside the engine's process.

    vLLM reports each step's composition but no honest duration: its own clock starts when the model has already run in
    the engine's process, and with two steps in flight it shows only the rest of the wait. The time from one report to
    the next is what a step costs all in all, model, scheduler and messages, and on every scheduler alike. After an idle
    time a step begins with the first submit.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times = StepTimes()
        self._step_began_at: float | None = None
        self.num_steps = 0
        self.num_running = 0
        """Sequences that the last step left running."""
        self.num_prefilled_tokens = 0
        """Prompt tokens of all steps."""
        self.kv_usage = 0.0
        """Share of the pool's blocks in use after the last step."""

    def submitted(self, *, num_unfinished: int) -> None:
        """A request is on its way to an engine with so many others."""
        if self._step_began_at is None or num_unfinished == 0:
            self._step_began_at = self._clock()

    def stepped(
        self, *, num_prefill_tokens: int, num_decode_seqs: int, num_running: int, num_unfinished: int, kv_usage: float
    ) -> None:
        """The engine has reported a step. Another one follows at once if any request is unfinished."""
        now = self._clock()
        self.num_steps += 1
        self.num_prefilled_tokens += num_prefill_tokens
        if self._step_began_at is not None and num_prefill_tokens + num_decode_seqs:
            self._times.add(now - self._step_began_at, num_prefill_tokens, num_decode_seqs)
        self._step_began_at = now if num_unfinished else None
        self.num_running, self.kv_usage = num_running, kv_usage

    @property
    def step_age_s(self) -> float:
        """How long the step under way has lasted by now; 0.0 while none is."""
        return 0.0 if self._step_began_at is None else self._clock() - self._step_began_at

    def fit(self) -> StepFit:
        """What steps cost as of now."""
        return self._times.fit()
