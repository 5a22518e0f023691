"""What one worker counts, as metrics."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from shared.config import Settings
from shared.directory.embedded import EmbeddedStore
from shared.directory.memory import MemoryDirectory
from shared.directory.pin_board import MemoryPinBoard
from shared.telemetry import Readings
from shared.types import CacheScheme, WorkerId
from shared.vtime import run_virtual
from tests.support.boards import Follower
from tests.support.fakes import FakeEngine
from tests.support.flaky_directory import FlakyDirectory
from tests.support.stores import SCHEME, embedded_store, keys, pin_spec, wait_until, worker_info
from tests.unit.test_telemetry import samples
from worker import process
from worker.auditor import AuditCounts
from worker.engines.base import BlockChange
from worker.metrics import expose_audits, expose_pinner, expose_publisher
from worker.process import WorkerOptions
from worker.publisher import Publisher

__all__ = ["embedded_store"]


def test_publisher_tells_what_it_sent_what_waits_and_what_it_left_to_a_snapshot() -> None:
    async def scenario() -> None:
        flaky = FlakyDirectory(MemoryDirectory(SCHEME, asyncio.get_running_loop().time))
        publisher = Publisher(flaky, worker_info("w1"), rng=random.Random(0), max_pending_keys=10)
        readings = Readings()
        expose_publisher(publisher, readings)
        await publisher.start()
        publisher.on_blocks(BlockChange(stored=keys(range(5))))
        await wait_until(lambda: publisher.is_quiet)
        flaky.is_down = True
        publisher.on_blocks(BlockChange(stored=keys(range(5, 12)), removed=keys([0])))
        assert samples(readings) == {
            "kvroute_publisher_block_events_total": 13,
            "kvroute_publisher_batches_total": 1,
            "kvroute_publisher_pending_changes": 8,
            "kvroute_publisher_dropped_changes_total": 0,
            "kvroute_publisher_resident_blocks": 11,
        }
        publisher.on_blocks(BlockChange(stored=keys(range(12, 16))))
        flaky.is_down = False
        await wait_until(lambda: publisher.is_quiet)
        assert samples(readings) == {
            "kvroute_publisher_block_events_total": 17,
            "kvroute_publisher_batches_total": 1,
            'kvroute_publisher_snapshots_total{cause="overflow"}': 1,
            "kvroute_publisher_pending_changes": 0,
            "kvroute_publisher_dropped_changes_total": 12,
            "kvroute_publisher_resident_blocks": 15,
        }
        await publisher.stop()

    run_virtual(scenario())


def test_pinner_tells_what_it_made_and_what_was_refused() -> None:
    async def scenario() -> None:
        board = MemoryPinBoard(asyncio.get_running_loop().time)
        await board.put(pin_spec("system"), None)
        await board.put(pin_spec("large", life=2, num_tokens=5000), None)
        worker = Follower.start(board)
        readings = Readings()
        expose_pinner(worker.pinner, readings)
        await wait_until(lambda: worker.pinner.num_refused > 0 and worker.pinner.num_pinned > 0)
        assert samples(readings) == {
            "kvroute_pins_made_total": 1,
            "kvroute_pins_refused_total": 1,
            "kvroute_pin_faults_total": 0,
            "kvroute_pinned_blocks": 3,
        }
        await worker.pinner.stop()

    run_virtual(scenario())


def test_audits_are_told() -> None:
    audits = AuditCounts()
    readings = Readings()
    expose_audits(audits, readings)
    audits.num_audits, audits.num_drifts = 7, 2
    assert samples(readings) == {"kvroute_audits_total": 7, "kvroute_audit_drifts_total": 2}


@pytest.mark.redis
async def test_worker_has_all_of_them_on_one_page(
    embedded_store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make_engine(settings: Settings, scheme: CacheScheme, folder: Path, *wiring: Any) -> FakeEngine:
        return FakeEngine(scheme=scheme, on_blocks=wiring[0])

    monkeypatch.setattr(process, "prepare_model", lambda *_: tmp_path)
    monkeypatch.setattr(process, "tokenizer_fingerprint", lambda *_: b"fingerprint")
    monkeypatch.setitem(process._ENGINES, "vllm", make_engine)  # type: ignore[arg-type]
    settings = Settings(model="tiny", heartbeat_s=0.1)
    options = WorkerOptions(WorkerId("w1"), settings, embedded_store.url, b"s" * 32, is_local=True)
    worker = process.Worker(options, lambda reason: None)
    await worker.start()
    try:
        found = samples(worker.metrics)
    finally:
        await worker.stop()
    assert {name.removesuffix("_total") for name in found} == {
        "kvroute_store_malformed",
        "kvroute_store_misses",
        "kvroute_store_spared_matches",
        "kvroute_store_breaker_openings",
        "kvroute_publisher_block_events",
        "kvroute_publisher_batches",
        "kvroute_publisher_pending_changes",
        "kvroute_publisher_dropped_changes",
        "kvroute_publisher_resident_blocks",
        "kvroute_audits",
        "kvroute_audit_drifts",
        "kvroute_pin_board_malformed",
        "kvroute_pins_made",
        "kvroute_pins_refused",
        "kvroute_pin_faults",
        "kvroute_pinned_blocks",
    }
