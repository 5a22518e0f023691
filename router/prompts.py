"""Prompts that operators name in files, as requests will have them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router import fields
from router.openai import Endpoint, parse_request
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import ConfigError, InvalidRequest

_MAX_FILE_BYTES = 64 << 20
"""More text than any context takes, and little enough to read."""
_MAX_PATH_CHARS = 255
"""Of a file that is refused, in its error."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it stands in a file."""

    text: str | None
    """A plain prompt; `None` where there are messages."""
    messages: Any
    salt: str
    file: str = ""
    """Where it stands, as errors name it; empty where it was made otherwise."""
    tenant: str = ""
    """Whose requests it stands for; empty for those of whoever asks."""


def read_prompt(own: Mapping[str, Any]) -> Prompt:
    """The prompt that a command's `--file`, `--messages` and `--cache-salt` name.

    Raises:
        ConfigError: an argument is wrong, or the file cannot be read or holds nothing.
    """
    file, messages = own["file"], own["messages"]
    if (file is None) == (messages is None):
        raise ConfigError(f"--file, --messages: {'one is needed' if file is None else 'they exclude each other'}")
    salt = _check_salt("--cache-salt", own["cache_salt"] or "")
    if file is not None:
        return Prompt(_read_text("--file", file), None, salt, _brief(file))
    try:
        listed = json.loads(_read_text("--messages", messages))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--messages: {_brief(messages)} is not JSON: {error}") from None
    if isinstance(listed, dict) and set(listed) == {"messages"}:
        listed = listed["messages"]
    return Prompt(None, listed, salt, _brief(messages))


def prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, settings: Settings, *, add_generation_prompt: bool
) -> list[int]:
    """Token ids of a prompt. Messages get the beginning of an answer, as in a request, where that is asked for.

    Raises:
        ConfigError: the prompt of a file cannot be rendered.
        InvalidRequest: another one cannot.
    """
    try:
        if prompt.text is not None:
            return tokenizer.encode(prompt.text)
        body = {"model": settings.model_name, "messages": prompt.messages}
        messages = parse_request(Endpoint.CHAT, body, served_model=settings.model_name).messages or ()
        return tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
    except InvalidRequest as error:
        if not prompt.file:
            raise
        raise ConfigError(f"{'--messages' if prompt.text is None else '--file'}: {prompt.file}: {error}") from None


def _check_salt(flag: str, salt: str) -> str:
    try:
        return fields.label(salt, flag)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None


def _read_text(flag: str, path: Path) -> str:
    name = _brief(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{flag}: {name} is no regular file")
            raw = file.read(_MAX_FILE_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {name} is not UTF-8: {error}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{flag}: {name} is over the limit of {_MAX_FILE_BYTES} bytes")
    if not text:
        raise ConfigError(f"{flag}: {name} is empty")
    return text


def _brief(path: Path) -> str:
    return fields.brief_name(str(path), _MAX_PATH_CHARS)


def _open_at_once(path: str, flags: int) -> int:
    """An opener for what may turn out to be a pipe: without a writer an `open` would wait for one."""
    return os.open(path, flags | os.O_NONBLOCK)
