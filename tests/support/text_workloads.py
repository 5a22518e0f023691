"""Workloads of whole requests with tokens: real text through a tokenizer, or the lengths of a trace. Runs nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from router.demo_input import Message, demo_rows
from shared.errors import ConfigError

TRACE_CHUNK_TOKENS = 512
"""Tokens that one of a trace's `hash_ids` stands for."""
VOCABULARY = 30_000
MIN_OUTPUT_TOKENS = 20
MAX_OUTPUT_TOKENS = 250
MIN_FILE_CHARACTERS = 1500


class Renders(Protocol):
    """What of a tokenizer is used here."""

    def render_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and the tokens that it generates."""

    name: str
    prompt: list[int]
    output: list[int]


def short_chats(tokenizer: Renders, seed: int) -> list[Job]:
    """The demo's one-off prompts, and its chats turn by turn without their system prompts: 30 to 400 tokens."""
    talks = [(row["custom_id"], _without_system(row)) for row in demo_rows(seed)]
    return _jobs(((name, tokenizer.render_chat(messages)) for name, messages in talks), seed)


def multi_turn(tokenizer: Renders, seed: int, *, one_assistant: bool = False) -> list[Job]:
    """The demo as it is: assistants with a system prompt each, their questions and chats, mixed as if at once.

    With `one_assistant` all of them talk to the same one, so that there is one system prompt.
    """
    rows = [row for row in demo_rows(seed) if row["body"]["messages"][0]["role"] == "system"]
    system = rows[0]["body"]["messages"][0]
    talks = [
        (row["custom_id"], [system, *_without_system(row)] if one_assistant else row["body"]["messages"])
        for row in rows
    ]
    return _jobs(((name, tokenizer.render_chat(messages)) for name, messages in talks), seed)


def template_batches(tokenizer: Renders, seed: int) -> list[list[Job]]:
    """Batches of the same short texts, each of them for another template: a system prompt with examples."""
    rows = demo_rows(seed)
    first_messages = [row["body"]["messages"][0] for row in rows]
    templates = {message["content"]: message for message in first_messages if message["role"] == "system"}
    texts = [(row["custom_id"], row["body"]["messages"][-1]) for row in rows]
    return [
        _jobs(((name, tokenizer.render_chat([template, text])) for name, text in texts), seed)
        for template in templates.values()
    ]


def long_prompts(tokenizer: Renders, seed: int, paths: Iterable[Path]) -> list[Job]:
    """Questions on whole text files, one each: some 500 to 5,000 tokens that share nothing but the template."""
    files = [(path.as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    talks = [
        (name, [{"role": "user", "content": f"{text}\n\nSummarise this file."}])
        for name, text in files
        if len(text) > 1500
    ]
    return _jobs(((name, tokenizer.render_chat(messages)) for name, messages in talks), seed)


def trace_jobs(path: Path, num_jobs: int) -> list[Job]:
    """The first requests of a trace in Mooncake's format: real lengths and shared beginnings, tokens made up.

    Raises:
        ConfigError: the file cannot be read, or a line is not of that format.
    """
    jobs = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:num_jobs]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            tokens = [token for chunk in row["hash_ids"] for token in _chunk(int(chunk))][: int(row["input_length"])]
            output = _drawn(random.Random(-number), int(row["output_length"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a line of a trace: {error!r}") from error
        jobs.append(Job(f"line-{number}", tokens, output))
    return jobs


def _chunk(number: int) -> list[int]:
    return _drawn(random.Random(number), TRACE_CHUNK_TOKENS)


def _drawn(draws: random.Random, num_tokens: int) -> list[int]:
    return [draws.randrange(VOCABULARY) for _ in range(num_tokens)]


def _without_system(row: dict[str, Any]) -> list[Message]:
    return [message for message in row["body"]["messages"] if message["role"] != "system"]


def _jobs(prompts: Iterable[tuple[str, list[int]]], seed: int) -> list[Job]:
    draws = random.Random(seed)
    return [
        Job(name, prompt, _drawn(draws, draws.randint(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)))
        for name, prompt in prompts
    ]
