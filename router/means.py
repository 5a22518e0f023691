"""Running means over a router's recent requests, in tokens, so that they hold when workers' speeds become known."""

from __future__ import annotations

from router.policies.base import FleetState, Loads

_WEIGHT = 0.05
"""Weight of the newest request in running means: about the last twenty count, and all alike until there are twenty."""
_NOMINAL_OUTPUT_TOKENS = 64


class Means:
    """Owns what is known of requests in general: lengths of prompts, of their uncached parts, and of answers."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_finished = 0
        self._full_tokens = 0.0
        self._own_tokens = 0.0
        self.output_tokens = float(_NOMINAL_OUTPUT_TOKENS)

    def note_sent(self, full_tokens: int, own_tokens: int) -> None:
        """A request has got a worker that has to compute `own_tokens` of its prompt. Modifies."""
        self._num_sent += 1
        weight = max(_WEIGHT, 1.0 / self._num_sent)
        self._full_tokens += weight * (full_tokens - self._full_tokens)
        self._own_tokens += weight * (own_tokens - self._own_tokens)

    def note_finished(self, num_output_tokens: int) -> None:
        """Let a finished request's length count. Modifies."""
        self._num_finished += 1
        weight = max(_WEIGHT, 1.0 / self._num_finished)
        self.output_tokens += weight * (num_output_tokens - self.output_tokens)

    def fleet_state(self, loads: Loads, *, backlog_tokens: int, num_routers: int, block_size_tokens: int) -> FleetState:
        """The means in the seconds of this fleet."""
        prefill_s_per_token = loads.mean_prefill_s_per_token
        return FleetState(
            prefill_s_per_token=prefill_s_per_token,
            mean_full_s=self._full_tokens * prefill_s_per_token,
            mean_own_s=self._own_tokens * prefill_s_per_token,
            backlog_s=backlog_tokens * prefill_s_per_token,
            mean_output_tokens=self.output_tokens,
            token_s=loads.mean_busy_step_s,
            num_workers=len(loads),
            num_routers=num_routers,
            block_size_tokens=block_size_tokens,
        )
