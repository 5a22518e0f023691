"""Which JSON Schemas vLLM holds an answer to in full. What its library of grammars would pass over is found here.

The library (xgrammar 0.2) ignores what it does not know, and most of what stands beside a reference or an alternative:
answers would then break their schema, and nobody would know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"}
)
_CHOOSERS = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that settle a value by themselves: of what else constrains it beside them, the library sees nothing."""
_CONSTRAINTS = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "minLength", "maxLength", "pattern", "format",
        "items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    }
)  # fmt: skip
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name."""
_HOLDERS = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contains")
"""Keywords that hold one schema."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def refusal_of(schema: Any) -> str | None:
    """What of a schema would be passed over, in words; `None` if nothing. `oneOf` counts as `anyOf`."""
    left = [schema]
    while left:
        found = left.pop()
        if not isinstance(found, dict):
            continue
        if (refusal := _refusal_of_one(found)) is not None:
            return refusal
        left += _within(found)
    return None


def _refusal_of_one(schema: Mapping[str, Any]) -> str | None:
    if ignored := sorted(_IGNORED & schema.keys()):
        return f"'{ignored[0]}' is not supported"
    constraints = sorted(_CONSTRAINTS & schema.keys())
    choosers = [name for name in _CHOOSERS if name in schema]
    if len(choosers) > 1 or (choosers and constraints):
        beside = choosers[1] if len(choosers) > 1 else constraints[0]
        return f"'{beside}' beside '{choosers[0]}' is not supported"
    if constraints and not choosers and "type" not in schema and "properties" not in schema:
        return f"'{constraints[0]}' without a 'type' is not supported"
    if isinstance(schema.get("pattern"), str) and _LOOKAROUND.search(schema["pattern"]):
        return "a 'pattern' that looks around is not supported"
    return None


def _within(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Schemas within a schema; what stands in `enum`, `default` and the like is none."""
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in _HOLDERS:
        if name in schema:
            yield schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
