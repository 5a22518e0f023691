"""A whole fleet in one process and in virtual time: real routers, directory, mirrors, publishers and block pools.

The second composition root, beside `launch`. Only the model is missing, and the bytes on the wire: simulated engines
take the time that a latency profile says, and connections are calls that arrive late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from router.policies.base import Policy
from router.requests import GenerateRequest, RequestTrace, ServiceClass
from router.service import Router
from shared.directory.base import WorkerRecord
from shared.directory.mirrored import MirroredDirectory
from shared.directory.streamed import StreamedDirectory, StreamedFeed
from shared.errors import ConfigError, KvrouteError
from shared.hashing import TOKEN_SIZE_BYTES, parity_key
from shared.telemetry import Metrics
from shared.transport.base import OnChange, WorkerClient
from shared.types import CacheScheme, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerInfo
from shared.vtime import run_virtual
from worker.engines.base import BlockChange
from worker.engines.profiles import LatencyProfile, load_profile
from worker.engines.simulator import SimulatorEngine
from worker.engines.simulator_options import SimulatorOptions
from worker.publisher import Publisher
from worker.simulated_host import SimulatedClient, SimulatedHost

_WHOLE_ANSWER_TOKENS = 1 << 30
"""Nobody reads along: what comes between the first token and the end is told with the end."""
_UNSAID_TOKENS = 1 << 24
"""More than any context holds."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    """Since the beginning of the simulation; never before the arrival before it."""
    token_ids: bytes
    """Prompt, as `hashing.pack_tokens` gives it."""
    num_output_tokens: int
    """Length of the answer, which its engine alone knows."""
    max_tokens: int | None = None
    """Most tokens that the request asks for; None: as many as its context leaves."""
    tenant: str = ""
    priority: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The fleet to simulate. Limits that are not given are those of the profile."""

    num_workers: int
    profile: LatencyProfile | str
    """A profile, or the name or file of one."""
    num_routers: int = 1
    block_size_tokens: int = 64
    num_blocks: int | None = None
    """KV blocks of each worker."""
    max_num_seqs: int | None = None
    step_budget_tokens: int | None = None
    eviction: str = "adaptive"
    status_interval_s: float = 0.1
    """Time between two statuses of a worker that has nothing urgent to tell."""
    publish_interval_s: float = 0.01
    """How long a worker gathers changes of its blocks before it publishes them."""
    lag_s: float = 0.0
    """One way between a router and a worker, and from a worker's publisher to a router's mirror."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_routers", "status_interval_s", "publish_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not positive")
        if not 0.0 <= self.lag_s < float("inf"):
            raise ConfigError(f"lag_s: {self.lag_s} is not a time of 0 or more seconds")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one arrival. Times are seconds since the beginning of the simulation."""

    arrived_at_s: float
    bound_at_s: float | None
    """When the router sent it to the worker that answered."""
    first_token_at_s: float | None
    """When the router had the first token, as all times here are the router's."""
    finished_at_s: float | None
    worker: str | None
    cached_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_itl_s: float
    """Longest time between two tokens; 0.0 where there are fewer than two."""
    router: int
    error: str | None = None
    """Name of the error that ended it, `Overloaded` for instance."""


@dataclass(frozen=True, slots=True)
class FleetResult:
    """All that a simulation tells."""

    outcomes: Sequence[Outcome]
    """In order of arrivals."""
    makespan_s: float
    """From the beginning to the last end."""
    busy_s: Sequence[float]
    """Time in steps, by worker."""
    num_requests: Sequence[int]
    """Requests that each worker was sent."""
    num_refusals: int
    """Submits that workers did not take, since other routers' requests had come first."""
    num_block_events: int
    """Keys that workers told to have stored or removed."""
    num_evictions: int
    """Cached blocks that went to make room, on all workers."""
    num_preemptions: int
    most_held: int
    """Most requests that all routers held together, looked at once in `status_interval_s`."""


def simulate(spec: FleetSpec, policy: Policy, arrivals: Iterable[Arrival]) -> FleetResult:
    """Run `arrivals`, dealt to the routers in turn, to their end. Takes them one by one, as their time comes.

    Equal arguments give equal results. Raises `ConfigError` for a fleet that cannot be.
    """
    return run_virtual(_simulate(spec, policy, arrivals))


async def _simulate(spec: FleetSpec, policy: Policy, arrivals: Iterable[Arrival]) -> FleetResult:
    async with Simulation(spec).running(policy) as simulation:
        return await simulation.run(arrivals)


@dataclass(slots=True)
class _Worker:
    engine: SimulatorEngine
    host: SimulatedHost
    publisher: Publisher


@dataclass(slots=True)
class Simulation:
    """The parts of one simulation, and what has come of it so far."""

    spec: FleetSpec
    workers: dict[WorkerId, _Worker] = field(default_factory=dict)
    routers: list[Router] = field(default_factory=list)
    router_to_clients: list[dict[WorkerId, SimulatedClient]] = field(default_factory=list)
    index_to_outcome: dict[int, Outcome] = field(default_factory=dict)
    request_to_output_tokens: dict[RequestId, int] = field(default_factory=dict)
    """Lengths of the answers under way."""
    most_held: int = 0
    _watch: asyncio.TimerHandle = field(init=False)
    """Of the next look at what is held."""
    began_at_s: float = 0.0

    @contextlib.asynccontextmanager
    async def running(self, policy: Policy) -> AsyncIterator[Simulation]:
        spec = self.spec
        clock = asyncio.get_running_loop().time
        scheme = CacheScheme("simulated", spec.block_size_tokens)
        store = StreamedDirectory(scheme, clock)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(spec.num_workers):
                worker = await self._start_worker(number, store, scheme, clock)
                stack.push_async_callback(worker.engine.close)
                stack.push_async_callback(worker.publisher.stop)
                stack.callback(worker.host.close)
            # Routers of one lag see the same at any time, and each only reads: one mirror is the mirror of all.
            directory = MirroredDirectory(store, StreamedFeed(store, lag_s=spec.lag_s), wait_s=math.inf)
            directory.start()
            for number in range(spec.num_routers):
                router = self._make_router(number, policy, directory, scheme)
                await stack.enter_async_context(router)
            await directory.caught_up()
            yield self

    async def run(self, arrivals: Iterable[Arrival]) -> FleetResult:
        """Send everything at its time, and wait for the last end."""
        clock = asyncio.get_running_loop().time
        spec = self.spec
        # Statuses go out at the same distances from the beginning, however long the routers took to be ready.
        began_at_s = math.ceil(clock() / spec.status_interval_s) * spec.status_interval_s
        await asyncio.sleep(began_at_s - clock())
        self.began_at_s = began_at_s
        first = random.Random(f"{spec.seed}:routers").randrange(spec.num_routers)
        self._watch_held()
        try:
            async with asyncio.TaskGroup() as group:
                for index, arrival in enumerate(arrivals):
                    delay_s = began_at_s + arrival.at_s - clock()
                    if delay_s > 0.0:
                        await asyncio.sleep(delay_s)
                    group.create_task(self.carry(index, arrival, (first + index) % spec.num_routers))
        finally:
            self._watch.cancel()
        return self.result(clock() - began_at_s)

    async def carry(self, index: int, arrival: Arrival, number: int, worker: WorkerId | None = None) -> None:
        """One request, from its arrival to its end, on that worker if one is named."""
        request = RequestId(f"r{index}")
        self.request_to_output_tokens[request] = arrival.num_output_tokens
        trace = RequestTrace()
        num_output_tokens, error = 0, None
        asked = GenerateRequest(
            request,
            arrival.token_ids,
            Sampling(max_tokens=arrival.max_tokens or _UNSAID_TOKENS, temperature=0.0, ignore_eos=True),
            priority=arrival.priority,
            tenant=arrival.tenant,
            service_class=arrival.service_class,
            worker=worker,
        )
        try:
            async for generated in self.routers[number].generate(asked, trace):
                num_output_tokens += len(generated.token_ids)
        except KvrouteError as failure:
            error = type(failure).__name__
        del self.request_to_output_tokens[request]
        client = None if trace.worker is None else self.router_to_clients[number].get(trace.worker)
        self.index_to_outcome[index] = Outcome(
            arrived_at_s=trace.received_at_s - self.began_at_s,
            bound_at_s=self._since_begin(trace.bound_at_s),
            first_token_at_s=self._since_begin(trace.first_token_at_s),
            finished_at_s=None if error else self._since_begin(trace.finished_at_s),
            worker=trace.worker,
            cached_tokens=trace.cached_tokens or 0,
            num_prompt_tokens=len(arrival.token_ids) // TOKEN_SIZE_BYTES,
            num_output_tokens=num_output_tokens,
            max_itl_s=client.request_to_longest_gap_s.pop(request, 0.0) if client is not None else 0.0,
            router=number,
            error=error,
        )

    def _since_begin(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self.began_at_s

    def _watch_held(self) -> None:
        self.most_held = max(self.most_held, sum(len(router.queue) for router in self.routers))
        self._watch = asyncio.get_running_loop().call_later(self.spec.status_interval_s, self._watch_held)

    def result(self, makespan_s: float) -> FleetResult:
        """What has come of it, in order of numbers."""
        workers = self.workers.values()
        return FleetResult(
            outcomes=[self.index_to_outcome[index] for index in range(len(self.index_to_outcome))],
            makespan_s=makespan_s,
            busy_s=[worker.engine.busy_s for worker in workers],
            num_requests=[worker.host.num_submitted for worker in workers],
            num_refusals=sum(worker.host.num_outpaced for worker in workers),
            num_block_events=sum(worker.publisher.num_block_events for worker in workers),
            num_evictions=sum(sum(worker.engine.pool.statistics().num_evicted) for worker in workers),
            num_preemptions=sum(worker.engine.num_preemptions for worker in workers),
            most_held=self.most_held,
        )

    # Parts.

    async def _start_worker(self, number: int, store: StreamedDirectory, scheme: CacheScheme, clock: object) -> _Worker:
        spec = self.spec
        worker, instance = WorkerId(f"w{number}"), Instance(f"{number + 1:032x}")
        rng = random.Random(f"{spec.seed}:{worker}")

        def on_blocks(change: BlockChange) -> None:
            publisher.on_blocks(change)

        engine = SimulatorEngine(_engine_options(spec, scheme), on_blocks, _never_dies)
        engine_info = await engine.start()
        info = WorkerInfo(
            worker=worker,
            instance=instance,
            address="unix:/nowhere",
            scheme=scheme,
            parity_key=parity_key(scheme, b""),
            num_blocks=engine_info.num_blocks,
            max_num_seqs=engine_info.max_num_seqs,
            max_model_len_tokens=engine_info.max_model_len_tokens,
            engine=engine_info.name,
            eviction=engine_info.eviction,
        )
        publisher = Publisher(store, info, rng=rng, tick_s=spec.publish_interval_s)
        host = SimulatedHost(
            engine,
            engine_info,
            worker=worker,
            instance=instance,
            rng=rng,
            lag_s=spec.lag_s,
            status_interval_s=spec.status_interval_s,
            count_resident_blocks=lambda: len(publisher.resident),
            num_answer_tokens=self.request_to_output_tokens.__getitem__,
        )
        await publisher.start()
        self.workers[worker] = _Worker(engine, host, publisher)
        return self.workers[worker]

    def _make_router(self, number: int, policy: Policy, directory: MirroredDirectory, scheme: CacheScheme) -> Router:
        clients: dict[WorkerId, SimulatedClient] = {}

        def connect(record: WorkerRecord, on_change: OnChange) -> WorkerClient:
            client = self.workers[record.info.worker].host.connect(on_change)
            clients[record.info.worker] = client
            return client

        router = Router(
            RouterId(f"router-{number}"),
            directory,
            connect,
            policy,
            scheme=scheme,
            parity_key=parity_key(scheme, b""),
            metrics=Metrics(),
            rng=random.Random(f"{self.spec.seed}:router-{number}"),
        )
        self.routers.append(router)
        self.router_to_clients.append(clients)
        return router


def _engine_options(spec: FleetSpec, scheme: CacheScheme) -> SimulatorOptions:
    profile = load_profile(spec.profile) if isinstance(spec.profile, str) else spec.profile
    num_blocks = spec.num_blocks or (profile.kv_capacity_tokens or 0) // spec.block_size_tokens
    if not num_blocks:
        raise ConfigError(f"num_blocks: needed, since profile {profile.name} does not tell the cache's size")
    return SimulatorOptions(
        profile,
        scheme,
        num_blocks=num_blocks,
        max_model_len_tokens=num_blocks * spec.block_size_tokens,
        max_num_seqs=spec.max_num_seqs,
        step_budget_tokens=spec.step_budget_tokens,
        eviction=spec.eviction,
        is_warm=True,
        tokens_per_delta=_WHOLE_ANSWER_TOKENS,
    )


def _never_dies(reason: str) -> None:
    raise AssertionError(reason)
