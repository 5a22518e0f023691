"""The demo's input: expands the shipped assistants, chats and one-off prompts into OpenAI batch rows. Runs nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import yaml

Message = dict[str, str]

WORKER_SETTINGS: dict[str, Any] = {
    "model": "smollm2",
    "workers": 2,
    "max_num_seqs": 2,
    # Every system prompt of the batch together needs more than one such pool and less than two: the situation in
    # which it matters where a request goes.
    "kv_cache_blocks": 84,
    "max_model_len": 2048,
    # On a machine with one GPU both workers share it.
    "gpus_per_worker": 0.5,
    "gpu_memory_utilization": 0.4,
}
"""The workers that the input is made for."""


def demo_rows(seed: int, *, model: str = "smollm2") -> list[dict[str, Any]]:
    """All rows in an order drawn from `seed`, as if many users had written at once.

    Each turn of a chat is a row whose messages extend those of the turn before, and comes after it.
    """
    document = yaml.safe_load(files("router").joinpath("static/demo.yaml").read_text(encoding="utf-8"))
    threads = list(_threads(document))
    # One ticket for each row: a thread's rows stay in order, whichever of its tickets comes first.
    tickets = [index for index, thread in enumerate(threads) for _ in thread]
    random.Random(seed).shuffle(tickets)
    rows_of_thread = [iter(thread) for thread in threads]
    return [_row(document, model, *next(rows_of_thread[index])) for index in tickets]


def _threads(document: dict[str, Any]) -> Iterator[list[tuple[str, list[Message]]]]:
    """Groups of (custom id, messages) whose order within the group matters."""
    for assistant in document["assistants"]:
        name = assistant["name"]
        system = {"role": "system", "content": assistant["system"].strip()}
        for number, question in enumerate(assistant["questions"], start=1):
            yield [(f"{name}-question-{number}", [system, {"role": "user", "content": question}])]
        for number, chat in enumerate(assistant.get("chats", ()), start=1):
            yield list(_turns(f"{name}-chat-{number}", [system], chat))
    for one_off in document["one_offs"]:
        yield [(one_off["name"], [{"role": "user", "content": one_off["prompt"].strip()}])]


def _turns(name: str, messages: list[Message], chat: list[Message]) -> Iterator[tuple[str, list[Message]]]:
    num_turns = 0
    for said in chat:
        ((role, content),) = said.items()
        messages = [*messages, {"role": role, "content": content}]
        if role == "user":
            num_turns += 1
            yield f"{name}-turn-{num_turns}", messages


def _row(document: dict[str, Any], model: str, custom_id: str, messages: list[Message]) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": document["max_tokens"],
        "temperature": document["temperature"],
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
