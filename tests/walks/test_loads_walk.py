"""Random statuses, bookings, first tokens, ends and comings and goings: a fleet's columns never drift from the sums."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import cast

import numpy as np
import pytest

from router.bookings import Booking
from router.fleet import Fleet
from shared.directory.base import Directory, RouterPlace, WorkerRecord
from shared.transport.base import OnChange, WorkerClient
from shared.types import CacheScheme, Epoch, Instance, RequestId, RouterId, WorkerId, WorkerInfo, WorkerStatus

SCHEME = CacheScheme("walk", 16)
NUM_STEPS = 400


class _Client:
    """A worker's connection as a test turns it."""

    def __init__(self, info: WorkerInfo, clock: _Clock, on_change: OnChange) -> None:
        self.worker, self.instance = info.worker, info.instance
        self.status: WorkerStatus | None = None
        self.is_connected, self.is_lost = True, False
        self.num_silences = 0
        self.acknowledged_submit = self.last_submit = 0
        self.round_trip_s = 0.0
        self.status_at_s = 0.0
        self.on_change = on_change
        self._clock = clock

    @property
    def status_age_s(self) -> float:
        return self._clock() - self.status_at_s

    async def connect(self) -> None:
        pass

    async def close(self) -> None:
        self.is_connected, self.is_lost = False, True


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class _Directory:
    worker_to_record: dict[WorkerId, WorkerRecord] = field(default_factory=dict)
    place: RouterPlace = field(default_factory=RouterPlace)

    async def workers(self) -> list[WorkerRecord]:
        return [record for _, record in sorted(self.worker_to_record.items())]

    async def announce_router(self, router: RouterId, lease_s: float) -> RouterPlace:
        return self.place


class _Walk:
    """A fleet, and everything that was done to it as plain lists."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = _Clock()
        self.directory = _Directory()
        self.worker_to_client: dict[WorkerId, _Client] = {}
        self.live: list[Booking] = []
        self.num_booked = 0
        self.worker_to_last_booking: dict[WorkerId, int] = {}
        self.num_lives = 0
        self.fleet = Fleet(
            cast(Directory, self.directory),
            self._connect,
            parity_key=b"parity",
            clock=self.clock,
            on_change=lambda: None,
            on_leave=lambda worker: None,
            router=RouterId("r"),
        )

    def _connect(self, record: WorkerRecord, on_change: OnChange) -> WorkerClient:
        client = self.worker_to_client[record.info.worker] = _Client(record.info, self.clock, on_change)
        self.worker_to_last_booking[record.info.worker] = self.num_booked
        return cast(WorkerClient, client)

    async def run(self) -> None:
        actions = [self._tell] * 8 + [self._book] * 8 + [self._submit] * 6 + [self._start] * 4 + [self._end] * 5
        actions += [self._pass_time] * 4 + [self._cut, self._mend, self._register, self._withdraw, self._move]
        for _ in range(3):
            await self._register()
        for _ in range(NUM_STEPS):
            await self.rng.choice(actions)()
            self._check()
        for booking in list(self.live):
            self.fleet.release(booking)
        assert self.fleet.num_bookings == 0

    # Actions.

    async def _tell(self) -> None:
        """A frame with a status; it may be that it tells of some submits only."""
        for client in self._some_client():
            client.status = WorkerStatus(
                num_running=self.rng.randrange(9),
                num_waiting=self.rng.randrange(9),
                queued_prefill_tokens=self.rng.randrange(9000),
                kv_used_blocks=self.rng.randrange(100),
                kv_total_blocks=100,
                prefill_s_per_token=self.rng.choice((0.0, self.rng.uniform(1e-5, 1e-3))),
                step_s=self.rng.random(),
                decode_s_per_seq=self.rng.random(),
                step_budget_tokens=self.rng.randrange(4096),
                is_draining=self.rng.random() < 0.05,
                num_resident_blocks=self.rng.randrange(100),
            )
            client.status_at_s = self.clock.now_s
            client.acknowledged_submit = self.rng.randint(client.acknowledged_submit, client.last_submit)
            client.on_change()

    async def _book(self) -> None:
        workers = self.fleet.loads().workers
        if workers:
            worker = self.rng.choice(workers)
            self.num_booked += 1
            self.worker_to_last_booking[worker] = self.num_booked
            self.live.append(
                self.fleet.book(
                    worker,
                    RequestId(f"q{self.num_booked}"),
                    uncached_tokens=self.rng.randrange(4096),
                    demand_blocks=self.rng.randrange(40),
                )
            )

    async def _submit(self) -> None:
        unsent = [booking for booking in self.live if booking.submit is None]
        if unsent:
            booking = self.rng.choice(unsent)
            client = cast(_Client, booking.client)
            client.last_submit += 1
            booking.submit = client.last_submit

    async def _start(self) -> None:
        if self.live:
            self.fleet.note_first_token(self.rng.choice(self.live))

    async def _end(self) -> None:
        if self.live:
            booking = self.live.pop(self.rng.randrange(len(self.live)))
            self.fleet.release(booking)
            if self.rng.random() < 0.1:
                self.fleet.note_first_token(booking)
                self.fleet.release(booking)

    async def _pass_time(self) -> None:
        self.clock.now_s += self.rng.random()

    async def _cut(self) -> None:
        for client in self._some_client():
            client.is_connected = False
            client.on_change()

    async def _mend(self) -> None:
        for client in self.worker_to_client.values():
            client.is_connected = not client.is_lost
            client.round_trip_s = self.rng.random()
            client.on_change()

    async def _register(self) -> None:
        """A worker comes, or another life of it."""
        self.num_lives += 1
        info = WorkerInfo(
            WorkerId(f"w{self.rng.randrange(6)}"),
            Instance(f"{self.num_lives:032x}"),
            "unix:/none",
            SCHEME,
            self.rng.choice((b"parity", b"other")),
            num_blocks=100,
            max_num_seqs=8,
            max_model_len_tokens=4096,
            engine="none",
            eviction="lru",
        )
        self.directory.worker_to_record[info.worker] = WorkerRecord(info, Epoch(info.instance), 0)
        await self.fleet.refresh()

    async def _withdraw(self) -> None:
        for client in self._some_client():
            if self.rng.random() < 0.5:
                client.is_lost, client.is_connected = True, False
                self.directory.worker_to_record.pop(client.worker, None)
            else:
                record = self.directory.worker_to_record[client.worker]
                self.directory.worker_to_record[client.worker] = replace(record, is_draining=not record.is_draining)
            await self.fleet.refresh()
            for worker in set(self.worker_to_client) - set(self.fleet.worker_to_instance):
                del self.worker_to_client[worker]

    async def _move(self) -> None:
        num_routers = self.rng.randint(1, 4)
        self.directory.place = RouterPlace(self.rng.randrange(num_routers), num_routers)
        await self.fleet.refresh()

    def _some_client(self) -> list[_Client]:
        clients = [self.worker_to_client[worker] for worker in sorted(self.worker_to_client)]
        return [self.rng.choice(clients)] if clients else []

    # What the loads must be, by adding up.

    def _check(self) -> None:
        loads = self.fleet.loads()
        ready = [client for _, client in sorted(self.worker_to_client.items()) if self._is_ready(client)]
        assert loads.workers == tuple(client.worker for client in ready)
        assert loads.instances == tuple(client.instance for client in ready)
        place, names = self.directory.place, sorted(self.directory.worker_to_record)
        homes = {name for index, name in enumerate(names) if index % place.num_routers == place.rank}
        assert loads.is_home.tolist() == [client.worker in homes for client in ready]
        speeds = [client.status.prefill_s_per_token for client in ready if client.status is not None]
        measured = [speed for speed in speeds if speed > 0.0]
        typical = median_low(measured) if measured else 1e-4
        for column, client in enumerate(ready):
            self._check_column({name: getattr(loads, name)[column] for name in _COLUMNS}, client, typical, len(ready))

    def _check_column(self, column: dict[str, float], client: _Client, typical: float, num_ready: int) -> None:
        own = [booking for booking in self.live if booking.client is client]
        unseen = [one for one in own if one.submit is None or one.submit > client.acknowledged_submit]
        status = client.status or _IDLE
        speed = status.prefill_s_per_token or typical
        if self.worker_to_last_booking[client.worker] < self.num_booked - 32 * num_ready:
            speed = min(speed, typical)
        pending_blocks = sum(one.demand_blocks for one in own if not one.has_first_token)
        expected = {
            "num_requests": status.num_running + status.num_waiting + len(unseen),
            "queued_prefill_tokens": status.queued_prefill_tokens
            + sum(one.uncached_tokens for one in unseen if not one.has_first_token),
            "num_waiting": status.num_waiting + len(unseen),
            "kv_used_blocks": min(100, status.kv_used_blocks + pending_blocks),
            "kv_demand_blocks": status.kv_used_blocks + pending_blocks,
            "num_resident_blocks": status.num_resident_blocks,
            "step_budget_tokens": status.step_budget_tokens,
            "step_s": status.step_s,
            "decode_s_per_seq": status.decode_s_per_seq,
            "round_trip_s": client.round_trip_s,
            "status_age_s": self.clock.now_s - client.status_at_s if client.status is not None else 0.0,
            "prefill_s_per_token": speed,
        }
        expected |= {
            "queued_prefill_s": expected["queued_prefill_tokens"] * speed,
            "step_budget_s": status.step_s + status.step_budget_tokens * speed,
            "decode_s": expected["num_requests"] * status.decode_s_per_seq,
            "fullness": max(expected["kv_used_blocks"] / 100, expected["num_requests"] / 8),
        }
        assert column == pytest.approx(expected, abs=1e-9)
        assert min(expected.values()) >= 0

    def _is_ready(self, client: _Client) -> bool:
        record = self.directory.worker_to_record.get(client.worker)
        is_draining = (record is not None and record.is_draining) or (
            client.status is not None and client.status.is_draining
        )
        return client.is_connected and not is_draining


_IDLE = WorkerStatus(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0)
_COLUMNS = (
    *("num_requests", "queued_prefill_tokens", "kv_used_blocks", "step_budget_tokens", "step_s", "decode_s_per_seq"),
    *("num_waiting", "kv_demand_blocks", "num_resident_blocks"),
    *("round_trip_s", "status_age_s", "prefill_s_per_token"),
    *("queued_prefill_s", "step_budget_s", "decode_s", "fullness"),
)


@pytest.mark.parametrize("seed", range(30))
async def test_columns_are_what_adding_up_gives(seed: int) -> None:
    await _Walk(seed).run()


async def test_a_snapshot_once_given_never_changes() -> None:
    walk = _Walk(0)
    for _ in range(3):
        await walk._register()
    before = walk.fleet.loads()
    copies = {name: getattr(before, name).copy() for name in _COLUMNS}
    for _ in range(50):
        await walk._tell()
        await walk._book()
        walk.clock.now_s += 1.0
        walk.fleet.loads()
    assert all(np.array_equal(getattr(before, name), copies[name]) for name in _COLUMNS)
    with pytest.raises(ValueError, match="read-only"):
        before.num_requests[0] = 1
