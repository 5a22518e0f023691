"""The shipped cluster.yaml in each of its variants, which it holds as blocks of comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CLUSTER_FILE = Path(__file__).parents[2] / "cluster.yaml"
VARIANTS = ("AWS", "Google Cloud", "On premises")


def cluster_document(variant: str) -> dict[str, Any]:
    """What the file means once the block named `variant` stands in the place between its two rules."""
    lines = CLUSTER_FILE.read_text().splitlines()
    if variant != VARIANTS[0]:
        first, last = (number for number, line in enumerate(lines) if line.startswith("# ====="))
        lines = [*lines[:first], *_block(lines, variant), *lines[last + 1 :]]
    loaded: dict[str, Any] = yaml.safe_load("\n".join(lines))
    return loaded


def _block(lines: list[str], variant: str) -> list[str]:
    start = next(number for number, line in enumerate(lines) if line.startswith(f"# {variant} -----"))
    block = []
    for line in lines[start + 1 :]:
        if line.startswith("#:"):
            block.append(line.removeprefix("#:").removeprefix(" "))
        elif block:
            break
    return block
