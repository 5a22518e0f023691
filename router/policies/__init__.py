"""Routing policies: pure rankings of workers for one request. A new policy is one class and one line here."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import Policy
from router.policies.baselines import (
    LeastLoadPolicy,
    PowerOfTwoPolicy,
    PrefixHashPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from router.policies.cost import CostPolicy
from shared.errors import ConfigError

_POLICIES: tuple[Callable[[], Policy], ...] = (
    CostPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    LeastLoadPolicy,
    PowerOfTwoPolicy,
    PrefixHashPolicy,
)


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises `ConfigError` that lists the names."""
    name_to_policy = {policy.name: policy for policy in (make() for make in _POLICIES)}
    if name not in name_to_policy:
        raise ConfigError(f"--policy: invalid value {name!r} (choose from {', '.join(name_to_policy)})")
    return name_to_policy[name]
