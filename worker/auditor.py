"""The slow comparison inside a worker: its engine with its publisher, and its publisher with the store.

Owns the counts of what was found. What lasts is mended by publishing the engine's own account anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import xor

from shared.directory.survey import Survey
from shared.errors import KvrouteError
from shared.hashing import KEY_SIZE_BYTES
from shared.types import BlockKey, WorkerId
from worker.engines.base import Engine
from worker.publisher import Publisher

_logger = logging.getLogger(__name__)

DEFAULT_SETTLE_S = 1.0
"""Longer than a change takes from the engine to the publisher."""
DEFAULT_KEYS_PER_AUDIT = 4096
"""Keys looked up in the store by one audit: some 2 ms of it. Audits take turns through a larger set."""
_NUM_LOOKS = 3
_KEYS_PER_TURN = 4096


@dataclass(slots=True)
class AuditCounts:
    """What has happened since the worker started."""

    num_audits: int = 0
    """Comparisons that came to an end."""
    num_drifts: int = 0
    """Differences that lasted, each of which led to a snapshot."""


class Auditor:
    """Compares one worker's engine, publisher and store now and then, as long as it runs.

    Engine and publisher differ by what is on its way between them at any moment; only a key that differs at several
    looks, `settle_s` apart, counts. Publisher and store are compared where neither moves: the store answers only while
    it stands at the publisher's epoch and batch, so that a difference there counts at once.
    """

    def __init__(
        self,
        worker: WorkerId,
        engine: Engine,
        publisher: Publisher,
        survey: Survey,
        *,
        rng: random.Random,
        counts: AuditCounts | None = None,
        audit_s: float,
        settle_s: float = DEFAULT_SETTLE_S,
        keys_per_audit: int = DEFAULT_KEYS_PER_AUDIT,
    ) -> None:
        self.counts = counts or AuditCounts()
        self._worker = worker
        self._engine = engine
        self._publisher = publisher
        self._survey = survey
        self._rng = rng
        self._audit_s = audit_s
        self._settle_s = settle_s
        self._keys_per_audit = keys_per_audit
        self._unchecked: list[BlockKey] = []
        """What is left of the present round through the publisher's set."""
        self._is_drifting = False
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Audit from now on, in the background."""
        self._task = asyncio.create_task(self._run(), name=f"auditor of {self._worker}")

    async def stop(self) -> None:
        """Audit no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def audit(self) -> bool:
        """Compare once; whether all is well as far as can be told. Mends what is not.

        Raises `EngineError` where the engine does not answer, `DirectoryUnavailable` where the store does not.
        """
        drift = await self._engine_drift() or await self._store_drift()
        self.counts.num_audits += 1
        if drift is None:
            self._is_drifting = False
            return True
        self.counts.num_drifts += 1
        # One alarm for a fault that comes back with each audit; the count goes on.
        level = logging.DEBUG if self._is_drifting else logging.ERROR
        _logger.log(level, "worker %s: %s; it publishes its engine's own account anew", self._worker, drift)
        self._is_drifting = True
        self._publisher.replace(await self._engine.resident(), "audit")
        return False

    async def _run(self) -> None:
        while True:
            # Spread out, so that workers that were started together do not ask the store together.
            await asyncio.sleep(self._audit_s * self._rng.uniform(0.5, 1.5))
            try:
                await self.audit()
                self._has_failed = False
            except KvrouteError as error:
                _logger.debug("worker %s could not be audited: %s", self._worker, error)
            except Exception:
                # A fault of ours must neither end the audits nor fill the log.
                if not self._has_failed:
                    _logger.exception("worker %s could not be audited", self._worker)
                self._has_failed = True

    async def _engine_drift(self) -> str | None:
        """What the publisher takes for resident wrongly, and goes on to."""
        if (told := await self._engine.pool_digest()) is not None and told == await self._published_digest():
            return None
        differing = await self._engine.look() ^ self._publisher.resident
        for _ in range(_NUM_LOOKS - 1):
            if not differing:
                return None
            await asyncio.sleep(self._settle_s)
            differing &= await self._engine.look() ^ self._publisher.resident
        return f"engine and publisher differ in {len(differing)} blocks" if differing else None

    async def _published_digest(self) -> tuple[int, bytes]:
        """Of what is published now, with turns for others in between."""
        published = list(self._publisher.resident)
        folded = 0
        for start in range(0, len(published), _KEYS_PER_TURN):
            folded = _fold(published[start : start + _KEYS_PER_TURN], folded)
            await asyncio.sleep(0)
        return len(published), folded.to_bytes(KEY_SIZE_BYTES, "big")

    async def _store_drift(self) -> str | None:
        """What the store holds otherwise than the publisher was told that it does."""
        publisher = self._publisher
        if not publisher.is_quiet:
            return None
        # What the store holds after this batch is known now, and stays so whatever is published while it is asked.
        num_published, asked = len(publisher.resident), self._next_keys()
        found = await self._survey.audit(self._worker, publisher.epoch, publisher.seq, asked)
        if found is None or (found.num_entries == num_published and not found.num_absent):
            return None
        return (
            f"the store holds {found.num_entries} blocks where {num_published} are published, and lacks "
            f"{found.num_absent} of {len(asked)} looked up"
        )

    def _next_keys(self) -> list[BlockKey]:
        """Keys to look up this time: as many as one audit may, in rounds through all that are resident."""
        resident = self._publisher.resident
        if not self._unchecked:
            self._unchecked = list(resident)
        taken, self._unchecked = self._unchecked[: self._keys_per_audit], self._unchecked[self._keys_per_audit :]
        return [key for key in taken if key in resident]


def digest_of(keys: Iterable[BlockKey]) -> tuple[int, bytes]:
    """Number of different keys and all of them exclusive-ored, as an engine's pool tells it. Linear."""
    distinct = set(keys)
    return len(distinct), _fold(distinct).to_bytes(KEY_SIZE_BYTES, "big")


def _fold(keys: Iterable[BlockKey], folded: int = 0) -> int:
    return reduce(xor, (int.from_bytes(key, "big") for key in keys), folded)
