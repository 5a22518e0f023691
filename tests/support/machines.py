"""How far state machines walk: through the same examples on every run, or through as many others as one asks for."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_EXAMPLES_VARIABLE = "KVROUTE_TEST_EXAMPLES"
"""Walk through so many examples of each machine, drawn anew each time."""


def walk(make_machine: Callable[[], RuleBasedStateMachine], *, num_examples: int, num_steps: int) -> None:
    """Run a machine; what fails is told as the shortest list of operations that still does."""
    asked = os.environ.get(_EXAMPLES_VARIABLE)
    run_state_machine_as_test(
        make_machine,
        settings=settings(
            max_examples=num_examples if asked is None else int(asked),
            stateful_step_count=num_steps,
            derandomize=asked is None,
            database=None,
            # How long something takes is not what a walk is about.
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        ),
    )
