"""How a change goes through a deployment, step by step, without any worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router import launch, pins, rollout, runfile
from router.changes import build_of
from router.cli import EXIT_OK
from router.commands import Invocation, _up
from router.serving import Say
from shared.config import Settings
from shared.errors import ConfigError, EngineError
from tests.support.stage import RUN, Stage

SETTINGS = {**RUN.settings, "workers": 3, "max_num_seqs": 4, "heartbeat_s": 0.001}
CHANGED = Settings(max_num_seqs=8)


def made(run: runfile.Run = RUN, **settings: Any) -> runfile.Run:
    """A deployment whose workers are all made as its settings say."""
    recorded = {**SETTINGS, **settings}
    build = build_of(Settings(**recorded))
    return replace(run, settings=recorded, worker_to_build=dict.fromkeys(run.workers, build))


class Rollout(Stage):
    """A stage on which settings change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, run: runfile.Run) -> None:
        super().__init__(monkeypatch, run_dir, run)
        self.parity_key = b"ours"
        self.handed_over: list[tuple[str, str]] = []
        monkeypatch.setattr(rollout, "_SETTLED_S", 0.0)
        monkeypatch.setattr(rollout, "_FREED_S", 0.0)
        monkeypatch.setattr(rollout, "tokenizer_fingerprint", lambda folder: b"")
        monkeypatch.setattr(rollout, "parity_key", lambda scheme, fingerprint: b"ours")
        monkeypatch.setattr(launch, "prepare_model_folder", self._prepare)
        monkeypatch.setattr(launch, "live_workers", self._live_workers)
        monkeypatch.setattr(pins, "hand_over", self._hand_over)

    async def change(self, settings: Settings = CHANGED) -> runfile.Run:
        run = await rollout.change(self.run_dir, settings, self.said.append)
        assert runfile.read_run(self.run_dir) == run
        assert set(run.worker_to_build) == set(run.workers)
        assert len(set(run.worker_to_build.values())) == 1
        return run

    async def _prepare(self, settings: Settings, say: Say) -> Path:
        return self.run_dir

    async def _live_workers(self, run: runfile.Run, settings: Settings) -> list[Any]:
        infos = [
            SimpleNamespace(worker=worker, parity_key=self.parity_key, max_model_len_tokens=2048)
            for worker in sorted(self.serving)
        ]
        return [SimpleNamespace(info=info) for info in infos]

    async def _hand_over(self, run: runfile.Run, settings: Settings, leaving: str, heir: str, say: Say) -> None:
        self.handed_over.append((leaving.partition("-")[0], heir.partition("-")[0]))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rollout:
    return Rollout(monkeypatch, tmp_path, made())


async def test_each_worker_goes_once_its_successor_serves_and_keeps_its_pins(stage: Rollout) -> None:
    run = await stage.change()
    assert stage.events == ["+w3", "-w0", "+w4", "-w1", "+w5", "-w2"]
    assert stage.handed_over == [("w0", "w3"), ("w1", "w4"), ("w2", "w5")]
    assert run.workers == ("w3-abcdef", "w4-abcdef", "w5-abcdef")
    assert run.settings == {**SETTINGS, "max_num_seqs": 8}
    assert stage.said[0] == "changing --max-num-seqs: 4 -> 8"


async def test_each_worker_makes_room_for_its_successor_where_there_is_none(stage: Rollout) -> None:
    stage.num_free = 0
    run = await stage.change()
    assert stage.events == ["-w0", "+w3", "-w1", "+w4", "-w2", "+w5"]
    assert stage.handed_over == [("w0", "w3"), ("w1", "w4"), ("w2", "w5")]
    assert (run.settings["workers"], len(run.workers)) == (3, 3)


async def test_the_only_worker_stays_where_nobody_could_stand_in_for_it(stage: Rollout) -> None:
    # What the other two leave is taken by somebody else.
    stage.num_free = -2
    stage.serving = {"w0-abcdef"}
    with pytest.raises(ConfigError, match="worker w0-abcdef is the only one that serves, and the cluster has no room"):
        await stage.change()
    assert "w0-abcdef" in stage.serving


async def test_nothing_that_differs_is_nothing_to_do(stage: Rollout) -> None:
    before = runfile.read_run(stage.run_dir)
    assert await stage.change(Settings(max_num_seqs=4)) == before
    assert stage.events == []
    # What is for starts alone is written down, and replaces nobody.
    assert (await stage.change(Settings(log_level="debug"))).settings == {**SETTINGS, "log_level": "debug"}
    assert stage.events == []


async def test_start_that_fails_leaves_all_as_it_was_and_the_same_command_begins_anew(stage: Rollout) -> None:
    before = runfile.read_run(stage.run_dir)
    stage.fails_to_start = True
    for _ in range(2):
        with pytest.raises(EngineError, match="no memory\nthe change stops here, and w0-abcdef, w1-abcdef, w2-abcdef"):
            await stage.change()
        assert runfile.read_run(stage.run_dir) == before
    stage.fails_to_start = False
    await stage.change()
    assert stage.events == ["+w3", "-w0", "+w4", "-w1", "+w5", "-w2"]


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        (CHANGED, ["+w4", "-w1", "+w5", "-w2"]),
        (Settings(max_num_seqs=4), ["+w4", "-w3"]),
        (Settings(), ["+w4", "-w1", "+w5", "-w2"]),
    ],
    ids=["on", "back", "on, by what was recorded"],
)
async def test_change_that_stopped_halfway_goes_on_or_back(
    stage: Rollout, settings: Settings, events: list[str]
) -> None:
    start = stage._start_workers

    async def start_one(wanted: Settings, *arguments: Any, ids: list[str], **options: Any) -> None:
        stage.fails_to_start = ids == ["w4-abcdef"]
        await start(wanted, *arguments, ids=ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_workers", start_one)
        with pytest.raises(EngineError, match="the change stops here, and w1-abcdef, w2-abcdef, w3-abcdef serve on"):
            await stage.change()
    stage.fails_to_start = False
    assert stage.events == ["+w3", "-w0"]
    run = runfile.read_run(stage.run_dir)
    assert run is not None
    assert (run.settings["max_num_seqs"], run.settings["workers"]) == (8, 3)
    stage.events.clear()
    await stage.change(settings)
    assert stage.events == events


async def test_number_of_workers_changes_along_with_the_rest(stage: Rollout) -> None:
    run = await stage.change(Settings(max_num_seqs=8, workers=1))
    assert sorted(stage.events[:2]) == ["-w0", "-w1"]
    assert stage.events[2:] == ["+w3", "-w2"]
    assert (run.workers, run.settings["workers"]) == (("w3-abcdef",), 1)
    run = await stage.change(Settings(max_num_seqs=9, workers=3))
    assert stage.events[4:] == ["+w4", "-w3", "+w5", "+w6"]
    assert run.workers == ("w4-abcdef", "w5-abcdef", "w6-abcdef")
    run = await stage.change(Settings(workers=2))
    assert (stage.events[8:], run.workers) == (["-w6"], ("w4-abcdef", "w5-abcdef"))
    assert stage.handed_over[-1] == ("w6", "w5")


async def test_workers_that_do_not_serve_are_taken_off_first(stage: Rollout) -> None:
    stage.serving.discard("w1-abcdef")
    del stage.actors["w2-abcdef"]
    stage.serving.discard("w2-abcdef")
    run = await stage.change()
    assert stage.events == ["-w1", "+w1", "-w0", "+w2", "+w3"]
    assert "worker w2-abcdef was gone already" in stage.said
    assert run.workers == ("w1-abcdef", "w2-abcdef", "w3-abcdef")


async def test_workers_of_an_unknown_build_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after another version of the command has started them."""
    stage = Rollout(monkeypatch, tmp_path, replace(made(), worker_to_build={}))
    await stage.change(Settings())
    assert stage.events == ["+w3", "-w0", "+w4", "-w1", "+w5", "-w2"]
    assert stage.said[0] == (
        "w0-abcdef, w1-abcdef, w2-abcdef: started with other settings or by another version, and replaced one by one"
    )


async def test_other_block_keys_are_refused_by_name(stage: Rollout) -> None:
    stage.parity_key = b"theirs"
    with pytest.raises(ConfigError, match=r"--model tiny: the tokenizer in .* is another one than w0-abcdef"):
        await stage.change()
    assert stage.events == []
    stage.parity_key = b""
    await stage.change()
    assert len(stage.events) == 6


async def test_context_may_grow_and_not_shrink(stage: Rollout) -> None:
    with pytest.raises(ConfigError, match="--max-model-len: 2047 is less than the 2048 tokens that routers that run"):
        await stage.change(Settings(max_model_len=2047))
    assert stage.events == []
    assert (await stage.change(Settings(max_model_len=4096))).settings["max_model_len"] == 4096


async def test_up_on_a_deployment_that_runs_changes_it(stage: Rollout) -> None:
    settings = Settings(run_dir=stage.run_dir, max_num_seqs=8)
    assert await _up(Invocation(settings, {}, stage.said.append, stage.said.append)) == EXIT_OK
    assert stage.said[-1] == "3 workers serve tiny: w3-abcdef, w4-abcdef, w5-abcdef"
    with pytest.raises(ConfigError, match="--model: smollm2 cannot take the place of tiny"):
        await _up(Invocation(Settings(run_dir=stage.run_dir, model="smollm2"), {}, stage.said.append, print))
    busy = pytest.raises(ConfigError, match="another `kvroute up`, `scale` or `drain` is at work")
    with runfile.changing(stage.run_dir), busy:
        await _up(Invocation(settings, {}, stage.said.append, print))


async def test_deployment_that_is_ended_meanwhile_is_not_written_down_again(stage: Rollout) -> None:
    stage.ends_meanwhile = True
    with pytest.raises(ConfigError, match="the deployment was ended meanwhile"):
        await stage.change()
    assert runfile.read_run(stage.run_dir) is None
