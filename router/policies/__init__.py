"""Routing policies: what each request would cost on each worker. A new policy is one class and one line here."""

from __future__ import annotations

from typing import Any

from router.policies.base import Policy
from router.policies.baselines import (
    LeastLoadPolicy,
    PowerOfTwoPolicy,
    PrefixHashPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from router.policies.choice import read_policy
from router.policies.cost import CostPolicy
from router.policies.peers.dynamo import DynamoPolicy
from router.policies.peers.llm_d import LlmDPolicy
from router.policies.peers.llm_d_affinity import LlmDAffinityPolicy
from router.policies.peers.ray_prefix import RayPrefixPolicy
from router.policies.peers.sglang import SglangPolicy

_POLICIES: tuple[type[Any], ...] = (
    CostPolicy,
    RandomPolicy,
    RoundRobinPolicy,
    LeastLoadPolicy,
    PowerOfTwoPolicy,
    PrefixHashPolicy,
    DynamoPolicy,
    LlmDPolicy,
    LlmDAffinityPolicy,
    SglangPolicy,
    RayPrefixPolicy,
)
POLICY_NAMES: tuple[str, ...] = tuple(policy.name for policy in _POLICIES)


def make_policy(text: str) -> Policy:
    """The policy of that name, with the knobs that follow it. Raises `ConfigError` that lists names or knobs."""
    return read_policy(text, dict(zip(POLICY_NAMES, _POLICIES, strict=True)))
