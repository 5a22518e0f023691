"""A chat's messages and tools: parsed and checked on the way in, in the form that a chat template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from router import fields
from router.schemas import schema
from shared.errors import InvalidRequest
from shared.types import ToolChoice

MAX_MESSAGES = 16_384
MAX_TOOLS = 128
"""As at OpenAI."""
MAX_TOOLS_BYTES = 256 << 10
"""Of all tools of one request together, as JSON."""
MAX_TOOL_CALLS = 128
"""Of one message."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content")
_OF_ASSISTANTS = ("tool_calls", "reasoning", "reasoning_content")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise fields.wrong_type(value, "messages", "an array of objects")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest(f"Invalid 'messages': must have 1 to {MAX_MESSAGES} items.", param="messages")
    # Long chats have many messages, most of them plain: names are put together only where there is more to look at.
    return tuple(
        [item if _is_plain(item) else _message(item, f"messages[{index}]") for index, item in enumerate(value)]
    )


def tools(value: Any, param: str) -> tuple[dict[str, Any], ...]:
    """A request's tools, each with a name of its own."""
    if not isinstance(value, list):
        raise fields.wrong_type(value, param, "an array of objects")
    if not 1 <= len(value) <= MAX_TOOLS:
        raise InvalidRequest(f"Invalid '{param}': must have 1 to {MAX_TOOLS} items.", param=param)
    found = tuple([_tool(item, f"{param}[{index}]") for index, item in enumerate(value)])
    names = [tool["function"]["name"] for tool in found]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"Invalid '{param}[{index}].function.name': there is another tool {name!r}.",
                param=f"{param}[{index}].function.name",
            )
    if len(json.dumps(found)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"Invalid '{param}': longer than {MAX_TOOLS_BYTES} bytes as JSON.", param=param)
    return found


def tool_choice(value: Any, param: str) -> tuple[ToolChoice, str]:
    """The choice, and the name of the only tool that may be called; empty for any."""
    if isinstance(value, str):
        try:
            return ToolChoice(value), ""
        except ValueError:
            words = ", ".join(repr(choice.value) for choice in ToolChoice)
            raise InvalidRequest(
                f"Invalid '{param}': {fields.brief(value)} is none of {words}, nor an object.", param=param
            ) from None
    given = fields.mapping(value, param)
    if given.get("type") != "function":
        raise InvalidRequest(
            f"'{param}.type' {fields.brief(given.get('type'))} is not supported; only 'function' is.",
            param=f"{param}.type",
        )
    _refuse_others(given, param, ("type", "function"))
    function = fields.mapping(fields.required(given, "function", f"{param}.function"), f"{param}.function")
    _refuse_others(function, f"{param}.function", ("name",))
    name_param = f"{param}.function.name"
    return ToolChoice.REQUIRED, fields.text(fields.required(function, "name", name_param), name_param)


def _tool(value: Any, param: str) -> dict[str, Any]:
    given = _without_nulls(value, param)
    kind = fields.required(given, "type", f"{param}.type")
    if kind != "function":
        raise InvalidRequest(
            f"'{param}.type' {fields.brief(kind)} is not supported; only 'function' is.", param=f"{param}.type"
        )
    _refuse_others(given, param, ("type", "function"))
    where = f"{param}.function"
    function = _without_nulls(fields.required(given, "function", where), where)
    _refuse_others(function, where, ("name", "description", "parameters", "strict"))
    checked: dict[str, Any] = {
        "name": function_name(fields.required(function, "name", f"{where}.name"), f"{where}.name")
    }
    if "description" in function:
        checked["description"] = fields.text(function["description"], f"{where}.description")
    if "parameters" in function:
        checked["parameters"] = schema(function["parameters"], f"{where}.parameters")
    if "strict" in function:
        checked["strict"] = fields.flag(function["strict"], f"{where}.strict")
    return {"type": "function", "function": checked}


def function_name(value: Any, param: str) -> str:
    name = fields.text(value, param)
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"Invalid '{param}': must be 1 to 64 letters, digits, underscores or dashes, but got {fields.brief(name)}.",
            param=param,
        )
    return name


def _is_plain(value: Any) -> bool:
    """Whether a message is a role and a text of ASCII, and so is right as it is."""
    if type(value) is not dict or len(value) != 2:
        return False
    content = value.get("content")
    return type(content) is str and content.isascii() and value.get("role") in _ROLES


def _message(value: Any, param: str) -> dict[str, Any]:
    given = _without_nulls(value, param)
    role = fields.required(given, "role", f"{param}.role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"Invalid '{param}.role': {fields.brief(role)} is none of {', '.join(map(repr, _ROLES))}.",
            param=f"{param}.role",
        )
    for name in given:
        if name not in _MESSAGE_FIELDS or (name in _OF_ASSISTANTS and role != "assistant"):
            unknown = f"{param}.{fields.brief_name(name)}"
            raise InvalidRequest(f"'{unknown}' is not supported.", param=unknown)
    message: dict[str, Any] = {}
    for name in ("role", "name", "tool_call_id"):
        if name in given:
            message[name] = fields.text(given[name], f"{param}.{name}")
    calls = _tool_calls(given.get("tool_calls", []), f"{param}.tool_calls")
    if not calls or "content" in given:
        message["content"] = _content(fields.required(given, "content", f"{param}.content"), f"{param}.content")
    else:
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    for name in ("reasoning", "reasoning_content"):
        if name in given:
            # Templates know the one name or the other, as vLLM found.
            message["reasoning"] = message["reasoning_content"] = fields.text(given[name], f"{param}.{name}")
            break
    return message


def _tool_calls(value: Any, param: str) -> list[dict[str, Any]]:
    """Calls of tools that an answer has made before."""
    if not isinstance(value, list):
        raise fields.wrong_type(value, param, "an array of objects")
    if len(value) > MAX_TOOL_CALLS:
        raise InvalidRequest(f"Invalid '{param}': at most {MAX_TOOL_CALLS} items are allowed.", param=param)
    return [_tool_call(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _tool_call(value: Any, param: str) -> dict[str, Any]:
    given = _without_nulls(value, param)
    if given.get("type", "function") != "function":
        raise InvalidRequest(
            f"'{param}.type' {fields.brief(given['type'])} is not supported; only 'function' is.", param=f"{param}.type"
        )
    _refuse_others(given, param, ("id", "type", "function", "index"))
    where = f"{param}.function"
    function = _without_nulls(fields.required(given, "function", where), where)
    _refuse_others(function, where, ("name", "arguments"))
    call: dict[str, Any] = {"type": "function"}
    if "id" in given:
        call["id"] = fields.text(given["id"], f"{param}.id")
    name = fields.text(fields.required(function, "name", f"{where}.name"), f"{where}.name")
    call["function"] = {"name": name, "arguments": _arguments(function.get("arguments", ""), f"{where}.arguments")}
    return call


def _arguments(value: Any, param: str) -> dict[str, Any]:
    """What templates take: an object. What a model has written otherwise is none, so that the chat can go on."""
    written = fields.text(value, param)
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(value: Any, param: str) -> str:
    if isinstance(value, str):
        return fields.text(value, param)
    if not isinstance(value, list):
        raise fields.wrong_type(value, param, "a string or an array of text parts")
    return "\n".join([_text_part(part, f"{param}[{index}]") for index, part in enumerate(value)])


def _text_part(value: Any, param: str) -> str:
    part = fields.mapping(value, param)
    if part.get("type") != "text":
        raise InvalidRequest(
            f"'{param}.type' {fields.brief(part.get('type'))} is not supported; only 'text' is.", param=f"{param}.type"
        )
    _refuse_others(part, param, ("type", "text"))
    return fields.text(part.get("text"), f"{param}.text")


def _without_nulls(value: Any, param: str) -> dict[str, Any]:
    """An explicit null is the same as leaving a field out."""
    return {name: item for name, item in fields.mapping(value, param).items() if item is not None}


def _refuse_others(given: Mapping[str, Any], param: str, known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            unknown = f"{param}.{fields.brief_name(name)}"
            raise InvalidRequest(f"'{unknown}' is not supported.", param=unknown)
