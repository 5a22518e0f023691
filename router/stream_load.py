"""Many clients that stream at once, as a process of their own; tells how late what they read was."""

from __future__ import annotations

import asyncio
from array import array

import numpy as np

from router.http_load import answer_parent

_RAMP_S = 2.0
"""In which the streams begin, one after the other: steady streams are measured, and no stampede."""


class _Stream(asyncio.Protocol):
    """One request and when each event of its answer came."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._tail = b""
        self.event_at_s = array("d")
        self.is_whole = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(self._body), self._body)
        )

    def data_received(self, data: bytes) -> None:
        # Each piece of text comes in one event; several at once came late, but for the last of them.
        num_events = data.count(b'data: {"id"')
        if num_events:
            self.event_at_s.extend([self._loop.time()] * num_events)
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        self.is_whole = b"data: [DONE]" in self._tail
        self.ended.set_result(None)


async def run(port: int, bodies: list[bytes], step_s: float) -> dict[str, float]:
    """Stream all answers at once."""
    loop = asyncio.get_running_loop()
    streams: list[_Stream] = []
    began_at_s = loop.time()
    for number, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, began_at_s + _RAMP_S * number / len(bodies) - loop.time()))
        _, stream = await loop.create_connection(lambda body=body: _Stream(body), "127.0.0.1", port)  # type: ignore[misc]
        streams.append(stream)
    for stream in streams:
        await stream.ended
    gaps_s = [np.diff(np.array(stream.event_at_s)) for stream in streams if len(stream.event_at_s) > 1]
    late_s = np.maximum(0.0, np.concatenate(gaps_s or [np.zeros(1)]) - step_s)
    tokens_per_s = [1.0 / max(1e-9, float(gaps.mean())) for gaps in gaps_s] or [0.0]
    return {
        "wall_s": loop.time() - began_at_s,
        "num_failed": sum(not stream.is_whole for stream in streams),
        "num_chunks": sum(len(stream.event_at_s) for stream in streams),
        "chunk_late_ms_p50": 1e3 * float(np.percentile(late_s, 50)),
        "chunk_late_ms_p99": 1e3 * float(np.percentile(late_s, 99)),
        "chunk_late_ms_max": 1e3 * float(late_s.max()),
        "tokens_per_s_per_stream_p50": float(np.median(tokens_per_s)),
        "tokens_per_s_per_stream_min": min(tokens_per_s),
    }


if __name__ == "__main__":
    answer_parent("step_s", float, run)
