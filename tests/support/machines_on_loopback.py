"""Machines for Ray's cluster launcher: addresses of loopback behind an sshd of our own, each with its own home and Ray.

A machine is a home folder and an address. What is started on it, by ssh or by something that ssh started, carries its
name in the environment; so a `ray stop` there ends that machine's Ray only, as it does on real machines.
"""

from __future__ import annotations

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.commands import tagged_environment
from tests.support.servers import free_port

ROOT = Path(__file__).parents[2]
MACHINE_VARIABLE = "KVROUTE_TEST_MACHINE"
_LISTENS_S = 30.0
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}

_RAY = """#!/bin/sh
# The `ray` of one machine: on a host that is several machines, `ray stop` must not end the others' Ray.
if [ "$1" = stop ]; then exec {python} -m tests.support.machines_on_loopback; fi
exec {ray} "$@"
"""

_SSH = """#!/bin/sh
# Ray's launcher and autoscaler know port 22 only, and ssh itself knows no home but that of the password file.
exec {ssh} -p {port} -i {key} "$@"
"""

_BASHRC = """export PATH={home}/bin:{bin}:$PATH PYTHONPATH={root}
cd {home}
"""
"""In place of an installation on each of them."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One address and its home folder."""

    address: str
    home: Path

    def processes(self) -> list[psutil.Process]:
        """All that lives on it, but for what the caller came through."""
        return _processes_on(self.address)

    def kill(self) -> int:
        """As if its power failed: how many processes it had."""
        processes = self.processes()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10.0)
        return len(processes)


class LoopbackMachines:
    """Several machines and the sshd that leads to them, until the end of a `with` block."""

    def __init__(self, num_machines: int, *, tag: str, rng: random.Random) -> None:
        # Sockets of Ray lie below a machine's home, and their paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="kvm-", dir="/tmp"))
        # Ray binds some ports that cannot be chosen: nobody else's machines have these addresses.
        network = f"127.{rng.randrange(1, 255)}.{rng.randrange(1, 255)}"
        self.machines = [Machine(f"{network}.{2 + n}", self.folder / f"m{n}") for n in range(num_machines)]
        self.port = free_port()
        self.key = self.folder / "key"
        self._tag = tag
        self._sshd: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        """Of who launches a cluster on them, from a computer of its own."""
        home = self.folder / "launcher"
        self._furnish(home, self.key)
        path = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        return tagged_environment(self._tag, HOME=str(home), RAY_TMPDIR=str(home), PATH=path, **_QUIET)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.machines:
            machine.kill()
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        for key in (self.key, self.folder / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        lines = [
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.key}.pub",
            *(f"ListenAddress {machine.address}:{self.port}" for machine in self.machines),
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 100",
            "MaxSessions 100",
        ]
        for machine in self.machines:
            # Ray's launcher brings its key here.
            self._furnish(machine.home, machine.home / "ray_bootstrap_key.pem")
            variables = {
                "HOME": machine.home,
                "RAY_TMPDIR": machine.home,
                "TMPDIR": machine.home,
                MACHINE_VARIABLE: machine.address,
                "KVROUTE_TEST_TAG": self._tag,
                **_QUIET,
            }
            # The first value of a keyword counts, so that all stand in one line.
            setting = " ".join(f"{name}={value}" for name, value in variables.items())
            lines += [f"Match LocalAddress {machine.address}", f"  SetEnv {setting}"]
        config = self.folder / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own, for the part without rights
        log = (self.folder / "sshd.log").open("wb")
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        with log:
            self._sshd = subprocess.Popen([sshd, "-D", "-e", "-f", config], stdout=log, stderr=log)
        self._wait_listens()

    def _furnish(self, home: Path, key: Path) -> None:
        """Commands that stand before the host's own on the PATH of a machine."""
        folder, bin_dir = home / "bin", Path(sys.executable).parent
        folder.mkdir(parents=True)
        commands = {
            "ssh": _SSH.format(ssh=shutil.which("ssh"), port=self.port, key=key),
            "ray": _RAY.format(python=sys.executable, ray=bin_dir / "ray"),
        }
        for name, text in commands.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (home / ".bashrc").write_text(_BASHRC.format(home=home, bin=bin_dir, root=ROOT))

    def _wait_listens(self) -> None:
        assert self._sshd is not None
        deadline_s = time.monotonic() + _LISTENS_S
        while self._sshd.poll() is None and time.monotonic() < deadline_s:
            try:
                for machine in self.machines:
                    socket.create_connection((machine.address, self.port), timeout=1.0).close()
                return
            except OSError:
                time.sleep(0.05)
        raise AssertionError((self.folder / "sshd.log").read_text())


def ssh_user() -> str:
    """Who this sshd lets in: an sshd that is not root's lets in nobody but its own user."""
    return getpass.getuser()


def _processes_on(address: str) -> list[psutil.Process]:
    own = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MACHINE_VARIABLE) == address:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _stop_ray(words: Sequence[str]) -> None:
    """End what on this machine has one of the words in its command line."""
    for process in _processes_on(os.environ[MACHINE_VARIABLE]):
        try:
            if any(word in part for part in process.cmdline() for word in words):
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue


if __name__ == "__main__":
    _stop_ray(("raylet", "gcs_server", "/ray/", "ray::"))
