"""`kvroute bench batch`: a templated batch by plan, simulated on eight 13B workers and for real on two small ones.

Figures of the simulation are its virtual time; what is named `_real` is wall time of this machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router.batch import prepare_batch
from router.batch_job import run_rows
from router.batch_report import BatchReport, PossibleHits
from router.batch_simulation import simulate_batch
from router.demo_input import WORKER_SETTINGS, demo_rows
from router.planned_run import fleet_of
from router.policies import make_policy
from router.simulation import Arrival, FleetResult, FleetSpec, simulate
from shared.config import Settings
from shared.errors import KvrouteError
from shared.hashing import TOKEN_SIZE_BYTES, block_keys, num_usable_blocks, pack_tokens, root_key
from shared.types import BlockKey, CacheScheme
from worker.engines.profiles import LatencyProfile, load_profile

_BLOCK_SIZE_TOKENS = 64
_IN_FLIGHT_PER_SEQ = 2
"""Of the peer's rows, so many for each sequence of a worker: one runs and one waits."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seed: int = 0
    num_rows: int = 5000
    num_templates: int = 60
    prefix_tokens: tuple[int, int] = (2048, 8192)
    own_tokens: tuple[int, int] = (32, 256)
    output_tokens: tuple[int, int] = (4, 16)
    num_workers: int = 8
    num_blocks: int = 860
    max_num_seqs: int = 64
    num_real_rows: int = 330
    """None are run on real workers where it is zero."""


async def measure(say: Callable[[str], None], sizes: Sizes | None = None) -> dict[str, float | str]:
    """Plan against peers, in virtual time and on real workers."""
    sizes = sizes or Sizes()
    # A loop in virtual time cannot run within this one.
    simulated = await asyncio.to_thread(_simulated, sizes, say)
    figures: dict[str, float | str] = {"seed": sizes.seed, "simulated": " ".join(simulated), **simulated}
    if sizes.num_real_rows:
        figures |= await _real(sizes, say)
    return figures


# Simulated.


def templated_rows(sizes: Sizes) -> list[Arrival]:
    """Rows in random order, each a template's long beginning and text of its own, all there at the beginning."""
    rng = random.Random(sizes.seed)

    def text(bounds: tuple[int, int]) -> bytes:
        return pack_tokens(rng.randrange(1000, 30_000) for _ in range(rng.randint(*bounds)))

    prefixes = [text(sizes.prefix_tokens) for _ in range(sizes.num_templates)]
    return [
        Arrival(0.0, rng.choice(prefixes) + text(sizes.own_tokens), rng.randint(*sizes.output_tokens))
        for _ in range(sizes.num_rows)
    ]


def _prompts(rows: Sequence[Arrival]) -> Iterator[tuple[int, int, list[BlockKey]]]:
    """Of each prompt its tokens, how many of its blocks a cache can save, and the keys of all."""
    root = root_key(CacheScheme("bench", _BLOCK_SIZE_TOKENS))
    for row in rows:
        num_tokens = _num_tokens(row)
        keys = block_keys(row.token_ids, _BLOCK_SIZE_TOKENS, root)
        yield num_tokens, num_usable_blocks(num_tokens, _BLOCK_SIZE_TOKENS), keys


def distinct_tokens(rows: Sequence[Arrival]) -> int:
    """Prompt tokens that are left to compute if each distinct block is computed once."""
    possible = PossibleHits()
    for _, num_usable, keys in _prompts(rows):
        possible.add(keys, num_usable)
    return sum(map(_num_tokens, rows)) - possible.num_blocks * _BLOCK_SIZE_TOKENS


def bound_s(rows: Sequence[Arrival], profile: LatencyProfile, num_workers: int) -> float:
    """No schedule ends sooner: each distinct block once, perfect balance, every step full of prompts or of sequences.

    The time that prompt tokens take for seeing those before them is left out.
    """
    num_distinct = distinct_tokens(rows)
    num_output = sum(row.num_output_tokens for row in rows)
    # Each answer's tokens see its prompt and what came before them; the first token comes with the prompt.
    num_context = sum((row.num_output_tokens - 1) * _num_tokens(row) for row in rows)
    num_steps = max(num_distinct / profile.step_budget_tokens, num_output / profile.max_num_seqs)
    work_s = (
        profile.step_s * num_steps
        + profile.prefill_s_per_token * num_distinct
        + profile.decode_s_per_seq * (num_output - len(rows))
        + profile.decode_s_per_context_token * num_context
    )
    return work_s / num_workers


def least_s(rows: Sequence[Arrival], profile: LatencyProfile, num_workers: int) -> float:
    """The bound, and the time that prompt tokens take for seeing those before them."""
    block_to_pairs, num_pairs = dict[BlockKey, float](), 0.0
    for num_tokens, num_usable, keys in _prompts(rows):
        block_to_pairs |= {key: (index + 0.5) * _BLOCK_SIZE_TOKENS**2 for index, key in enumerate(keys[:num_usable])}
        num_pairs += (num_tokens**2 - (num_usable * _BLOCK_SIZE_TOKENS) ** 2) / 2
    num_pairs += sum(block_to_pairs.values())
    return bound_s(rows, profile, num_workers) + profile.prefill_s_per_token_context * num_pairs / num_workers


def _simulated(sizes: Sizes, say: Callable[[str], None]) -> dict[str, float]:
    profile = load_profile("13b-a100")
    spec = FleetSpec(
        sizes.num_workers,
        profile,
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        num_blocks=sizes.num_blocks,
        max_num_seqs=sizes.max_num_seqs,
        seed=sizes.seed,
    )
    rows = templated_rows(sizes)
    num_seqs = sizes.num_workers * sizes.max_num_seqs
    say(f"simulating {len(rows)} rows over {sizes.num_templates} templates on {sizes.num_workers} workers, by plan")
    ours = simulate_batch(spec, make_policy("cost"), rows, max_under_way=_IN_FLIGHT_PER_SEQ * num_seqs)
    say("the same rows, sorted, by SGLang's rule")
    in_order = sorted(rows, key=lambda row: row.token_ids)
    sglang = make_policy("sglang")
    peer = simulate_batch(spec, sglang, in_order, max_under_way=_IN_FLIGHT_PER_SEQ * num_seqs, is_planned=False)
    at_once = simulate(spec, sglang, in_order)
    say("the same rows, in their order, by round robin")
    unplanned = simulate_batch(
        spec, make_policy("round_robin"), rows, max_under_way=_IN_FLIGHT_PER_SEQ * num_seqs, is_planned=False
    )
    num_distinct = distinct_tokens(rows)
    least = least_s(rows, replace(profile, max_num_seqs=sizes.max_num_seqs), sizes.num_workers)
    return {
        "num_rows": len(rows),
        "computed_over_distinct": _computed(ours) / num_distinct,
        "makespan_over_bound": ours.makespan_s / bound_s(rows, profile, sizes.num_workers),
        "makespan_over_least": ours.makespan_s / least,
        "makespan_over_sorted_sglang": ours.makespan_s / peer.makespan_s,
        "makespan_over_sorted_sglang_at_once": ours.makespan_s / at_once.makespan_s,
        "least_over_sorted_sglang_at_once": least / at_once.makespan_s,
        "makespan_s": ours.makespan_s,
        "sorted_sglang_computed_over_distinct": _computed(peer) / num_distinct,
        "round_robin_computed_over_distinct": _computed(unplanned) / num_distinct,
        "makespan_over_round_robin": ours.makespan_s / unplanned.makespan_s,
    }


def _computed(result: FleetResult) -> int:
    """Prompt tokens that the workers computed. Raises `KvrouteError` if a row failed."""
    failed = [outcome.error for outcome in result.outcomes if outcome.error is not None]
    if failed:
        raise KvrouteError(f"{len(failed)} of the simulated rows failed: {failed[0]}")
    return sum(outcome.num_prompt_tokens - outcome.cached_tokens for outcome in result.outcomes)


def _num_tokens(row: Arrival) -> int:
    return len(row.token_ids) // TOKEN_SIZE_BYTES


# Real.

_REAL_ANSWER_TOKENS = 4


def real_rows(num_rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """The demo's assistants, each asked many short things, in random order."""
    rng = random.Random(seed)
    systems = sorted(
        {
            row["body"]["messages"][0]["content"]
            for row in demo_rows(seed)
            if row["body"]["messages"][0]["role"] == "system"
        }
    )
    numbers = list(range(num_rows))
    rng.shuffle(numbers)
    for number in numbers:
        messages = [
            {"role": "system", "content": systems[number % len(systems)]},
            {"role": "user", "content": f"Case {rng.randrange(1_000_000)}: which of the rules applies?"},
        ]
        body = {"model": "smollm2", "messages": messages, "max_tokens": _REAL_ANSWER_TOKENS, "temperature": 0}
        yield {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


async def _real(sizes: Sizes, say: Callable[[str], None]) -> dict[str, float]:
    settings = Settings(**WORKER_SETTINGS)
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in real_rows(sizes.num_real_rows, sizes.seed)))
        say("real workers, by plan, with empty caches")
        planned = await _run_real(settings, source, say)
        say("real workers, by round robin in the order of the file, with empty caches")
        unplanned = await _run_real(settings.model_copy(update={"policy": "round_robin"}), source, say)
    num_distinct = planned.prompt_tokens - planned.possible_cached_tokens
    return {
        "num_rows_real": sizes.num_real_rows,
        "wall_over_round_robin_real": planned.wall_s / unplanned.wall_s,
        "wall_s_real": planned.wall_s,
        "round_robin_wall_s_real": unplanned.wall_s,
        "computed_over_distinct_real": (planned.prompt_tokens - planned.cached_tokens) / num_distinct,
        "round_robin_computed_over_distinct_real": (unplanned.prompt_tokens - unplanned.cached_tokens) / num_distinct,
    }


async def _run_real(settings: Settings, source: Path, say: Callable[[str], None]) -> BatchReport:
    """A batch on new workers, with as many rows under way as a plan has, whether there is one or not."""
    # Brings Ray along.
    from router import launch

    output = source.with_name(f"{settings.policy}.jsonl")
    with prepare_batch(source, output, served_model=settings.model_name, resume=False) as prepared:
        async with launch.launched(settings, say) as serving:
            fleet = fleet_of(serving.router)
            assert fleet is not None, "workers are ready"
            num_rows = sum(room.num_rows for room in fleet.worker_to_room.values())
            report = await run_rows(serving, prepared, max_in_flight=num_rows, progress=False)
    if report.num_failed or report.is_interrupted:
        raise KvrouteError(f"{report.num_failed} of {report.num_rows} rows failed")
    return report
