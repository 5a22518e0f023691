"""Names what one worker counts as metrics. Counts nothing itself."""

from __future__ import annotations

from shared.telemetry import Readings
from worker.auditor import AuditCounts
from worker.pinner import Pinner
from worker.publisher import Publisher


def expose_publisher(publisher: Publisher, readings: Readings) -> None:
    """Tell what a publisher counts. Modifies `readings`, as all do here."""
    readings.add_counter(
        "kvroute_publisher_block_events",
        "Blocks that the engine said to have stored or removed.",
        lambda: publisher.num_block_events,
    )
    readings.add_counter(
        "kvroute_publisher_batches", "Batches of changes that the store has applied.", lambda: publisher.num_batches
    )
    readings.add_counters(
        "kvroute_publisher_snapshots",
        "Snapshots of all resident blocks that took effect in the store, by cause.",
        "cause",
        lambda: publisher.num_snapshots,
    )
    readings.add_gauge(
        "kvroute_publisher_pending_changes",
        "Changes that the store is not known to have.",
        lambda: publisher.num_pending,
    )
    readings.add_counter(
        "kvroute_publisher_dropped_changes",
        "Changes that waited for the store and were then left to a snapshot.",
        lambda: publisher.num_dropped,
    )
    readings.add_gauge(
        "kvroute_publisher_resident_blocks",
        "Blocks that the engine holds, as far as the publisher was told.",
        lambda: len(publisher.resident),
    )


def expose_audits(audits: AuditCounts, readings: Readings) -> None:
    """Tell what an auditor counts."""
    readings.add_counter(
        "kvroute_audits", "Comparisons of engine, publisher and store that came to an end.", lambda: audits.num_audits
    )
    readings.add_counter(
        "kvroute_audit_drifts",
        "Differences that lasted, each of which led to a snapshot.",
        lambda: audits.num_drifts,
    )


def expose_pinner(pinner: Pinner, readings: Readings) -> None:
    """Tell what a pinner counts."""
    readings.add_counter(
        "kvroute_pins_made", "Pins that the engine computed, those made again included.", lambda: pinner.num_pinned
    )
    readings.add_counter("kvroute_pins_refused", "Pins that the engine refused.", lambda: pinner.num_refused)
    readings.add_counter(
        "kvroute_pin_faults", "Unexpected errors while following the pin board.", lambda: pinner.num_faults
    )
    readings.add_gauge(
        "kvroute_pinned_blocks", "Blocks that pins hold in the engine.", lambda: pinner.pins.num_pinned_blocks
    )
