"""`kvroute replay` as its users run it, on a simulated fleet: the same seed gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli import main
from tests.support.batches import chat_row, token_row
from tests.support.tokenizers import write_model_folder
from tests.support.traces import lines, logged

SMALL = ("--workers", "3", "--limit", "40", "--cache-blocks", "400")


def replayed(capsys: Any, *arguments: str | Path) -> tuple[str, str]:
    """What the command printed as results and as talk."""
    assert main(["replay", *map(str, arguments)]) == 0
    told = capsys.readouterr()
    return told.out, told.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_same_seed_gives_the_same_bytes_and_another_one_does_not(form: tuple[str, ...], capsys: Any):
    arguments = ("system_prompts", "--policy", "cost,random", "--load", "0.7", "--routers", "2", *SMALL, *form)
    first, again = (replayed(capsys, *arguments, "--seed", "1")[0] for _ in range(2))
    assert first == again
    assert first != replayed(capsys, *arguments, "--seed", "2")[0]


def test_each_policy_is_one_json_line_that_says_how_to_get_it_again(capsys: Any):
    out, err = replayed(capsys, "flood", "--policy", "cost,round_robin", "--json", "--seed", "4", *SMALL)
    ours, theirs = map(json.loads, out.splitlines())
    assert (ours["policy"], theirs["policy"], ours["simulated"], ours["seed"]) == ("cost", "round_robin", True, 4)
    assert ours["command"] == "kvroute replay flood --policy cost,round_robin --json --seed 4 " + " ".join(SMALL)
    assert (ours["num_requests"], ours["num_rejected"], ours["num_workers"], ours["num_blocks"]) == (40, 0, 3, 400)
    assert 0 < ours["ttft_p50_s"] <= ours["ttft_p99_s"] <= ours["makespan_s"]
    assert 0 <= ours["hit_share_of_bound"] <= 1
    assert "simulated, not measured" in err
    assert "times as fast" in err
    assert "req/s" not in err


def test_table_has_all_policies_and_says_that_it_is_simulated(capsys: Any):
    out, _ = replayed(capsys, "conversations", "--policy", "cost,least_load", *SMALL)
    assert out.splitlines()[0].split() == ["simulated", "cost", "least_load"]
    assert out.splitlines()[1].split() == ["requests", "answered", "40", "40"]


def test_requests_that_share_a_beginning_find_it_in_the_cache(tmp_path: Path, capsys: Any):
    trace = tmp_path / "log.jsonl"
    trace.write_bytes(b"".join(lines(*(logged(10.0 * number) for number in range(5)))))
    (line,) = replayed(capsys, trace, "--workers", "2", "--json")[0].splitlines()
    told = json.loads(line)
    # Two blocks of 64 in each of four prompts of 150 tokens, after the first has computed them.
    assert (told["possible_cached_tokens"], told["hit_share_of_bound"]) == (512, 1.0)
    assert told["hit_ratio"] == round(512 / 750, 6)


def test_batch_input_is_replayed_with_its_models_tokenizer(tmp_path: Path, capsys: Any):
    model, trace = write_model_folder(tmp_path / "model"), tmp_path / "in.jsonl"
    rows = [chat_row("a", "x" * 200, max_tokens=5), {**token_row("b", [5] * 100), "output_tokens": 3}]
    trace.write_bytes(b"".join(lines(*rows)))
    (line,) = replayed(capsys, trace, "--model", model, "--json")[0].splitlines()
    told = json.loads(line)
    assert (told["num_requests"], told["rate_per_s"]) == (2, None)
    assert told["num_prompt_tokens"] > 300
