"""The command `kvroute demo` over the beginning of its batch only: the rest takes minutes, and shows nothing new.

Usage: `python -m tests.support.short_demo NUM_ROWS ARGUMENTS`.
"""

from __future__ import annotations

import sys
from typing import Any

from router import demo_input
from router.cli import main


def shorten(num_rows: int) -> None:
    """Have the demo find so many rows; before it is imported, which the command does itself and not earlier."""
    all_rows = demo_input.demo_rows

    def first_rows(seed: int, **options: Any) -> list[dict[str, Any]]:
        return all_rows(seed, **options)[:num_rows]

    demo_input.demo_rows = first_rows


if __name__ == "__main__":
    shorten(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
