"""The benchmark command: which figures there are and how they are told. How large they are is no business of tests."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from router import bench, cli
from worker.bench import Sizes, measure

SMALL = Sizes(num_rounds=2, small_pool_blocks=300, large_pool_blocks=600, vllm_num_rounds=0)


async def test_blocks_tells_every_figure_of_both_pools():
    said: list[str] = []
    figures = await measure(said.append, SMALL)
    timed = [
        f"{what}{pool}_us_p{share}"
        for what in ("acquire_release_128", "evict")
        for pool in ("", "_at_1m_blocks")
        for share in (10, 50, 90)
    ]
    assert set(figures) == {"seed", "num_rounds", "bytes_per_block", *timed}
    assert (figures["seed"], figures["num_rounds"]) == (0, 2)
    assert all(figures[name] > 0 for name in timed)
    assert said[0] == "filling pools of 300 and 600 blocks"


def test_the_command_prints_one_json_line_or_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def run_benchmark(name: str, say: Callable[[str], None]) -> dict[str, float]:
        say(f"measuring {name}")
        return {"seed": 0, "ratio": 1.03456, "large_us_p50": 123.456}

    monkeypatch.setattr("router.commands.run_benchmark", run_benchmark)
    assert cli.main(["bench", "blocks", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "bench": "blocks",
        "command": "kvroute bench blocks --json",
        "seed": 0,
        "ratio": 1.035,
        "large_us_p50": 123.5,
    }
    assert told.err == "kvroute: measuring blocks\n"
    assert cli.main(["bench", "blocks"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["ratio", "1.035"]


@pytest.mark.parametrize("name", bench.BENCHMARKS)
async def test_every_benchmark_can_be_found(name: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    async def measured(say: Callable[[str], None]) -> dict[str, float]:
        asked.append(say)
        return {"seed": 1}

    monkeypatch.setattr(f"{bench.BENCHMARKS[name]}.measure", measured)
    assert await bench.run_benchmark(name, print) == {"seed": 1}
    assert asked == [print]


def test_an_unknown_benchmark_is_refused_with_those_that_are_there(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "nothing"])
    assert ended.value.code == 2
    assert "invalid choice: 'nothing' (choose from 'blocks')" in capsys.readouterr().err
