"""Ray: placing workers, watching them start, and ending them. Ray carries no tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.services import get_ray_address_from_environment
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from router.placement import Node, WorkerResources, describe_room, num_workers_that_fit
from shared.environment import inherited
from shared.errors import ConfigError, EngineError, KvrouteError

logger = logging.getLogger(__name__)

NAMESPACE = "kvroute"
_SYSTEM_CONFIG = {"process_group_cleanup_enabled": True}
"""Of a Ray that is started here: with a worker that is killed its engine ends, which else would keep its memory."""
_LISTENS_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 100 << 20
"""Ray's own minimum is 75 MiB; no object of ours goes through its store."""


def connect_ray(address: str, *, num_local_cpus: int, environment: Mapping[str, str]) -> str:
    """Join the Ray cluster at `address`, or start a local one that ends with this process.

    Workers that are started from here get the environment. Gives the address, found where it was `auto`.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        address = _find_running() if address == "auto" else address
        _check_listens(address)
        options["address"] = address
    else:
        num_cpus = max(num_local_cpus, os.cpu_count() or 1)
        options |= {
            "address": "local",
            "include_dashboard": False,
            "num_cpus": num_cpus,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_system_config": _SYSTEM_CONFIG,
        }
    if address and environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # Workers inherit it from a Ray of their own, which so has processes ready for them: one that is asked of each
        # worker means another process, and seconds until Ray's agent has agreed to it.
        with inherited(environment if not address else {}):
            ray.init(**options)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"--ray-address: cannot join Ray at {address!r}" if address else "Ray does not start on this host"
        raise ConfigError(f"{what}: {error}") from None
    finally:
        # Ray puts handlers of its own in place, which end the process on the spot.
        signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return address


def _find_running() -> str:
    """Where the Ray is that `auto` means: that of `RAY_ADDRESS`, or the latest that was started on this host."""
    try:
        address = get_ray_address_from_environment("auto", None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--ray-address auto: no Ray runs on this host; start one with `ray start --head`, name one as HOST:PORT, "
            f"or leave the flag out, and `kvroute up` starts its own ({error})"
        ) from None
    assert isinstance(address, str)
    return address


def _check_listens(address: str) -> None:
    """Say within seconds that nobody listens at `host:port`; Ray itself takes minutes. Other forms are left to Ray."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENS_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"--ray-address: cannot join Ray at {address!r}: {error}") from None


def leave_ray() -> None:
    """Leave the cluster; ends it if it is the local one of `connect_ray`. Idempotent."""
    ray.shutdown()


def own_address() -> str:
    """The address under which other nodes reach this one."""
    address: str = ray.util.get_node_ip_address()
    return address


def nodes() -> list[Node]:
    """The nodes that live, with what they have and what of it is free."""
    free = available_resources_per_node()
    return [
        Node(node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_resources(num_workers: int, resources: WorkerResources) -> None:
    """Fail at once where Ray would wait for ever.

    Raises:
        ConfigError: the cluster has less than the workers ask for; names what they need and what each node has.
    """
    if num_workers_that_fit(resources, nodes()) < num_workers:
        raise ConfigError(f"too many workers: {describe_resources(num_workers, resources)}")


def missing_room(num_workers: int, resources: WorkerResources) -> str | None:
    """What the nodes have, where that is not enough for so many workers more; `None` where it is."""
    if num_workers_that_fit(resources, nodes(), is_free=True) >= num_workers:
        return None
    return describe_resources(num_workers, resources)


def describe_resources(num_workers: int, resources: WorkerResources) -> str:
    """What the workers ask for, and what the cluster has."""
    return describe_room(num_workers, resources, nodes())


def start_actor(
    actor_class: type, name: str, resources: WorkerResources, *, is_detached: bool, **arguments: Any
) -> Any:
    """Create a worker's actor; Ray starts it again when its process dies, and elsewhere when its node does.

    It lives in a placement group of its own: one bundle, so that the GPUs of a worker are on one node. Groups of
    different workers spread, since Ray gives each the node with the most room. While an actor starts again, its place
    is nobody else's.
    """
    lifetime = "detached" if is_detached else None
    free_place(name)
    group = placement_group([resources.kind_to_amount], strategy="STRICT_PACK", name=name, lifetime=lifetime)
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": resources.num_cpus,
        "num_gpus": resources.num_gpus,
        "max_restarts": -1,
        # `ready` waits for the engine while `stop` must still get through.
        "max_concurrency": 4,
        "lifetime": lifetime,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
    }
    return ray.remote(actor_class).options(**options).remote(**arguments)


async def call(method: Any, *arguments: Any, timeout_s: float, what: str) -> Any:
    """Call an actor's method.

    Raises what the method raises on purpose, and `EngineError` that names `what` when it fails otherwise or does not
    answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answer: Awaitable[Any] = method.remote(*arguments)
            return await answer
    except TimeoutError:
        raise EngineError(f"{what}: no answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, KvrouteError):
            raise error.cause from None
        raise EngineError(f"{what}: {error.cause}") from error
    except RayError as error:
        raise EngineError(f"{what}: {error}") from error


def kill_actor(actor: Any, name: str) -> None:
    """End an actor for good, and give its place back."""
    ray.kill(actor, no_restart=True)
    free_place(name)


def free_place(name: str) -> None:
    """Give an actor's place back, which one that was killed from outside has left behind. Idempotent."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return  # there is none
    remove_placement_group(group)


def find_actor(name: str) -> Any | None:
    """The detached actor of that name; `None` where there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def start_head(environment: Mapping[str, str], log_path: Path, *, num_cpus: int) -> tuple[psutil.Popen, str]:
    """Start a Ray head of our own that outlives this process, as do its workers in the environment that it gets. Gives
    the process and its address.

    `--block` keeps one process in front that takes Ray's daemons down with it, so that nobody has to call `ray stop`,
    which ends every Ray on the host.
    """
    port = _free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={_free_port()}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={num_cpus}"]
    command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--system-config={json.dumps(_SYSTEM_CONFIG)}"]
    with log_path.open("wb") as log:
        process = psutil.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, f"127.0.0.1:{port}"


async def wait_for_head(process: psutil.Popen, address: str, log_path: Path, *, timeout_s: float) -> None:
    """Wait until the head takes connections. Raises `EngineError` with the end of its log."""
    host, port = address.split(":")
    try:
        async with asyncio.timeout(timeout_s):
            while process.poll() is None:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
                    return
                except OSError:
                    await asyncio.sleep(0.1)
    except TimeoutError:
        pass
    last_words = await asyncio.to_thread(log_path.read_text, errors="replace")
    raise EngineError(f"Ray did not start at {address}; the end of {log_path}:\n{last_words[-2000:]}")


def _free_port() -> int:
    """A port that nobody listens on now; Ray's start fails loudly where somebody takes it in between."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
