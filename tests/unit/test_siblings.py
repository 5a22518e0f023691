"""Several server processes behind one port: their metrics as one text, and who is left out of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import serve_child, siblings
from router.sibling_metrics import METRICS, all_metrics, merged_metrics
from router.sibling_words import Place, telling_siblings
from router.tokenizer import Tokenizer
from shared.telemetry import Metrics
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import ask, echo, make_front
from tests.support.tokenizers import write_model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def test_metrics_of_several_processes_are_one_text() -> None:
    texts = {}
    for router in ("0", "1"):
        metrics = Metrics()
        metrics.note_failover("stream")
        metrics.add_gauges("kvroute_workers", "Workers by state.", "state", lambda: {"ready": 2 + int(router)})  # noqa: B023
        metrics.add_gauges("kvroute_worker_cache_unaware", "By name.", "worker", lambda: {'w"0': 1})
        texts[router] = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(merged_metrics(texts).decode())}
    alone = {family.name: family for family in text_string_to_metric_families(texts["0"])}
    assert families.keys() == alone.keys()
    assert [(sample.labels, sample.value) for sample in families["kvroute_workers"].samples] == [
        ({"router": "0", "state": "ready"}, 2.0),
        ({"router": "1", "state": "ready"}, 3.0),
    ]
    for name, family in families.items():
        assert (family.documentation, family.type) == (alone[name].documentation, alone[name].type)
        assert len(family.samples) == 2 * len(alone[name].samples)


async def test_front_tells_the_metrics_of_all(tokenizer: Tokenizer) -> None:
    async def all_of_them() -> bytes:
        return b"# all\n"

    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, all_metrics=all_of_them)
    assert (await ask(front, "/metrics")).body == b"# all\n"


async def test_process_that_does_not_answer_is_left_out_and_told_of(tmp_path: Path) -> None:
    places = [Place(tmp_path, number, 3) for number in range(3)]

    async def metrics() -> bytes:
        return b"# HELP a b\na 1.0\n"

    with contextlib.ExitStack() as stack:
        living = stack.enter_context(places[0].listen())
        silent = stack.enter_context(places[2].listen())
        assert silent.fileno() >= 0
        async with telling_siblings(living, {METRICS: metrics}), asyncio.timeout(30.0):
            told = await all_metrics(places[1], lambda: b"# HELP a b\na 2.0\n")
    *families, up = text_string_to_metric_families(told.decode())
    assert [(sample.labels, sample.value) for family in families for sample in family.samples] == [
        ({"router": "0"}, 1.0),
        ({"router": "1"}, 2.0),
    ]
    assert (up.name, up.type) == ("kvroute_router_up", "gauge")
    assert [(sample.labels["router"], sample.value) for sample in up.samples] == [("0", 1.0), ("1", 1.0), ("2", 0.0)]


async def test_sibling_that_asks_for_nonsense_gets_nothing(tmp_path: Path) -> None:
    async def metrics() -> bytes:
        return b"told"

    with Place(tmp_path, 0, 2).listen() as listener:
        async with telling_siblings(listener, {METRICS: metrics}), asyncio.timeout(30.0):
            assert await Place(tmp_path, 1, 2).ask_others("nonsense") == {0: None}
            assert await Place(tmp_path, 1, 2).ask_others(METRICS) == {0: b"told"}


STUBBORN = """
import json, pathlib, sys
folder = pathlib.Path(json.loads(sys.stdin.readline())["folder"])
if (folder / "first").exists():
    (folder / "second").touch()
    sys.stdin.read()
    (folder / "ended").touch()
else:
    (folder / "first").touch()
    print("ready", flush=True)
"""
"""A process that ends as soon as it is ready, and the second time is never ready."""


async def test_process_that_is_being_started_again_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "_CHILD", ("-c", STUBBORN))
    monkeypatch.setattr(siblings, "_RESTART_S", 0.0)
    async with siblings.Siblings([{"folder": str(tmp_path)}], 60.0, lambda line: None) as others:
        async with asyncio.timeout(60.0):
            while not (tmp_path / "second").exists():
                await asyncio.sleep(0.01)
            others.end()
            await others.ended()
        assert (tmp_path / "ended").exists()


HANGING = """
import json, os, pathlib, signal, sys
folder = pathlib.Path(json.loads(sys.stdin.readline())["folder"])
is_first = not (folder / "first").exists()
(folder / "first").touch()
print("ready", flush=True)
if is_first:
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
sys.stdin.read()
"""
"""A process that is stopped after its first beat; the one that follows is not."""


async def test_process_that_says_nothing_any_more_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "_CHILD", ("-c", HANGING))
    monkeypatch.setattr(siblings, "_RESTART_S", 0.0)
    monkeypatch.setattr(siblings, "BEAT_S", 0.1)
    said: list[str] = []
    async with siblings.Siblings([{"folder": str(tmp_path)}], 60.0, said.append), asyncio.timeout(60.0):
        while len(said) < 2:
            await asyncio.sleep(0.01)
    assert said[:2] == [
        "server process 1 has said nothing for 1 s: it is killed",
        "server process 1 has ended with -9: it is started again",
    ]


async def test_process_beats_and_holds_itself_up_for_nobody_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as heard, os.fdopen(writer, "w") as said:
        os.set_blocking(reader, False)
        room_bytes = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        monkeypatch.setattr(serve_child, "BEAT_S", 0.0)
        monkeypatch.setattr(sys, "stdout", said)
        beating = asyncio.create_task(serve_child._beat())
        for _ in range(2 * room_bytes // len(siblings.BEAT)):
            await asyncio.sleep(0)
        most = heard.read(room_bytes)
        assert len(most) > room_bytes // 2
        assert set(most.splitlines(keepends=True)) == {siblings.BEAT}
        for _ in range(3):
            await asyncio.sleep(0)
        assert heard.read(len(siblings.BEAT)) == siblings.BEAT
        beating.cancel()
