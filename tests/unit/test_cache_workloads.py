from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import pytest

from shared.errors import ConfigError
from tests.bench.bench_eviction import simulate
from tests.support.cache_workloads import Prompt, chats, flood, mixed_flood, phases, read_trace, system_prompts

NUM_BLOCKS = 100
WORKLOADS: dict[str, Callable[[int], list[Prompt]]] = {
    "flood": lambda seed: flood(NUM_BLOCKS, seed, share=0.1, prompt_share=0.1),
    "mixed_flood": lambda seed: mixed_flood(NUM_BLOCKS, seed),
    "chats": lambda seed: chats(NUM_BLOCKS, seed, return_turnovers=1.0),
    "phases": lambda seed: phases(NUM_BLOCKS, seed),
    "system_prompts": lambda seed: system_prompts(NUM_BLOCKS, seed),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_on_its_seed_alone(name: str):
    assert WORKLOADS[name](1) == WORKLOADS[name](1) != WORKLOADS[name](2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_blocks_mean_an_equal_beginning(name: str):
    key_to_prefix: dict[int, Prompt] = {}
    for prompt in WORKLOADS[name](1):
        for number, key in enumerate(prompt):
            assert key_to_prefix.setdefault(key, prompt[:number]) == prompt[:number]


def test_a_flood_fills_the_pool_as_often_as_told_and_one_prompt_returns_in_its_share_of_requests():
    prompts = flood(NUM_BLOCKS, 1, share=0.1, prompt_share=0.1, num_turnovers=60)
    with_prompt = [prompt for prompt in prompts if len(prompt) == 20]
    assert len(prompts) == 600
    assert len(with_prompt) / len(prompts) == pytest.approx(0.1, abs=0.03)
    assert len({tuple(prompt[:10]) for prompt in with_prompt}) == 1


def test_a_turn_of_a_chat_repeats_the_turn_before():
    prompts = chats(NUM_BLOCKS, 1, return_turnovers=0.01)  # one chat at a time
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before or len(after) == 7
    assert max(map(len, prompts)) == 4 + 8 * 3


def test_no_prompt_of_a_phase_begins_like_one_of_another():
    lengths = [
        len(flood(NUM_BLOCKS, 1, share=0.1, prompt_share=0.15)),
        len(chats(NUM_BLOCKS, 2, return_turnovers=0.4)),
        len(flood(NUM_BLOCKS, 3, share=0.1, prompt_share=0.15)),
        len(chats(NUM_BLOCKS, 4, return_turnovers=0.4)),
    ]
    prompts = iter(phases(NUM_BLOCKS, 1))
    keys_of = [{key for prompt in islice(prompts, length) for key in prompt} for length in lengths]
    assert list(prompts) == []
    assert sum(map(len, keys_of)) == len(set().union(*keys_of))


def test_system_prompts_fill_half_the_pool():
    prompts = system_prompts(320, 1)
    assert len({key for prompt in prompts for key in prompt[:8]}) == 160


def test_a_simulated_prompt_finds_what_others_left_and_is_cut_to_the_pool():
    assert simulate([[1, 2], [1, 2, 3], [4, 5, 6, 7, 8], [1, 2]], 4, "lru") == ([0, 2, 0, 0], 0.0)


def test_a_trace_is_read_line_by_line(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in ([0, 1], [0, 2])))
    assert read_trace(trace) == [[0, 1], [0, 2]]


@pytest.mark.parametrize("line", ["{}", "nothing", "[]", '{"hash_ids": 3}', '{"hash_ids": ["x"]}'])
def test_a_line_that_is_no_line_of_a_trace_is_named(tmp_path: Path, line: str):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: not a line of a trace"):
        read_trace(trace)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl: No such file"):
        read_trace(tmp_path / "missing.jsonl")
