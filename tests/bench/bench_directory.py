"""Measures the directory on servers of its own and prints one JSON line: `python -m tests.bench.bench_directory`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from shared.directory.bench import measure

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(message)s")
    figures = asyncio.run(measure(logging.getLogger("bench").info))
    sys.stdout.write(json.dumps({name: round(figure, 3) for name, figure in figures.items()}) + "\n")
