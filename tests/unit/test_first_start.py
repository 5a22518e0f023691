"""A worker's first start: what it makes of a store that its node does not reach."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from shared.config import Settings
from shared.errors import ConfigError, EngineError
from shared.types import WorkerId
from worker import process
from worker.process import Worker, WorkerOptions

PASSWORD = "s3cret"


def _worker(*, must_reach_store: bool) -> Worker:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}"
    options = WorkerOptions(WorkerId("w7"), Settings(model="tiny"), url, b"secret", is_local=False)
    return Worker(options, lambda reason: None, "10.0.0.9", must_reach_store=must_reach_store)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that comes as far as its engine ends there, and at once."""

    def make_engine(*arguments: Any) -> Any:
        raise EngineError("as far as the engine")

    monkeypatch.setattr(process, "make_engine", make_engine)
    monkeypatch.setattr(process, "prepare_model", lambda *arguments: None)
    monkeypatch.setattr(process, "_STORE_PATIENCE_S", 0.0)


async def test_store_that_one_node_does_not_reach_is_an_error_that_names_the_node() -> None:
    with pytest.raises(ConfigError) as caught:
        await _worker(must_reach_store=True).start()
    told = str(caught.value)
    assert told.startswith(
        f"--redis-url: worker w7 on node {socket.gethostname()} (10.0.0.9) cannot reach the store at 127.0.0.1:"
    )
    assert PASSWORD not in told


async def test_worker_that_comes_back_starts_without_the_store() -> None:
    with pytest.raises(EngineError, match="as far as the engine"):
        await _worker(must_reach_store=False).start()
