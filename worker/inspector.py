"""What a worker tells of itself when a doctor asks: what its engine holds, and what is published of it.

Owns nothing. Changes nothing but where a repair is asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from typing import Protocol

from shared.errors import KvrouteError, Overloaded, ProtocolError
from shared.hashing import KEY_SIZE_BYTES
from shared.messages import MAX_KEYS_PER_PART, Fault, Inspect, Inspection, ResidentKeys, encode
from shared.transport.base import Channel
from shared.transport.faults import fault_of
from shared.types import BlockKey, Epoch
from worker.auditor import AuditCounts
from worker.engines.base import Engine
from worker.publisher import Publisher

_logger = logging.getLogger(__name__)


class Inspector(Protocol):
    """Answers what a host is asked and knows nothing of."""

    async def inspect(self, asked: Inspect) -> tuple[Inspection, Set[BlockKey]]:
        """One moment of the worker, and what its engine held then. Raises `KvrouteError` where it cannot tell."""
        ...


class PoolInspector:
    """`Inspector` of an engine and the publisher of its blocks. Takes one look at a time, since each is linear."""

    def __init__(self, engine: Engine, find_publisher: Callable[[], Publisher | None], audits: AuditCounts) -> None:
        """`find_publisher` gives `None` while the worker starts."""
        self._engine = engine
        self._find_publisher = find_publisher
        self._audits = audits
        self._lock = asyncio.Lock()

    async def inspect(self, asked: Inspect) -> tuple[Inspection, Set[BlockKey]]:
        async with self._lock:
            publisher = self._find_publisher()
            if publisher is None:
                raise Overloaded("the worker has not registered yet")
            if asked.is_repair:
                publisher.replace(await self._engine.resident(), "repair")
            keys = await self._engine.look()
            # No wait from here on: all figures are of one moment.
            return (
                Inspection(
                    asked.number,
                    len(keys),
                    publisher.epoch,
                    publisher.seq,
                    len(publisher.resident),
                    len(keys ^ publisher.resident),
                    publisher.num_pending,
                    publisher.is_quiet,
                    self._audits.num_audits,
                    self._audits.num_drifts,
                    lag_s=publisher.lag_s,
                ),
                keys,
            )


class Inspections:
    """The inspections that one connection asks for, one after another. Ends with the connection."""

    def __init__(self, channel: Channel, inspector: Inspector | None) -> None:
        self._channel = channel
        self._inspector = inspector
        self._task: asyncio.Task[None] | None = None

    def start(self, asked: Inspect) -> None:
        """Answer in the background. Raises `ProtocolError` while the answer before this one is under way."""
        if self._task is not None and not self._task.done():
            raise ProtocolError("the router asks for an inspection before it has heard the last one out")
        self._task = asyncio.create_task(self._answer(asked), name="kvroute-inspection")

    def cancel(self) -> None:
        """Answer no more."""
        if self._task is not None:
            self._task.cancel()

    async def _answer(self, asked: Inspect) -> None:
        try:
            found, keys = await self._inspect(asked)
            await self._channel.send(encode(found))
            blob = b"".join(keys)
            for start in range(0, len(blob), MAX_KEYS_PER_PART * KEY_SIZE_BYTES):
                part = blob[start : start + MAX_KEYS_PER_PART * KEY_SIZE_BYTES]
                await self._channel.send(encode(ResidentKeys(asked.number, part)))
        except ConnectionError:
            return
        except Exception:
            # Half an answer cannot be taken back, and whoever asks would wait for the rest.
            _logger.exception("an inspection could not be sent, its connection is closed")
            self._channel.close()

    async def _inspect(self, asked: Inspect) -> tuple[Inspection, Set[BlockKey]]:
        try:
            if self._inspector is None:
                raise Overloaded("this worker has nothing to be inspected")
            return await self._inspector.inspect(asked)
        except KvrouteError as error:
            return _failed(asked, fault_of(error)), frozenset()
        except Exception as error:
            # Whoever asks would wait in vain.
            _logger.exception("an inspection failed")
            return _failed(asked, Fault("engine_error", f"the inspection failed: {type(error).__name__}")), frozenset()


def _failed(asked: Inspect, fault: Fault) -> Inspection:
    return Inspection(asked.number, 0, Epoch(""), 0, 0, 0, 0, is_quiet=False, fault=fault)
