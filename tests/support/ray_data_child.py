"""A process that maps a dataset over the workers of `kvroute up`: `python -m tests.support.ray_data_child RUN_DIR OUT`.

It has a Ray of its own, as a user's program has. Writes the rows that come out as one JSON array.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import ray.data

from router.ray_data import map_prompts
from shared.config import Settings

NUM_ROWS, NUM_BEGINNINGS = 240, 6


def rows() -> list[dict[str, Any]]:
    return [
        {"number": number, "text": f"beginning {number % NUM_BEGINNINGS} " * 40 + f"question {number}"}
        for number in range(NUM_ROWS)
    ]


def to_body(row: dict[str, Any]) -> dict[str, Any]:
    if row["number"] % 2:
        return {"messages": [{"role": "user", "content": row["text"]}], "max_tokens": 4}
    # One row is longer than any worker's context.
    return {"prompt": row["text"] * (200 if row["number"] == 100 else 1), "max_tokens": 4}


def main(run_dir: Path, output: Path) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    dataset = ray.data.from_items(rows())
    answered = map_prompts(dataset, to_body, Settings(run_dir=run_dir), window_rows=100)
    output.write_text(json.dumps(answered.take_all()))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
