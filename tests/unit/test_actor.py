"""The actor's shell around a worker that does not start, without Ray and without an engine."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from shared.config import Settings
from shared.errors import EngineError
from shared.types import WorkerId
from worker import actor
from worker.process import WorkerOptions

pytestmark = pytest.mark.ray

OPTIONS = WorkerOptions(WorkerId("w0"), Settings(model="tiny"), "memory://", b"secret", is_local=True).to_wire()


class _SickWorker:
    """Waits for its gate, and then does not start."""

    gate = threading.Event()

    def __init__(self, *arguments: Any) -> None:
        pass

    async def start(self) -> None:
        self.gate.wait(60.0)
        raise EngineError("no memory yet")

    async def stop(self) -> None:
        pass


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    """Reasons of exits, instead of exits."""
    reasons: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(actor, "Worker", _SickWorker)
    monkeypatch.setattr(actor, "_exit_process", reasons.put)
    monkeypatch.setattr(actor, "_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(_SickWorker, "gate", threading.Event())
    return reasons


def test_start_that_fails_is_told_to_who_asks_and_ends_the_process(exits: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    _SickWorker.gate.set()
    with pytest.raises(EngineError, match="no memory yet"):
        worker.ready()
    assert exits.get(timeout=60.0) == "no memory yet"


def test_start_that_is_given_up_ends_no_process(exits: queue.Queue[str]) -> None:
    worker = actor.WorkerActor(OPTIONS)
    worker._start.cancel()
    _SickWorker.gate.set()
    worker.stop()
    assert exits.empty()
