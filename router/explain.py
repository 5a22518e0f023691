"""What a router would decide about one prompt now, without running it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from router import fields
from router.credit import Credit, prefix_hash
from router.decisions import Candidate, candidates_of, reason_of
from router.policies.base import Ranking, Requests
from router.prompts import Prompt, prompt_tokens
from router.requests import GenerateRequest
from router.service import Router
from router.tables import or_dash, table
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import DirectoryUnavailable, InvalidRequest, NoWorker
from shared.hashing import pack_tokens
from shared.types import RequestId, Sampling

_NOMINAL_OUTPUT_TOKENS = 64
_FIRST_STATUS_S = 2.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision that nobody has acted on."""

    num_prompt_tokens: int
    num_prompt_blocks: int
    """Full ones, which alone have keys."""
    policy: str
    worker: str
    is_sent_now: bool
    """Whether the request would be sent at once; if not, it would wait for that worker."""
    is_directory_known: bool
    """Whether the directory has answered; if not, nothing counts as cached."""
    why: str
    candidates: tuple[Candidate, ...]
    """The best one first, the others by cost."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


async def explain_prompt(router: Router, prompt: Prompt, tokenizer: Tokenizer, settings: Settings) -> dict[str, Any]:
    """What `explain` tells of a prompt as it stands in a file or a body, in plain values."""
    token_ids = await asyncio.to_thread(prompt_tokens, prompt, tokenizer, settings, add_generation_prompt=True)
    return (await explain(router, token_ids, salt=prompt.salt)).to_json()


async def explain(router: Router, token_ids: Sequence[int], *, salt: str = "") -> Explanation:
    """Weigh a prompt as if it came now and alone. Books, promises and sends nothing.

    Raises `NoWorker` where there is none to choose from.
    """
    request = GenerateRequest(
        RequestId("explain"), pack_tokens(token_ids), Sampling(max_tokens=_NOMINAL_OUTPUT_TOKENS), salt=salt
    )
    block_size_tokens = router.scheme.block_size_tokens
    keys = router.keys(request)
    is_directory_known = True
    worker_to_match = {}
    try:
        worker_to_match = dict(await router.directory.match(keys, router.fleet.worker_to_instance))
    except DirectoryUnavailable:
        is_directory_known = False
    loads = router.fleet.loads()
    if not len(loads):
        raise NoWorker("no worker takes requests now")
    credit = Credit(router.hints, block_size_tokens=block_size_tokens, min_prefix_tokens=router.min_prefix_tokens)
    credit.relay(loads)
    credited = credit.row(request, keys, worker_to_match)
    num_tokens = request.num_prompt_tokens + _NOMINAL_OUTPUT_TOKENS
    requests = Requests(
        ordinals=np.zeros(1, dtype=np.int64),
        num_prompt_tokens=np.array([request.num_prompt_tokens], dtype=np.int64),
        prefix_hashes=np.array([prefix_hash(request, keys)], dtype=np.uint64),
        next_hashes=np.array([credited.next_hash], dtype=np.uint64),
        demand_blocks=np.array([-(-num_tokens // block_size_tokens)], dtype=np.int64),
        age_s=np.zeros(1),
        matched_tokens=credited.tokens[None, :],
        under_way=np.array([credited.under_way], dtype=np.int64),
    )
    costs = router.policy.costs(requests, loads, router.queue.fleet_state(loads), random.Random(0))
    best = int(costs.best(loads)[0])
    candidates = candidates_of(Ranking.of_row(costs, loads, requests, 0, best))
    return Explanation(
        num_prompt_tokens=request.num_prompt_tokens,
        num_prompt_blocks=len(keys),
        policy=router.policy.name,
        worker=loads.workers[best],
        is_sent_now=costs.can_send is None or bool(costs.can_send[0, best]),
        is_directory_known=is_directory_known,
        why=reason_of(candidates),
        candidates=candidates,
    )


def read_body(raw: bytes) -> Prompt:
    """The prompt in a JSON body. Raises `InvalidRequest` that names the field which is wrong."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict) or not set(body) <= {"messages", "prompt", "cache_salt", "tenant"}:
        raise InvalidRequest("the body must be an object with messages or prompt, and cache_salt or tenant if wanted")
    if ("messages" in body) == ("prompt" in body):
        raise InvalidRequest("messages, prompt: exactly one is needed")
    if not isinstance(body.get("prompt", ""), str):
        raise InvalidRequest("prompt: not a string", param="prompt")
    salt = fields.label(body.get("cache_salt") or "", "cache_salt")
    tenant = fields.label(body.get("tenant") or "", "tenant")
    return Prompt(body.get("prompt"), body.get("messages"), salt, tenant=tenant)


async def wait_for_statuses(router: Router) -> None:
    """Give every worker a moment to tell of its load; one that stays silent is taken for idle, as by any router."""
    for _ in range(round(_FIRST_STATUS_S / _LOOK_S)):
        if all(member.status is not None for member in router.fleet.members()):
            return
        await asyncio.sleep(_LOOK_S)


def explanation_text(state: Mapping[str, Any]) -> str:
    """An explanation as a table, the best worker first."""
    names = list(dict.fromkeys(name for candidate in state["candidates"] for name in candidate["terms"]))
    rows = [("worker", "cost", "cached", *names)]
    for candidate in state["candidates"]:
        terms = (_figure(candidate["terms"].get(name)) for name in names)
        rows.append((candidate["worker"], _figure(candidate["total"]), str(candidate["matched_tokens"]), *terms))
    when = "at once" if state["is_sent_now"] else "when it has room"
    lines = [
        f"{state['num_prompt_tokens']} tokens, {state['num_prompt_blocks']} full blocks, policy {state['policy']}",
        f"would go to {state['worker']}, {when}: {state['why']}",
    ]
    if not state["is_directory_known"]:
        lines.append("the directory does not answer: nothing counts as cached")
    return "\n".join([*lines, table(rows)])


def _figure(value: float | None) -> str:
    return or_dash(None if value is None else f"{value:.4g}")
