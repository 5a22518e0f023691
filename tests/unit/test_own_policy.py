"""Policies that users bring: the one in the README does what it says, and what is wrong with one is told by name."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.cli import main
from router.policies import make_policy
from shared.errors import ConfigError
from shared.vtime import run_virtual
from tests.support.rack import ask, prompt, rack

README = Path(__file__).parents[2] / "README.md"
NUM_WORKERS = 4
WORKING = """
import numpy as np
from router.policies.base import Costs
from router.policies.baselines import EarlyBinding

class Mine(EarlyBinding):
    name = "mine"

    def costs(self, requests, loads, fleet, rng):
        return Costs({total})
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder for users' modules, which are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def write_module(folder: Path, text: str) -> None:
    (folder / "my_module.py").write_text(text, encoding="utf-8")


def section() -> str:
    """What the README tells of policies of one's own."""
    return README.read_text(encoding="utf-8").partition("## Write your own policy\n")[2].partition("\n## ")[0]


@pytest.fixture
def documented(own_folder: Path) -> None:
    """The module that the README has its readers save."""
    (code,) = re.findall(r"```python\n(.*?)```", section(), flags=re.DOTALL)
    (own_folder / "crowd_shy.py").write_text(code, encoding="utf-8")


async def workers_of_a_burst(policy: str) -> Counter[str]:
    """Who answers twelve prompts at once of which one worker holds the beginning."""
    async with (
        rack(NUM_WORKERS, prefill_s_per_token=1e-4, token_s=0.001, is_contended=True) as workers,
        workers.router(policy) as router,
    ):
        await ask(router, "first", prompt(1, 1024, tail=0))
        await workers.settle()
        burst = (ask(router, f"r{index}", prompt(1, 1024, tail=index)) for index in range(1, 13))
        return Counter(str(trace.worker) for _, trace in await asyncio.gather(*burst))


@pytest.mark.usefixtures("documented")
def test_the_documented_policy_trades_caches_for_crowds_as_its_knob_says() -> None:
    alone = run_virtual(workers_of_a_burst("crowd_shy:CrowdShy:tokens_per_request=0"))
    spread = run_virtual(workers_of_a_burst("crowd_shy:CrowdShy:tokens_per_request=100000"))
    assert list(alone.values()) == [12]
    assert sorted(spread.values()) == [3, 3, 3, 3]


@pytest.mark.usefixtures("documented")
def test_the_documented_policy_keeps_its_default_knob() -> None:
    by_default, as_given = (
        run_virtual(workers_of_a_burst(policy))
        for policy in ("crowd_shy:CrowdShy", "crowd_shy:CrowdShy:tokens_per_request=256")
    )
    assert by_default == as_given


@pytest.mark.usefixtures("documented")
def test_the_documented_command_compares_the_policy_with_others_and_with_itself(capsys: pytest.CaptureFixture) -> None:
    (command,) = [line for line in section().splitlines() if line.startswith("kvroute replay ")]
    arguments = command.removeprefix("kvroute ").replace("TRACE", "flood").split()
    assert main([*arguments, "--workers", "2", "--limit", "20", "--cache-blocks", "400", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["policy"] for one in told] == arguments[-1].split(",")
    assert {(one["num_requests"], one["num_rejected"]) for one in told} == {(20, 0)}


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (
            "np.zeros(len(loads))",
            r"my_module:Mine: total has the shape \(3,\) and not \(2, 3\), one for each request and",
        ),
        ("np.zeros((len(requests), 1))", r"total has the shape \(2, 1\) and not \(2, 3\)"),
        ("np.full((2, 3), np.nan)", "the total of request 0 on w0 is NaN"),
        ("np.zeros((2, 3)), tie_hashes=requests.own_tokens", r"tie_hashes has the shape \(2, 3\) and not \(2,\)"),
        ("np.zeros((2, 3)), can_send=loads.has_free_slot", r"can_send has the shape \(3,\) and not \(2, 3\)"),
        ("requests.no_such_thing", "fails in a trial: AttributeError: .*no_such_thing"),
        ("loads.num_requests.sort()", "fails in a trial: ValueError: .*read-only"),
        ("np.random.default_rng().random((2, 3))", "different costs for equal arguments"),
    ],
)
def test_costs_that_are_none_are_refused_before_anything_starts(own_folder: Path, total: str, message: str) -> None:
    write_module(own_folder, WORKING.format(total=total))
    with pytest.raises(ConfigError, match=message):
        make_policy("my_module:Mine")


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        (None, "my_module:Mine", "cannot import 'my_module': ModuleNotFoundError"),
        ("1 / 0", "my_module:Mine", "cannot import 'my_module': ZeroDivisionError"),
        ("def (", "my_module:Mine", "cannot import 'my_module': SyntaxError"),
        ("", "my_module:Mine", r"module 'my_module' \(.*my_module.py\) has no 'Mine'"),
        ("Mine = 3", "my_module:Mine", "my_module:Mine is no class: it is int"),
        (
            "class Mine:\n    name = 'mine'",
            "my_module:Mine",
            "is no policy: it has no is_cache_aware, is_late_binding, ",
        ),
        ("class Mine:\n    def __init__(self, x): ...", "my_module:Mine", "my_module:Mine cannot be made: .*'x'"),
        (WORKING, "my_module:Mine:weight=2", "my_module:Mine has no knob 'weight'"),
        (WORKING, "my_module", "invalid value 'my_module' .choose from cost, .*, or MODULE:CLASS."),
    ],
)
def test_what_is_no_policy_is_refused_by_name(own_folder: Path, module: str | None, text: str, message: str) -> None:
    if module is not None:
        write_module(own_folder, module)
    with pytest.raises(ConfigError, match=message):
        make_policy(text)
