"""Checks of single JSON values: each returns the value as it is used, or raises `InvalidRequest` with its name."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
"""Far over what anybody stops at, far under what would weigh on the way to a worker."""
MAX_LABEL_CHARS = 512
"""Longest name: a model's, a user's, a cache salt."""
_MAX_NAME_CHARS = 64
_MAX_INTEGER = (1 << 63) - 1
_MAX_TOKEN_ID = (1 << 31) - 1

Check = Callable[[Any, str], Any]


def brief(value: Any) -> str:
    """A caller's value as it is quoted in a message: cut short, whatever its size."""
    return reprlib.repr(value)


def brief_name(name: str, max_chars: int = _MAX_NAME_CHARS) -> str:
    """A caller's name of a field as it is quoted in a message: cut short, whatever its size."""
    return name if len(name) <= max_chars else name[: max_chars - 3] + "..."


def wrong_type(value: Any, param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid type for '{param}': expected {wanted}, but got {kind_of(value)} instead.", param=param
    )


def kind_of(value: Any) -> str:
    """A JSON value's type in JSON's words."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        type(None): "null",
    }
    return names[type(value)]


def required(given: Mapping[str, Any], name: str, param: str | None = None) -> Any:
    if name not in given:
        raise InvalidRequest(f"Missing required parameter: '{param or name}'.", param=param or name)
    return given[name]


def text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, param, "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"Invalid '{param}': holds half of a surrogate pair.", param=param) from None
    return value


def label(value: Any, param: str) -> str:
    found = text(value, param)
    if len(found) > MAX_LABEL_CHARS:
        raise InvalidRequest(f"Invalid '{param}': longer than {MAX_LABEL_CHARS} characters.", param=param)
    return found


def flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, param, "a boolean")
    return value


def mapping(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object")
    return value


def number(low: float, high: float, *, is_low_open: bool = False) -> Check:
    """A check for numbers of `[low, high]`, or `(low, high]`."""

    def check(value: Any, param: str) -> float:
        if type(value) not in (int, float):
            raise wrong_type(value, param, "a number")
        # Some parsers let NaN through; it fails both comparisons.
        if not ((low < value if is_low_open else low <= value) and value <= high):
            span = f"{'over' if is_low_open else 'at least'} {low:g} and at most {high:g}"
            raise InvalidRequest(f"Invalid '{param}': must be {span}, but got {brief(value)}.", param=param)
        return float(value)

    return check


def integer(low: int, high: int = _MAX_INTEGER) -> Check:
    def check(value: Any, param: str) -> int:
        if type(value) is not int:
            raise wrong_type(value, param, "an integer")
        if not low <= value <= high:
            span = f"at least {low}" if value < low else f"at most {high}"
            raise InvalidRequest(f"Invalid '{param}': must be {span}, but got {brief(value)}.", param=param)
        return value

    return check


def token_ids(value: Any, param: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise wrong_type(value, param, "an array of integers")
    # Long prompts come as token ids: names are put together only where one is wrong.
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= _MAX_TOKEN_ID)):
        return tuple(value)
    check = integer(0, _MAX_TOKEN_ID)
    return tuple([check(item, f"{param}[{index}]") for index, item in enumerate(value)])


def stop_token_ids(value: Any, param: str) -> tuple[int, ...]:
    found = token_ids(value, param)
    if len(found) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"Invalid '{param}': at most {MAX_STOP_TOKEN_IDS} ids are allowed.", param=param)
    return found


def stop_strings(value: Any, param: str) -> tuple[str, ...]:
    if isinstance(value, str):
        strings = {param: value}
    elif isinstance(value, list):
        strings = {f"{param}[{index}]": item for index, item in enumerate(value)}
    else:
        raise wrong_type(value, param, "a string or an array of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"Invalid '{param}': at most {MAX_STOP_STRINGS} stop strings are allowed.", param=param)
    for name, string in strings.items():
        if not 1 <= len(text(string, name)) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"Invalid '{name}': must have 1 to {MAX_STOP_STRING_CHARS} characters.", param=name)
    return tuple(strings.values())


def stream_options(value: Any, param: str) -> bool:
    """Whether the stream is to end with its token counts."""
    wants_usage = False
    for name, option in mapping(value, param).items():
        if name not in ("include_usage", "include_obfuscation"):
            unknown = f"{param}.{brief_name(name)}"
            raise InvalidRequest(f"'{unknown}' is not supported.", param=unknown)
        if option is None:
            continue
        if flag(option, f"{param}.{name}") and name == "include_obfuscation":
            raise InvalidRequest(f"'{param}.{name}' is not supported (only False is).", param=f"{param}.{name}")
        wants_usage |= option
    return wants_usage
