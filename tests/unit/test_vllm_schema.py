"""Which schemas an answer can be held to in full, and what of the others would be passed over."""

from __future__ import annotations

from typing import Any

import pytest

from worker.engines.vllm_schema import refusal_of

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        True,
        {"type": "object", "properties": {"not": INTEGER, "if": {"enum": [{"not": 1}]}}, "required": ["not"]},
        {"$defs": {"a": {"type": "string", "maxLength": 3}}, "$ref": "#/$defs/a", "description": "d", "title": "t"},
        {"type": "integer", "enum": [1, 2], "default": 1},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None},
        {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a", "type": "string"}}}]},
        {"type": "array", "items": INTEGER, "minItems": 1, "prefixItems": [INTEGER]},
        {"properties": {"a": INTEGER}, "required": ["a"]},
        {"type": "string", "pattern": "^(?:a|b)$"},
        {"const": {"not": 1}},
    ],
)
def test_schema_that_is_held_in_full_is_taken(schema: Any) -> None:
    assert refusal_of(schema) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": INTEGER}, "'not' is not supported"),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 4}}, "'if' is not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired' is not supported"),
        ({"enum": [1, 9], "minimum": 5}, "'minimum' beside 'enum' is not supported"),
        ({"$ref": "#/$defs/a", "minimum": 7}, "'minimum' beside '$ref' is not supported"),
        ({"$ref": "#/$defs/a", "anyOf": []}, "'anyOf' beside '$ref' is not supported"),
        ({"anyOf": [{"required": ["b"]}], "properties": {}}, "'properties' beside 'anyOf' is not supported"),
        ({"minimum": 7}, "'minimum' without a 'type' is not supported"),
        ({"required": ["a"]}, "'required' without a 'type' is not supported"),
        ({"type": "string", "pattern": "^(?=a)b$"}, "a 'pattern' that looks around is not supported"),
        ({"type": "string", "pattern": "^(?<!a)b$"}, "a 'pattern' that looks around is not supported"),
        ({"type": "object", "properties": {"a": {"items": {"not": {}}, "type": "array"}}}, "'not' is not supported"),
        ({"type": "object", "$defs": {"a": {"not": {}}}}, "'not' is not supported"),
        ({"anyOf": [{"not": {}}]}, "'not' is not supported"),
        ({"type": "object", "additionalProperties": {"minimum": 1}}, "'minimum' without a 'type' is not supported"),
    ],
)
def test_what_would_be_passed_over_is_named(schema: Any, words: str) -> None:
    assert refusal_of(schema) == words


def test_schema_of_any_depth_is_looked_through() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(100_000):
        schema = {"type": "array", "items": schema}
    assert refusal_of(schema) == "'not' is not supported"
    # Taken apart level by level: the interpreter's own way would exhaust the stack.
    while "items" in schema:
        schema = schema.pop("items")
