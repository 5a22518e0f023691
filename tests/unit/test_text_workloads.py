from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.demo_input import Message
from shared.errors import ConfigError
from tests.bench.prefix_times import interval_of_median
from tests.support.blocks import make_pool
from tests.support.pool_replay import Replayed, replay
from tests.support.text_workloads import Job, long_prompts, multi_turn, short_chats, template_batches, trace_jobs
from worker.sequences import PoolStatistics


class Words:
    """Every word is a token."""

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return [
            hash(word) % 30_000 for message in messages for word in f"{message['role']} {message['content']}".split()
        ]

    def encode(self, text: str) -> list[int]:
        return [hash(word) % 30_000 for word in text.split()]


def common_prefix_length(jobs: list[Job]) -> int:
    shortest = min(len(job.prompt) for job in jobs)
    return next((n for n in range(shortest) if len({job.prompt[n] for job in jobs}) > 1), shortest)


def test_workloads_depend_on_their_seed_alone():
    assert short_chats(Words(), 1) == short_chats(Words(), 1) != short_chats(Words(), 2)


def test_short_chats_have_no_system_prompt():
    assert max(len(job.prompt) for job in short_chats(Words(), 0)) < 400
    assert min(len(job.prompt) for job in multi_turn(Words(), 0)) > 400


def test_chats_with_one_assistant_share_its_whole_system_prompt():
    assert common_prefix_length(multi_turn(Words(), 0, one_assistant=True)) > 400
    assert common_prefix_length(multi_turn(Words(), 0)) < 20


def test_each_batch_has_a_template_of_its_own_and_the_same_texts():
    batches = template_batches(Words(), 0)
    assert len(batches) > 1
    assert all(common_prefix_length(batch) > 400 for batch in batches)
    assert len({tuple(batch[0].prompt) for batch in batches}) == len(batches)
    assert len({tuple(job.name for job in batch) for batch in batches}) == 1


def test_a_file_is_a_long_prompt_unless_it_is_short(tmp_path: Path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("word " * 1000)
    short.write_text("word")
    (job,) = long_prompts(Words(), 0, [long, short])
    assert (job.name, len(job.prompt)) == (long.as_posix(), 1004)


def trace_file(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_requests_of_a_trace_have_its_lengths_and_share_what_its_ids_share(tmp_path: Path):
    rows = [
        {"input_length": length, "output_length": 3, "hash_ids": ids} for length, ids in ((700, [0, 1]), (600, [0, 2]))
    ]
    first, second = trace_jobs(trace_file(tmp_path, *rows), 10)
    assert [len(first.prompt), len(second.prompt), len(first.output)] == [700, 600, 3]
    assert common_prefix_length([first, second]) == 512
    assert trace_jobs(trace_file(tmp_path, *rows), 1) == [first]


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: not a line of a trace"):
        trace_jobs(trace_file(tmp_path, {"hash_ids": [1]}), 10)
    with pytest.raises(ConfigError, match=r"missing: No such file"):
        trace_jobs(tmp_path / "missing", 10)


def job(name: str, num_prompt: int, num_output: int, first: int = 0) -> Job:
    return Job(name, list(range(first, first + num_prompt)), list(range(num_output)))


def replay_of(
    num_blocks: int, jobs: list[Job], num_running: int, **more: bool
) -> tuple[Replayed, list[PoolStatistics]]:
    pool = make_pool(num_blocks)
    seen: list[PoolStatistics] = []
    replayed = replay(pool, jobs, num_running, seen.append, max_sequence_tokens=num_blocks * 16, **more)
    pool.check()
    return replayed, seen


def test_a_replay_looks_at_every_step_and_gives_all_blocks_back():
    replayed, seen = replay_of(8, [job("a", 30, 3), job("b", 40, 1)], 2)
    assert (replayed.num_requests, replayed.num_prompt_tokens, replayed.num_cached_tokens) == (2, 70, 16)
    assert [each.num_sequences for each in seen] == [2, 2, 1, 1]
    assert [each.num_used for each in seen] == [4, 4, 2, 3]


def test_a_request_without_room_waits_and_one_that_never_fits_is_named():
    replayed, seen = replay_of(4, [job("a", 30, 1), job("long", 65, 0), job("b", 60, 1, first=100)], 4)
    assert (replayed.num_requests, replayed.refused) == (2, ["long"])
    assert max(each.num_sequences for each in seen) == 1


def test_a_request_that_finds_no_room_for_a_token_ends_early():
    replayed, seen = replay_of(2, [job("a", 16, 16), job("b", 15, 16, first=100)], 2)
    assert (replayed.num_requests, seen[-1].num_sequences) == (2, 1)


def test_a_replay_that_does_not_run_to_the_end_holds_all_that_fits_at_once():
    jobs = [job("a", 30, 3), job("b", 40, 3), job("c", 90, 3, first=100)]
    replayed, seen = replay_of(8, jobs, 3, run_to_end=False)
    assert (replayed.num_requests, [each.num_sequences for each in seen]) == (2, [2])


def test_the_interval_of_a_median_holds_it_and_shrinks_with_the_spread():
    draws = random.Random(0)
    samples = [10 + draws.random() for _ in range(30)]
    low, high = interval_of_median(samples, random.Random(1))
    assert 10 < low <= sorted(samples)[15] <= high < 11
    assert interval_of_median([5.0] * 9, random.Random(1)) == (5.0, 5.0)
