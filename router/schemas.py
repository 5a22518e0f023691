"""JSON Schemas that answers are held to: checked for size and form; what they mean is the engine's business."""

from __future__ import annotations

import json
from typing import Any

from router import fields
from shared.errors import InvalidRequest

MAX_SCHEMA_BYTES = 64 << 10
"""As JSON. OpenAI allows 120,000 characters; an engine's thread works on one of this size for seconds already."""
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays within each other. OpenAI's ten levels of nested objects are some thirty of these."""
MAX_SCHEMA_VALUES = 5000
"""Keys and values of all levels together."""
_ANY_OBJECT = '{"type":"object"}'


def schema(value: Any, param: str) -> dict[str, Any]:
    """A JSON Schema within the limits. Does not modify."""
    found = fields.mapping(value, param)
    num_values = 0
    level: list[Any] = [found]
    for _ in range(MAX_SCHEMA_DEPTH):
        # Level by level, so that no depth of a caller's can exhaust the stack.
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
        num_values += len(level)
        level = [item for item in level if isinstance(item, dict | list)]
        if num_values > MAX_SCHEMA_VALUES:
            raise InvalidRequest(f"Invalid '{param}': has over {MAX_SCHEMA_VALUES} values.", param=param)
        if not level:
            break
    else:
        raise InvalidRequest(f"Invalid '{param}': is nested over {MAX_SCHEMA_DEPTH} levels deep.", param=param)
    if len(as_json(found, param)) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"Invalid '{param}': longer than {MAX_SCHEMA_BYTES} bytes as JSON.", param=param)
    return found


def response_format(value: Any, param: str) -> str:
    """The schema, as JSON, that an answer of this format has; empty for plain text."""
    given = {name: item for name, item in fields.mapping(value, param).items() if item is not None}
    kind = fields.required(given, "type", f"{param}.type")
    known: dict[str, tuple[str, ...]] = {"text": (), "json_object": (), "json_schema": ("json_schema",)}
    if not isinstance(kind, str) or kind not in known:
        words = ", ".join(map(repr, known))
        raise InvalidRequest(
            f"'{param}.type' {fields.brief(kind)} is not supported; only {words} are.", param=f"{param}.type"
        )
    for name in given:
        if name != "type" and name not in known[kind]:
            unknown = f"{param}.{fields.brief_name(name)}"
            raise InvalidRequest(f"'{unknown}' is not supported for '{kind}'.", param=unknown)
    if kind != "json_schema":
        return _ANY_OBJECT if kind == "json_object" else ""
    return _named_schema(fields.required(given, "json_schema", f"{param}.json_schema"), f"{param}.json_schema")


def _named_schema(value: Any, param: str) -> str:
    given = {name: item for name, item in fields.mapping(value, param).items() if item is not None}
    for name in given:
        if name not in ("name", "description", "schema", "strict"):
            unknown = f"{param}.{fields.brief_name(name)}"
            raise InvalidRequest(f"'{unknown}' is not supported.", param=unknown)
    fields.label(fields.required(given, "name", f"{param}.name"), f"{param}.name")
    fields.text(given.get("description", ""), f"{param}.description")
    # An answer is held to its schema either way: there is nothing laxer than that.
    fields.flag(given.get("strict", True), f"{param}.strict")
    where = f"{param}.schema"
    return as_json(schema(fields.required(given, "schema", where), where), where)


def as_json(value: Any, param: str) -> str:
    """Compact JSON. Raises `InvalidRequest` for what JSON has no word for."""
    try:
        written = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError as error:
        raise InvalidRequest(f"Invalid '{param}': is no JSON: {error}", param=param) from None
    return written
