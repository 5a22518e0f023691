"""The actor's shell around a worker that does not start or is to leave, without Ray and without an engine."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import Settings
from shared.errors import EngineError
from shared.telemetry import Readings
from shared.types import WorkerId
from worker import actor
from worker.process import WorkerOptions

pytestmark = pytest.mark.ray

OPTIONS = WorkerOptions(WorkerId("w0"), Settings(model="tiny"), "memory://", b"secret", is_local=True).to_wire()


class _SickWorker:
    """Waits for its gate, and then does not start."""

    gate = threading.Event()

    def __init__(self, *arguments: Any, must_reach_store: bool) -> None:
        self.metrics = Readings()

    async def start(self) -> None:
        self.gate.wait(60.0)
        raise EngineError("no memory yet")

    async def stop(self) -> None:
        pass


class _BusyWorker(_SickWorker):
    """Starts at once, and is drained when its gate opens."""

    async def start(self) -> Any:
        return None

    async def drain(self, timeout_s: float) -> int:
        await asyncio.to_thread(self.gate.wait, 60.0)
        return int(timeout_s)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Reasons of exits, instead of exits."""
    reasons: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(actor, "Worker", _SickWorker)
    monkeypatch.setattr(actor, "_exit_process", reasons.put)
    monkeypatch.setattr(actor, "_RESTART_PAUSE_S", 0.01)
    context = SimpleNamespace(current_actor="this one", was_current_actor_reconstructed=False)
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(_SickWorker, "gate", threading.Event())
    return reasons


def test_start_that_fails_is_told_to_who_asks_and_ends_the_process(exits: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    _SickWorker.gate.set()
    with pytest.raises(EngineError, match="no memory yet"):
        worker.ready()
    assert exits.get(timeout=60.0) == "no memory yet"


def test_actor_says_what_it_is_where_ray_shows_it(exits: queue.Queue[str]) -> None:
    assert repr(actor.WorkerActor(OPTIONS)) == "w0 tiny"
    _SickWorker.gate.set()
    assert exits.get(timeout=60.0) == "no memory yet"


def test_start_that_is_given_up_ends_no_process(exits: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    worker._start.cancel()
    _SickWorker.gate.set()
    worker.stop()
    assert exits.empty()


@pytest.fixture
def leaves(exits: queue.Queue[str], monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Actors that end for good, instead of ends."""
    left: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(actor, "Worker", _BusyWorker)
    monkeypatch.setattr(actor, "_LEAVE_S", 0.01)
    monkeypatch.setattr(actor, "_end_for_good", left.put)
    return left


def test_drained_actor_ends_for_good_whether_or_not_anybody_waits_for_it(leaves: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    worker._start.exception(60.0)
    assert not worker.is_leaving()
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(worker.drain, 7.0)
        while not worker.is_leaving():
            time.sleep(0.001)
        # A second command waits for the first one's end.
        second = callers.submit(worker.drain, 9.0)
        assert leaves.empty()
        _BusyWorker.gate.set()
        assert (first.result(60.0), second.result(60.0)) == (7, 7)
    assert leaves.get(timeout=60.0) == "this one"
    assert leaves.empty()


def test_actor_that_has_no_worker_yet_has_nothing_to_drain(exits: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    assert worker.drain(60.0) == 0
    _SickWorker.gate.set()
    assert exits.get(timeout=60.0) == "no memory yet"
    assert worker.drain(60.0) == 0
