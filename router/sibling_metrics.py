"""The metrics of several server processes as one text for Prometheus, whichever of them it reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.sibling_words import Place

METRICS = "metrics"
"""Under which name a process tells its own."""


_UP = "kvroute_router_up"


async def all_metrics(place: Place, render: Callable[[], bytes]) -> bytes:
    """The metrics of all processes, each under a label of its own, and which of them have answered."""
    told = {place.number: render(), **await place.ask_others(METRICS)}
    up = [f"# HELP {_UP} 1 for each server process that has told its metrics, 0 for one that has not.\n"]
    up += [f"# TYPE {_UP} gauge\n"]
    up += [f'{_UP}{{router="{number}"}} {int(raw is not None)}\n' for number, raw in sorted(told.items())]
    texts = {str(number): raw.decode() for number, raw in sorted(told.items()) if raw is not None}
    return merged_metrics(texts) + "".join(up).encode()


def merged_metrics(router_to_text: Mapping[str, str]) -> bytes:
    """Several texts for a Prometheus server as one; samples get a label that says whose they are."""
    family_to_lines: dict[str, list[str]] = {}
    family_to_samples: dict[str, list[str]] = {}
    for router, text in router_to_text.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                lines = family_to_lines.setdefault(family, [])
                lines += [line] if line not in lines else []
            elif line:
                name, brace, rest = line.partition("{")
                label = f'router="{router}"'
                labelled = f"{name}{{{label},{rest}" if brace else f"{{{label}}} ".join(line.split(" ", 1))
                family_to_samples.setdefault(family, []).append(labelled)
    families = [[*lines, *family_to_samples.get(family, [])] for family, lines in family_to_lines.items()]
    return "\n".join([*(line for lines in families for line in lines), ""]).encode()
