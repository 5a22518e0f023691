"""Reads what users write for a policy: `NAME`, or `MODULE:CLASS` for one of their own, then any `:KNOB=VALUE`.

Knobs are the fields of a policy's dataclass. What users bring is tried before it is trusted. The table of names is the
caller's.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from router.policies.base import Costs, Flags, FleetState, Floats, Loads, Policy, Requests
from shared.errors import ConfigError, KvrouteError
from shared.types import Instance, WorkerId

_MEMBERS = ("name", "is_cache_aware", "is_late_binding", "costs", "is_ready", "urgency")


def read_policy(text: str, name_to_type: Mapping[str, type[Any]]) -> Policy:
    """The policy that `text` describes. Raises `ConfigError` that says what is wrong with which part of it."""
    name, *rest = text.split(":")
    if name in name_to_type:
        policy: Policy = _make(name, name_to_type[name], rest)
        return policy
    if not rest or "=" in rest[0]:
        names = ", ".join(name_to_type)
        raise ConfigError(f"--policy: invalid value {text!r} (choose from {names}, or MODULE:CLASS)")
    origin = f"{name}:{rest[0]}"
    return _try(CheckedPolicy(_make(origin, _import(name, rest[0]), rest[1:]), origin))


class CheckedPolicy:
    """A policy that somebody else wrote. What it answers is checked, so that a fault in it is told as its own."""

    def __init__(self, policy: Policy, origin: str) -> None:
        missing = [member for member in _MEMBERS if not hasattr(policy, member)]
        if missing:
            raise ConfigError(f"--policy: {origin} is no policy: it has no {', '.join(missing)}")
        self._policy = policy
        self.origin = origin
        self.name = policy.name
        self.is_cache_aware = policy.is_cache_aware
        self.is_late_binding = policy.is_late_binding

    def costs(self, requests: Requests, loads: Loads, fleet: FleetState, rng: random.Random) -> Costs:
        """Those of the policy. Raises `KvrouteError` unless there is a number for each request and worker."""
        costs = self._policy.costs(requests, loads, fleet, rng)
        if not isinstance(costs, Costs):
            raise KvrouteError(f"policy {self.origin}: costs() gave {type(costs).__name__} and not Costs")
        pairings = (len(requests), len(loads))
        self._check("total", costs.total, pairings)
        self._check("can_send", costs.can_send, pairings)
        self._check("lacks_blocks", costs.lacks_blocks, pairings)
        self._check("tie_hashes", costs.tie_hashes, pairings[:1])
        if np.isnan(costs.total).any():
            row, column = np.argwhere(np.isnan(costs.total))[0]
            raise KvrouteError(f"policy {self.origin}: the total of request {row} on {loads.workers[column]} is NaN")
        return costs

    def is_ready(self, loads: Loads, fleet: FleetState, age_s: Floats) -> Flags:
        """That of the policy."""
        return self._policy.is_ready(loads, fleet, age_s)

    def urgency(self, age_s: Floats, own_s: Floats, work_s: Floats, fleet: FleetState) -> Floats:
        """That of the policy."""
        return self._policy.urgency(age_s, own_s, work_s, fleet)

    def _check(self, name: str, values: Any, shape: tuple[int, ...]) -> None:
        if values is not None and np.shape(values) != shape:
            entries = " and ".join(("request", "worker")[: len(shape)])
            raise KvrouteError(
                f"policy {self.origin}: {name} has the shape {np.shape(values)} and not {shape}, one for each {entries}"
            )


def _make(origin: str, policy_type: Any, texts: list[str]) -> Any:
    """A policy with the knobs given as `KNOB=VALUE`."""
    known = getattr(policy_type, "__dataclass_fields__", {})
    knobs: dict[str, str | None] = {}
    for text in texts:
        knob, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--policy: {origin}: {text!r} is not KNOB=VALUE")
        if knob not in known:
            takes = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"--policy: {origin} has no knob {knob!r} ({takes})")
        if knob in knobs:
            raise ConfigError(f"--policy: {origin}: {knob} is given twice")
        knobs[knob] = None if value == "none" else value
    try:
        return TypeAdapter(policy_type).validate_python(knobs) if knobs else policy_type()
    except ValidationError as error:
        detail = error.errors()[0]
        knob = str(detail["loc"][0])
        reason = detail["msg"] + _bounds(policy_type, knob)
        raise ConfigError(f"--policy: {origin}: invalid value {detail['input']!r} of {knob}: {reason}") from None
    except (TypeError, PydanticUserError) as error:
        raise ConfigError(f"--policy: {origin} cannot be made: {error}") from None


def _bounds(policy_type: Any, knob: str) -> str:
    """What a knob takes, where its type says so."""
    metadata = getattr(getattr(policy_type, "__pydantic_fields__", {}).get(knob), "metadata", ())
    bounds = [f"{sign} {getattr(one, name):g}" for one in metadata for name, sign in _SIGNS if hasattr(one, name)]
    return f" (it takes numbers {' and '.join(bounds)})" if bounds else ""


_SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def _import(module: str, attribute: str) -> Any:
    """A name in a module on Python's path or in the current folder."""
    if os.getcwd() not in sys.path:
        # As for `python -m`: an installed command does not look there by itself.
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"--policy: cannot import {module!r}: {type(error).__name__}: {error}") from error
    if not hasattr(imported, attribute):
        raise ConfigError(f"--policy: module {module!r} ({imported.__file__}) has no {attribute!r}")
    found = getattr(imported, attribute)
    if not callable(found):
        raise ConfigError(f"--policy: {module}:{attribute} is no class: it is {type(found).__name__}")
    return found


def _try(policy: CheckedPolicy) -> CheckedPolicy:
    """`policy`, once it has answered for two requests and three workers: better now than for the first user."""
    try:
        first, again = (policy.costs(_REQUESTS, _LOADS, _FLEET, random.Random(0)) for _ in range(2))
    except KvrouteError as error:
        raise ConfigError(f"--policy: {error}") from None
    except Exception as error:
        raise ConfigError(f"--policy: {policy.origin} fails in a trial: {type(error).__name__}: {error}") from error
    if not np.array_equal(first.total, again.total):
        raise ConfigError(f"--policy: {policy.origin} gives different costs for equal arguments: it may keep no state")
    return policy


def _frozen(values: Any, kind: type[Any]) -> Any:
    """An array that nobody can write to."""
    array = np.array(values, dtype=kind)
    array.flags.writeable = False
    return array


_LOADS = Loads(
    workers=(WorkerId("w0"), WorkerId("w1"), WorkerId("w2")),
    instances=(Instance("0"), Instance("1"), Instance("2")),
    hashes=_frozen([1, 2, 3], np.uint64),
    is_cache_aware=_frozen([True, True, False], np.bool_),
    is_home=_frozen([True, False, True], np.bool_),
    num_requests=_frozen([0, 3, 8], np.int64),
    num_waiting=_frozen([0, 1, 0], np.int64),
    max_num_seqs=_frozen([8, 8, 8], np.int64),
    queued_prefill_tokens=_frozen([0, 2000, 0], np.int64),
    kv_used_blocks=_frozen([0, 400, 800], np.int64),
    kv_demand_blocks=_frozen([0, 400, 900], np.int64),
    kv_total_blocks=_frozen([800, 800, 800], np.int64),
    num_resident_blocks=_frozen([0, 800, 800], np.int64),
    step_budget_tokens=_frozen([0, 2048, 2048], np.int64),
    prefill_s_per_token=_frozen([1e-4, 1e-4, 1e-4], np.float64),
    step_s=_frozen([0.0, 0.01, 0.01], np.float64),
    decode_s_per_seq=_frozen([0.0, 0.001, 0.001], np.float64),
    round_trip_s=_frozen([0.0, 0.001, 0.001], np.float64),
    status_age_s=_frozen([0.0, 0.1, 0.1], np.float64),
)
_REQUESTS = Requests(
    ordinals=_frozen([0, 1], np.int64),
    num_prompt_tokens=_frozen([4096, 1], np.int64),
    prefix_hashes=_frozen([4, 5], np.uint64),
    next_hashes=_frozen([6, 7], np.uint64),
    demand_blocks=_frozen([66, 2], np.int64),
    age_s=_frozen([0.5, 0.0], np.float64),
    matched_tokens=_frozen([[0, 2048, 0], [0, 0, 0]], np.int64),
)
_FLEET = FleetState()
"""A trial at the limits: a worker that has just joined, one that is full, and a fleet that knows nothing yet."""
