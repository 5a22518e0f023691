"""Measures how fast a fleet is simulated and prints one JSON line: `python -m tests.bench.bench_simulator`.

Sixteen 13B workers on A100s with 860 blocks of 64 tokens, publishers, directory and mirrors included, under the first
2,000 requests of the Mooncake conversation trace with prompts cut to 16,384 tokens; where that trace is not in
`KVROUTE_TRACE_DIR`, under generated requests of about the same lengths. Seconds are those of the processor, so that
they count what one core does.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from router.policies import make_policy
from router.simulation import Arrival, FleetSpec, simulate

TRACE = "mooncake_conversation_head6000.jsonl"
NUM_REQUESTS = 2000
MOST_TOKENS = 16_384
TOKENS_PER_HASH = 512
RUNS = (("round_robin", 1), ("cost", 1), ("cost", 4))


def trace_rows(path: Path) -> Iterator[tuple[float, int, int, list[int]]]:
    with path.open(encoding="utf-8") as lines:
        for _, line in zip(range(NUM_REQUESTS), lines, strict=False):
            row = json.loads(line)
            yield row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]


def generated_rows() -> Iterator[tuple[float, int, int, list[int]]]:
    """Chats: each request goes on with one of before, or begins anew after a text that all of them share."""
    rng = random.Random(0)
    chats: list[list[int]] = []
    at_s, num_hashes = 0.0, 1
    for _ in range(NUM_REQUESTS):
        at_s += rng.expovariate(3.0)
        old = rng.choice(chats) if chats and rng.random() < 0.4 else [0]
        num_new = min(32 - len(old), 1 + int(rng.expovariate(1 / 20)))
        hashes = old + list(range(num_hashes, num_hashes + max(0, num_new)))
        num_hashes += max(0, num_new)
        chats.append(hashes)
        yield at_s, len(hashes) * TOKENS_PER_HASH - rng.randrange(500), 1 + int(rng.expovariate(1 / 340)), hashes


def arrivals(rows: Iterator[tuple[float, int, int, list[int]]]) -> Iterator[Arrival]:
    for at_s, num_prompt_tokens, num_output_tokens, hashes in rows:
        num_tokens = min(num_prompt_tokens, MOST_TOKENS)
        packed = b"".join(
            bytes(byte & (0x7F if place % 4 == 3 else 0xFF) for place, byte in enumerate(text))
            for text in (random.Random(number).randbytes(TOKENS_PER_HASH * 4) for number in hashes[:32])
        )
        yield Arrival(at_s, packed[: num_tokens * 4], num_output_tokens)


def main() -> None:
    path = Path(os.environ.get("KVROUTE_TRACE_DIR", "../shared/traces")) / TRACE
    is_trace = path.is_file()
    if not is_trace:
        sys.stderr.write(f"{path} is not there: generated requests in its place; KVROUTE_TRACE_DIR names its folder\n")
    arrived = list(arrivals(trace_rows(path) if is_trace else generated_rows()))
    figures = {}
    for policy, num_routers in RUNS:
        spec = FleetSpec(16, "13b-a100", num_routers=num_routers, num_blocks=860, lag_s=0.001)
        started_s = time.process_time()
        result = simulate(spec, make_policy(policy), arrived)
        cpu_s = time.process_time() - started_s
        figures[f"{policy}_{num_routers}"] = {
            "requests_per_s": round(len(arrived) / cpu_s, 1),
            "block_events_per_s": round(result.num_block_events / cpu_s),
            "virtual_s_per_s": round(result.makespan_s / cpu_s, 1),
        }
    command = "python -m tests.bench.bench_simulator"
    trace = TRACE if is_trace else "generated"
    sys.stdout.write(
        json.dumps({"bench": "simulator", "command": command, "trace": trace, "num_requests": len(arrived), **figures})
        + "\n"
    )


if __name__ == "__main__":
    main()
