"""What `kvroute scale` and `drain` refuse, and whom they let go, without any worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from router import commands, deployment, launch, runfile
from router.commands import Invocation
from shared.config import Settings
from shared.errors import ConfigError, EngineError
from tests.support.stage import RUN, Stage


def invocation(run_dir: Path, **own: str) -> Invocation:
    return Invocation(Settings(run_dir=run_dir), own, lambda line: None, lambda text: None)


@pytest.mark.parametrize("number", ["0", "-1", "abc", "1.5", "4097", "", " 2", "²"])
async def test_number_of_workers_that_is_none_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scale {number}: not a number of workers from 1 to 4096; `kvroute down`"):
        await commands._scale(invocation(tmp_path, num_workers=number))


async def test_nothing_that_runs_is_nothing_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is running; `kvroute up` starts workers"):
        await commands._scale(invocation(tmp_path, num_workers="2"))
    with pytest.raises(ConfigError, match="nothing is running; `kvroute up` starts workers"):
        await commands._drain(invocation(tmp_path, worker="w0"))
    assert runfile.read_run(tmp_path) is None


async def test_two_changes_at_once_are_one_too_many(tmp_path: Path) -> None:
    runfile.write_run(tmp_path, RUN)
    with runfile.changing(tmp_path):
        with pytest.raises(ConfigError, match="another `kvroute up`, `scale` or `drain` is at work"):
            await commands._scale(invocation(tmp_path, num_workers="2"))
        with pytest.raises(ConfigError, match="another `kvroute up`, `scale` or `drain` is at work"):
            await commands._drain(invocation(tmp_path, worker="w0-abcdef"))
    assert runfile.read_run(tmp_path) == RUN


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


async def test_new_workers_take_the_next_numbers_and_the_newest_leave(stage: Stage) -> None:
    assert await stage.scale(3) == RUN.workers
    assert (stage.started, stage.drained) == ([], [])
    assert await stage.scale(1) == ("w0-abcdef",)
    assert sorted(stage.drained) == ["w1-abcdef", "w2-abcdef"]
    assert "worker w2-abcdef has left; 3 requests were still running and go on elsewhere" in stage.said
    assert await stage.scale(3) == RUN.workers
    assert stage.started == ["w1-abcdef", "w2-abcdef"]


async def test_number_of_a_worker_that_was_drained_is_left_out(stage: Stage) -> None:
    assert await stage.drain("w1-abcdef") == ("w0-abcdef", "w2-abcdef")
    assert await stage.scale(3) == ("w0-abcdef", "w2-abcdef", "w3-abcdef")


async def test_workers_that_do_not_live_leave_first_and_a_silent_one_is_ended_all_the_same(stage: Stage) -> None:
    stage.serving.discard("w0-abcdef")
    assert await stage.scale(2) == ("w1-abcdef", "w2-abcdef")
    assert stage.said[-1] == "worker w0-abcdef is ended, since it did not drain: worker w0-abcdef: no answer"
    assert "w0-abcdef" not in stage.actors


async def test_place_of_a_worker_that_was_killed_from_outside_is_given_back(stage: Stage) -> None:
    del stage.actors["w1-abcdef"]
    assert await stage.drain("w1-abcdef") == ("w0-abcdef", "w2-abcdef")
    assert stage.freed == ["w1-abcdef"]
    del stage.actors["w2-abcdef"]
    assert await deployment.take_down(stage.run_dir, stage.said.append)
    assert (stage.freed, stage.actors) == (["w1-abcdef", "w2-abcdef"], {})


async def test_last_worker_that_lives_is_not_drained(stage: Stage) -> None:
    stage.serving = {"w1-abcdef"}
    with pytest.raises(ConfigError, match="without w1-abcdef no worker is left that takes requests"):
        await stage.drain("w1-abcdef")
    with pytest.raises(ConfigError, match="there is no worker 'w7'; the workers are w0-abcdef, w1-abcdef, w2-abcdef"):
        await stage.drain("w7")
    assert await stage.scale(1) == ("w1-abcdef",)
    stage.serving = set()
    with pytest.raises(ConfigError, match="no worker is left that takes requests"):
        await stage.drain("w1-abcdef")


async def test_worker_that_is_on_its_way_out_is_ended_and_replaced(stage: Stage) -> None:
    stage.actors["w1-abcdef"] = True
    assert await stage.scale(3) == ("w0-abcdef", "w2-abcdef", "w3-abcdef")
    assert (stage.drained, stage.started) == (["w1-abcdef"], ["w3-abcdef"])


async def test_worker_that_is_listed_and_gone_is_started_again(stage: Stage) -> None:
    del stage.actors["w1-abcdef"]
    assert await stage.scale(4) == (*RUN.workers, "w3-abcdef")
    assert stage.started == ["w1-abcdef", "w3-abcdef"]


async def test_workers_that_do_not_start_leave_the_deployment_as_it_was(stage: Stage) -> None:
    stage.fails_to_start = True
    with pytest.raises(EngineError, match="no memory"):
        await stage.scale(4)
    assert runfile.read_run(stage.run_dir) == RUN


async def test_deployment_that_is_ended_meanwhile_is_not_written_down_again(stage: Stage) -> None:
    stage.ends_meanwhile = True
    with pytest.raises(ConfigError, match="the deployment was ended meanwhile"):
        await stage.scale(2)
    assert runfile.read_run(stage.run_dir) is None


async def test_another_deployment_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    runfile.write_run(tmp_path, RUN)
    with pytest.raises(ConfigError, match="ended meanwhile"):
        runfile.update_run(tmp_path, replace(RUN, marker="another"))
    assert runfile.read_run(tmp_path) == RUN


def test_router_takes_workers_of_its_own_deployment_whenever_they_come() -> None:
    own = launch._OwnWorkers("-abcdef")
    assert [name in own for name in ("w0-abcdef", "w17-abcdef", "w0-fedcba", "w0", 7)] == [True, True] + [False] * 3
    assert "w0" in launch._OwnWorkers("")
