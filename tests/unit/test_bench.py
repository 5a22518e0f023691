from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from router.bench import figures_text
from router.cli import main
from worker import bench
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
    assert "argument NAME: invalid choice: 'nothing' (choose from 'blocks')" in capsys.readouterr().err


@pytest.mark.vllm
async def test_vllms_scheduler_and_ours_serve_the_same_requests():
    pytest.importorskip("vllm")
    from worker.engines.vllm_bench import measure_schedule_overhead

    figures = await measure_schedule_overhead(seed=0, num_requests=8, num_rounds=2)
    assert figures["vllm_schedule_num_steps"] == figures["vllm_schedule_stock_num_steps"] > 50
    assert figures["vllm_schedule_num_rounds"] == 2
    assert 0 < figures["vllm_schedule_overhead_ratio_min"] <= figures["vllm_schedule_overhead_ratio_max"]
    assert figures["vllm_schedule_overhead_ratio"] > 0
