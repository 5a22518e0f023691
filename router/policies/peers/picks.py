"""How rules that choose in steps are said in costs, and how they draw lots among equals."""

from __future__ import annotations

import random

import numpy as np

from router.policies.base import Flags, Floats, Hashes, Requests


def chosen_first(is_choice: Flags, costs: Floats) -> Floats:
    """(requests, workers): `costs`, raised where there is no choice, so that all of those come after."""
    costs = np.broadcast_to(costs, is_choice.shape)
    return np.where(is_choice, costs, costs + (np.ptp(costs, axis=1, keepdims=True) + 1.0))


def drawn_ties(requests: Requests, rng: random.Random) -> Hashes:
    """A fresh hash for each request, so that equals are drawn from."""
    return np.array([rng.getrandbits(64) for _ in range(len(requests))], dtype=np.uint64)
