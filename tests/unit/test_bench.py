from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from router import decision_bench, http_bench, streams_bench, tokenise_bench
from router.bench import figures_text
from router.cli import main
from shared.directory import bench as directory_bench
from tests.support.tokenizers import write_model_folder
from worker import bench, transport_bench
from worker.bench import Sizes


async def test_blocks_gives_every_figure_with_its_spread_and_what_repeats_it():
    said: list[str] = []
    sizes = Sizes(seed=3, small_pool_blocks=300, large_pool_blocks=600, num_rounds=5, vllm_num_rounds=0)
    figures = await bench.measure(said.append, sizes)
    timed = [f"{name}{suffix}_us" for name in ("acquire_release_128", "evict") for suffix in ("", "_at_1m_blocks")]
    spread = [f"{name}_p{share}" for name in timed for share in (10, 50, 90)]
    assert set(figures) == {"seed", "num_rounds", "bytes_per_block", *spread}
    assert (figures["seed"], figures["num_rounds"]) == (3, 5)
    for name in timed:
        assert 0 < figures[f"{name}_p10"] <= figures[f"{name}_p50"] <= figures[f"{name}_p90"]
    assert said[0] == "filling pools of 300 and 600 blocks"


async def test_decision_gives_every_figure():
    said: list[str] = []
    sizes = decision_bench.Sizes(
        num_workers=4, num_entries=2_000, num_decisions=20, num_held=30, arrivals_per_s=50.0, num_dispatched=60
    )
    figures = await decision_bench.measure(said.append, sizes)
    assert set(figures) == {
        *("seed", "num_workers", "num_mirror_entries", "dispatch_held_mean", "dispatch_events_per_request"),
        *("decision_us_p50", "decision_us_p99", "hash_8k_us_p50", "decisions_per_s", "dispatch_cpu_us_per_request"),
        *(f"rank_{number}_workers_us_p50" for number in (8, 64, 256)),
    }
    assert (figures["seed"], figures["num_workers"]) == (0, 4)
    assert figures["num_mirror_entries"] > 1_000
    assert all(figures[name] > 0 for name in figures if name != "seed")
    assert said[0] == "ranking fleets of three sizes"


async def test_tokenise_gives_every_figure_for_both_kinds_of_tokenizer():
    said: list[str] = []
    sizes = tokenise_bench.Sizes(num_rounds=3, chat_tokens=1_500, num_streamed=50)
    figures = await tokenise_bench.measure(said.append, sizes=sizes)
    names = [
        *("chat_tokens", "whole_us", "whole_us_p10", "whole_us_p90", "first_turn_us", "ratio", "short_us"),
        *("next_turn_us", "next_turn_us_p10", "next_turn_us_p90", "block_keys_us", "known_block_keys_us"),
        "detokenise_us_per_token",
    ]
    assert set(figures) == {"seed", "num_rounds", *(kind + name for kind in ("", "llama2_") for name in names)}
    assert (figures["seed"], figures["num_rounds"]) == (0, 3)
    assert all(figures[name] > 0 for name in figures if name != "seed")
    assert min(figures["chat_tokens"], figures["llama2_chat_tokens"]) >= 1_500
    assert len(said) == 3


@pytest.mark.slow
async def test_http_gives_every_figure_with_its_spread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(http_bench, "prepare_model", lambda name, folder: write_model_folder(tmp_path / "model"))
    said: list[str] = []
    figures = await http_bench.measure(said.append, num_requests=8, num_rounds=1, num_stream_tokens=4, num_streams=2)
    of_each_kind = ("rps", "cpu_s_per_1000", "floor_cpu_s_per_1000", "prompt_tokens")
    names = {f"{name}_{kind}" for kind in ("short", "long") for name in of_each_kind}
    assert set(figures) == {
        *("seed", "num_requests", "num_streams", "added_latency_ms_p50", *names),
        *(f"cpu_s_per_1000_{kind}_max" for kind in ("short", "long")),
        *(f"{kind}_over_floor" for kind in ("short", "long")),
        *("stream_tokens_per_s_per_core", "stream_tokens_per_s_per_core_min"),
    }
    assert (figures["seed"], figures["num_requests"], figures["num_streams"]) == (0, 8, 2)
    assert all(figures[name] > 0 for name in figures if name != "seed")
    assert figures["prompt_tokens_long"] > figures["prompt_tokens_short"]
    for kind in ("short", "long"):
        ratio = figures[f"cpu_s_per_1000_{kind}"] / figures[f"floor_cpu_s_per_1000_{kind}"]
        assert figures[f"{kind}_over_floor"] == pytest.approx(ratio)
    assert len(said) == 4


@pytest.mark.slow
async def test_streams_gives_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(streams_bench, "prepare_model", lambda name, folder: write_model_folder(tmp_path / "model"))
    said: list[str] = []
    figures = await streams_bench.measure(said.append, num_streams=3, length_s=0.2, step_s=0.02)
    assert set(figures) == {
        *("seed", "num_streams", "length_s", "step_s", "num_failed", "num_chunks", "load_average"),
        *(f"chunk_late_ms_{share}" for share in ("p50", "p99", "max")),
        *("tokens_per_s_per_stream_p50", "tokens_per_s_per_stream_min"),
        *(
            "workers_and_clients_cpu_share",
            "router_cpu_share",
            "router_cpu_us_per_chunk",
            "router_memory_mb",
            "router_memory_kb_per_stream",
        ),
        *(f"freed_ms_{when}_token" for when in ("before_first", "at_first", "after_first")),
    }
    assert figures["num_failed"] == 0
    assert 3 <= figures["num_chunks"] <= 3 * 12
    assert figures["chunk_late_ms_p50"] <= figures["chunk_late_ms_p99"] <= figures["chunk_late_ms_max"]
    assert len(said) == 4


@pytest.mark.redis
@pytest.mark.slow
async def test_directory_gives_every_figure():
    said: list[str] = []
    figures = await directory_bench.measure(
        said.append, num_blocks=2000, num_workers=4, num_events=8192, num_churn_requests=100
    )
    applied = [
        f"apply_{what}{number}" for what in ("events_per_s", "loop_delay_ms_p99") for number in ("", "_8_publishers")
    ]
    matched = ["128_us_p50", "128_us_p99", "128_shared_us_p50", "6250_us_p50"]
    assert set(figures) == {
        *("seed", "ping_us_p50", "read_through_128_us_p50", "forget_worker_max_stall_ms"),
        *applied,
        *(f"mirror_match_{what}" for what in matched),
        *("mirror_load_1m_s", "mirror_load_55k_s", "bytes_per_entry_store", "bytes_per_entry_mirror"),
        *("churn_keys_left", "churn_store_growth_bytes", "churn_mirror_growth_bytes"),
    }
    assert (figures["seed"], figures["churn_keys_left"]) == (0, 0)
    assert all(figures[name] > 0 for name in figures if name.endswith(("_per_s", "_p50", "_p99", "_s")))
    assert said[0] == "one caller asks the store"


async def test_transport_gives_every_figure_with_its_spread():
    said: list[str] = []
    figures = await transport_bench.measure(said.append, num_rounds=3, num_steps=2, num_submits=2)
    name = "tokens_per_s_per_core"
    assert set(figures) == {"seed", "num_streams", "frame_us", "submit_us", name, f"{name}_min", f"{name}_max"}
    assert (figures["seed"], figures["num_streams"]) == (0, 64)
    assert 0 < figures[f"{name}_min"] <= figures[name] <= figures[f"{name}_max"]
    assert said == ["64 streams get a token each step", "2 prompts of 8192 tokens are submitted"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(say: Callable[[str], None]) -> dict[str, float]:
        say("measuring")
        return {"hit_us_p50": 123.456, "ratio": 1.02345, "seed": 0}

    monkeypatch.setattr(bench, "measure", measure)


@pytest.mark.usefixtures("measured")
def test_the_command_prints_one_json_line_that_says_how_to_get_it_again(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "blocks", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "bench": "blocks",
        "command": "kvroute bench blocks --json",
        "hit_us_p50": 123.5,
        "ratio": 1.023,
        "seed": 0,
    }
    assert (printed.out.count("\n"), printed.err) == (1, "kvroute: measuring\n")


@pytest.mark.usefixtures("measured")
def test_the_command_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "blocks"]) == 0
    assert capsys.readouterr().out.split() == ["hit_us_p50", "123.5", "ratio", "1.023", "seed", "0"]


def test_columns_of_the_table_are_as_wide_as_their_longest_entry():
    assert figures_text({"a": 1, "longer": 22.25}) == f"{'a':<6} {1:>12}\n{'longer':<6} {22.2:>12}"


def test_an_unknown_benchmark_is_refused_with_the_names_of_those_that_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    assert "argument NAME: invalid choice: 'nothing' (choose from " in capsys.readouterr().err


@pytest.mark.vllm
async def test_vllms_scheduler_and_ours_serve_the_same_requests():
    pytest.importorskip("vllm")
    from worker.engines.vllm_bench import measure_schedule_overhead

    figures = await measure_schedule_overhead(seed=0, num_requests=8, num_rounds=2)
    assert figures["vllm_schedule_num_steps"] == figures["vllm_schedule_stock_num_steps"] > 50
    assert figures["vllm_schedule_num_rounds"] == 2
    assert 0 < figures["vllm_schedule_overhead_ratio_min"] <= figures["vllm_schedule_overhead_ratio_max"]
    assert figures["vllm_schedule_overhead_ratio"] > 0
