"""A doctor's end of a connection to one worker: asks for one inspection and hears it out. Submits nothing."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from shared.errors import ProtocolError, WorkerLost
from shared.hashing import KEY_SIZE_BYTES
from shared.messages import MAX_KEYS_PER_PART, Ack, Frame, Inspect, Inspection, Refused, ResidentKeys, decode, encode
from shared.transport.base import Channel, Connect
from shared.transport.faults import error_of
from shared.transport.handshake import SESSION_BYTES, greet_worker
from shared.types import BlockKey, Instance, RouterId, WorkerId, WorkerStatus

MAX_INSPECTED_KEYS = 1 << 22
"""More blocks than any pool has; as keys they are 64 MiB."""
_GOODBYE = Refused("closed", "the inspection is over")
_NUMBER = 1


@dataclass(frozen=True, slots=True)
class Inspected:
    """One worker at one moment, in its own words."""

    report: Inspection
    keys: frozenset[BlockKey]
    """What its engine held."""
    status: WorkerStatus | None
    """Its load at about that time; `None` where it told none in between."""


async def inspect_worker(
    connect: Connect,
    worker: WorkerId,
    instance: Instance,
    router: RouterId,
    secret: bytes,
    *,
    is_repair: bool = False,
) -> Inspected:
    """One inspection of this life of a worker, over a connection of its own.

    Waits as long as it takes; put a deadline around it. Raises `OSError` where nobody listens, `WorkerLost` where the
    worker is another one or ends, the error that the worker tells, `ProtocolError`, and `AuthenticationFailed`.
    """
    channel = await connect()
    try:
        welcome = await greet_worker(channel, secret, router, secrets.token_bytes(SESSION_BYTES), 0)
        if (welcome.worker, welcome.instance) != (worker, instance):
            raise WorkerLost(f"{welcome.worker}, instance {welcome.instance}, answers in place of worker {worker}")
        await channel.send(encode(Inspect(_NUMBER, is_repair)))
        found = await _hear_out(channel)
        await channel.send(encode(_GOODBYE))
        return found
    finally:
        channel.close()


async def _hear_out(channel: Channel) -> Inspected:
    report: Inspection | None = None
    status: WorkerStatus | None = None
    keys: set[BlockKey] = set()
    num_missing = 0
    while report is None or num_missing:
        message = decode(await channel.receive())
        if isinstance(message, Frame):
            # Status goes on meanwhile; the acknowledgement is also our sign of life.
            status = message.status or status
            await channel.send(encode(Ack(message.number)))
        elif isinstance(message, Refused):
            raise WorkerLost(f"the worker ends: {message.message}")
        elif isinstance(message, Inspection) and report is None and message.number == _NUMBER:
            report, num_missing = message, message.num_resident
            if message.fault is not None:
                raise error_of(message.fault)
            if not 0 <= num_missing <= MAX_INSPECTED_KEYS:
                raise ProtocolError(f"an inspection announces {num_missing} keys; the limit is {MAX_INSPECTED_KEYS}")
        elif isinstance(message, ResidentKeys) and report is not None and message.number == _NUMBER:
            part = _split(message.keys)
            num_missing -= len(part)
            if num_missing < 0:
                raise ProtocolError(f"an inspection brings more than the {report.num_resident} keys it announced")
            keys.update(part)
        else:
            raise ProtocolError(f"a worker does not send {type(message).__name__} in an inspection")
    if len(keys) != report.num_resident:
        raise ProtocolError(f"an inspection brings a key twice: {len(keys)} of {report.num_resident} are different")
    return Inspected(report, frozenset(keys), status)


def _split(blob: bytes) -> list[BlockKey]:
    """The keys of one part. Raises `ProtocolError`."""
    if not blob or len(blob) % KEY_SIZE_BYTES or len(blob) > MAX_KEYS_PER_PART * KEY_SIZE_BYTES:
        raise ProtocolError(f"a part of an inspection has {len(blob)} bytes")
    return [BlockKey(blob[at : at + KEY_SIZE_BYTES]) for at in range(0, len(blob), KEY_SIZE_BYTES)]
