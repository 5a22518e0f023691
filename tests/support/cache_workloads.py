"""Workloads for a cache of KV blocks: streams of prompts as lists of block keys. Seeded; each says what returns when.

Sizes are in blocks of a pool of `num_blocks`, so that one workload can be asked of pools of all sizes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigError

Prompt = list[int]
"""Keys of the blocks of one prompt; equal leading keys mean an equal beginning."""
NUM_TURNOVERS = 24.0
"""How often new blocks fill the pool in a workload, unless told."""


def flood(
    num_blocks: int, seed: int, *, share: float, prompt_share: float, num_turnovers: float = NUM_TURNOVERS
) -> list[Prompt]:
    """One-off prompts that fill the pool so many times over, among which one system prompt keeps returning.

    Every request brings as many new blocks as the system prompt has: `prompt_share` of the pool. A `share` of the
    requests begin with the system prompt, on average every `prompt_share / share` turnovers.
    """
    draws, fresh = random.Random(seed), itertools.count()
    prompt_blocks = max(1, round(num_blocks * prompt_share))
    system_prompt = _take(fresh, prompt_blocks)
    num_requests = round(num_blocks * num_turnovers / prompt_blocks)
    return [
        (system_prompt if draws.random() < share else []) + _take(fresh, prompt_blocks) for _ in range(num_requests)
    ]


def mixed_flood(num_blocks: int, seed: int, *, num_turnovers: float = 60.0) -> list[Prompt]:
    """One-off prompts among which twenty system prompts return, some of them often and most of them rarely.

    Together the system prompts are as large as the pool, and three in ten requests begin with one.
    """
    draws, fresh = random.Random(seed), itertools.count()
    unit = max(1, num_blocks // 160)
    system_prompts = [_take(fresh, 8 * unit) for _ in range(20)]
    prompts: list[Prompt] = []
    num_new = 0
    while num_new < num_blocks * num_turnovers:
        if draws.random() < 0.3:
            prompts.append(system_prompts[int(draws.random() ** 2 * 20)] + _take(fresh, 3 * unit))
            num_new += 3 * unit
        else:
            prompts.append(_take(fresh, 16 * unit))
            num_new += 16 * unit
    return prompts


def chats(num_blocks: int, seed: int, *, return_turnovers: float, num_turnovers: float = NUM_TURNOVERS) -> list[Prompt]:
    """Chats whose turns repeat all that was said. Each begins with a system prompt that all of them share.

    A chat's next turn comes when new blocks of others have filled the pool about `return_turnovers` times. A chat has
    eight turns and is then replaced by a new one.
    """
    draws, fresh = random.Random(seed), itertools.count()
    unit = max(1, num_blocks // 200)
    system_prompt = _take(fresh, 4 * unit)
    num_live = max(1, round(num_blocks * return_turnovers / (3 * unit)))
    histories: list[Prompt] = [[] for _ in range(num_live)]
    turns = [draws.randrange(8) for _ in range(num_live)]
    prompts: list[Prompt] = []
    for _ in range(round(num_blocks * num_turnovers / (3 * unit))):
        chat = draws.randrange(num_live)
        turns[chat] = (turns[chat] + 1) % 8
        if turns[chat] == 0 or not histories[chat]:
            histories[chat] = list(system_prompt)
        histories[chat] = histories[chat] + _take(fresh, 3 * unit)
        prompts.append(histories[chat])
    return prompts


def phases(num_blocks: int, seed: int) -> list[Prompt]:
    """Flood, chats, flood, chats: what was learnt in one phase is wrong in the next."""
    workloads = (
        flood(num_blocks, seed, share=0.1, prompt_share=0.15),
        chats(num_blocks, seed + 1, return_turnovers=0.4),
        flood(num_blocks, seed + 2, share=0.1, prompt_share=0.15),
        chats(num_blocks, seed + 3, return_turnovers=0.4),
    )
    return [
        [len(workloads) * key + number for key in prompt] for number, phase in enumerate(workloads) for prompt in phase
    ]


def system_prompts(num_blocks: int, seed: int, *, num_turnovers: float = NUM_TURNOVERS) -> list[Prompt]:
    """System prompts with Zipf popularity that together fill half the pool, each request with a tail of its own."""
    draws, fresh = random.Random(seed), itertools.count()
    unit = max(1, num_blocks // 320)
    prefixes = [_take(fresh, 8 * unit) for _ in range(20)]
    weights = [1 / (rank + 1) for rank in range(20)]
    num_requests = round(num_blocks * num_turnovers / (3 * unit))
    return [prefix + _take(fresh, 3 * unit) for prefix in draws.choices(prefixes, weights, k=num_requests)]


def read_trace(path: Path) -> list[Prompt]:
    """Prompts of a trace in Mooncake's format: a JSON object a line, with one of `hash_ids` for each 512 tokens.

    Raises:
        ConfigError: the file cannot be read, or a line is not of that format.
    """
    prompts = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                prompts.append([int(key) for key in json.loads(line)["hash_ids"]])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: not a line of a trace with hash_ids: {error!r}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return prompts


def _take(fresh: Iterator[int], number: int) -> Prompt:
    return list(itertools.islice(fresh, number))
