"""Servers of the store as processes that a test may freeze, kill and bring back: alone, secured, or as a cluster.

All listen on loopback only, keep their files in one folder, and die with the thread that starts them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisError

from shared.directory.embedded import _BECOME_BOUND
from shared.directory.redis import ACL_RULES

START_TIMEOUT_S = 30.0
_NUM_TRIES = 10
"""A port that was free may be taken by the time that a server binds it."""
NUM_SLOTS = 16384
ADMIN_PASSWORD = "admin-secret"
USER, USER_PASSWORD = "kvroute", "user-secret"


def find_redis_server() -> Path:
    """Debian's `redis-server`. Skips the test where there is none; continuous integration must have one."""
    found = shutil.which("redis-server")
    if found is None and os.environ.get("CI"):
        pytest.fail("redis-server is not on PATH; .ci/run installs it")
    if found is None:
        pytest.skip("redis-server is not on PATH: apt-get install redis-server")
    return Path(found)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


class Service(ABC):
    """Something that runs as long as its context lasts, and leaves nothing behind where it does not start."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerProcess(Service):
    """One `redis-server` on a TCP port of its own, the same over restarts, with a folder that outlives its death."""

    def __init__(self, *options: str, is_cluster_node: bool = False, is_tls: bool = False) -> None:
        self._options = options
        self._is_cluster_node = is_cluster_node
        self._is_tls = is_tls
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="kvroute-test-"))
        self.port = 0
        self.bus_port = 0
        """Where nodes of a cluster talk to each other."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it, or start it again after its death on what its folder holds. Idempotent."""
        thaw(self.pid)
        if self.pid is not None:
            return
        for _ in range(_NUM_TRIES):
            if self._start_once():
                return
        pytest.fail(f"redis-server does not start: {self._log()}")

    def kill(self) -> None:
        """As by a crash: nothing is saved."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        thaw(self.pid)

    def stop(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget_data(self) -> None:
        """Remove what it would load at its next start."""
        for name in ("dump.rdb", "appendonlydir"):
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def client(self) -> Redis:
        return Redis.from_url(self.url)

    def blocking_client(self) -> BlockingRedis:
        return BlockingRedis.from_url(self.url)

    def _start_once(self) -> bool:
        is_new = self.port == 0
        if is_new:
            self.port, self.bus_port = free_port(), free_port()
        options = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "", "--databases", "1"]
        options += ["--tls-port", str(self.port), "--port", "0"] if self._is_tls else ["--port", str(self.port)]
        if self._is_cluster_node:
            options += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)]
        command = [str(find_redis_server()), *options, *self._options]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BECOME_BOUND, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if "Ready to accept connections" in self._log():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.01)
                break
        if is_new:
            self.port = 0
        return False

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def thaw(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGCONT)


class SecuredServer(ServerProcess):
    """A password for the administrator, a user that has the directory's rights and no others, and TLS only."""

    def __init__(self, *, is_tls: bool = True) -> None:
        super().__init__("--requirepass", ADMIN_PASSWORD, is_tls=is_tls)
        self.certificate = self.folder / "server.crt"
        if is_tls:
            key = self.folder / "server.key"
            make_certificate(self.certificate, key)
            self._options += ("--tls-cert-file", str(self.certificate), "--tls-key-file", str(key))
            self._options += ("--tls-auth-clients", "no")

    @property
    def url(self) -> str:
        return self.url_as(USER, USER_PASSWORD)

    def url_as(self, user: str, password: str) -> str:
        address = f"{user}:{password}@127.0.0.1:{self.port}"
        return f"rediss://{address}?ssl_ca_certs={self.certificate}" if self._is_tls else f"redis://{address}"

    def start(self) -> None:
        super().start()
        with contextlib.closing(self.blocking_client()) as client:
            client.execute_command("ACL", "SETUSER", USER, "reset", "on", f">{USER_PASSWORD}", *ACL_RULES.split())

    def client(self) -> Redis:
        return Redis.from_url(self.url_as("default", ADMIN_PASSWORD))

    def blocking_client(self) -> BlockingRedis:
        return BlockingRedis.from_url(self.url_as("default", ADMIN_PASSWORD))


def make_certificate(certificate: Path, key: Path) -> None:
    """A certificate for 127.0.0.1 that is its own authority."""
    if shutil.which("openssl") is None and not os.environ.get("CI"):
        pytest.skip("openssl is not on PATH: apt-get install openssl")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)


NODE_TIMEOUT = ("--cluster-node-timeout", "2000")
"""In ms: what a test waits for when a node has died, and longer than a busy machine keeps one from its turn."""


class ClusterProcesses(Service):
    """A Redis Cluster of primaries without replicas, which goes on with the slots that it has when one is away."""

    def __init__(self, num_nodes: int = 3, *options: str) -> None:
        options = ("--cluster-require-full-coverage", "no", *NODE_TIMEOUT, *options)
        self.nodes = [ServerProcess(*options, is_cluster_node=True) for _ in range(num_nodes)]

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        """Start what does not run; join the nodes and deal out the slots the first time."""
        is_new = self.nodes[0].port == 0
        for node in self.nodes:
            node.start()
        if is_new:
            self._join()
        self.wait_until_ok()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def wait_until_ok(self) -> None:
        """Until every node knows all slots to be served and every other node to be there."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not all(_is_ok(node, len(self.nodes)) for node in self.nodes):
            if time.monotonic() > deadline_s:
                pytest.fail("the cluster does not become whole")
            time.sleep(0.02)

    def slots_of(self, node: ServerProcess) -> range:
        share = NUM_SLOTS // len(self.nodes)
        number = self.nodes.index(node)
        return range(number * share, NUM_SLOTS if number == len(self.nodes) - 1 else (number + 1) * share)

    def client(self) -> RedisCluster:
        return RedisCluster.from_url(self.url)

    def _join(self) -> None:
        first = self.nodes[0]
        for node in self.nodes:
            slots = self.slots_of(node)
            with contextlib.closing(node.blocking_client()) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
                if node is not first:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)


def _is_ok(node: ServerProcess, num_nodes: int) -> bool:
    with contextlib.suppress(RedisError), contextlib.closing(node.blocking_client()) as client:
        info = bytes(client.execute_command("CLUSTER", "INFO"))
        wanted = (b"cluster_state:ok", b"cluster_slots_ok:%d" % NUM_SLOTS, b"cluster_known_nodes:%d" % num_nodes)
        return all(text in info for text in wanted)
    return False


@pytest.fixture(scope="module")
def redis_server() -> Iterator[ServerProcess]:
    """Debian's Redis for one module's tests."""
    find_redis_server()
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def secured_server() -> Iterator[SecuredServer]:
    """A Redis with TLS and a user of few rights for one module's tests."""
    find_redis_server()
    with SecuredServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[ClusterProcesses]:
    """A Redis Cluster of three for one module's tests."""
    find_redis_server()
    with ClusterProcesses() as cluster:
        yield cluster
