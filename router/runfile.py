"""What `kvroute up` has started: one file that every other command reads, and the only list that `down` goes by.

The file is written before anything is started. Every process started under it carries the file's marker in its
environment, so that a start that was cut short can still be undone completely.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared.errors import ConfigError

MARKER_VARIABLE = "_KVROUTE_MARKER"
"""Environment variable that names the run a process belongs to. Not a setting: it has another prefix."""
_FILE_NAME = "kvroute.json"
_LOCK_NAME = "lock"
_GRACE_S = 3.0
"""How long processes may take to end by themselves before they are killed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One `kvroute up`."""

    marker: str
    secret: str
    """Hex of the secret that routers and workers share."""
    settings: dict[str, Any]
    """What `Settings` was made of, as far as it concerns workers."""
    redis_url: str = ""
    """Empty until the store is up."""
    ray_address: str = ""
    workers: tuple[str, ...] = field(default=())
    is_ready: bool = False
    folder: str = ""
    """Where the workers of this host have sockets and logs; empty where their Ray is somebody else's."""
    ray_token: str = ""
    """What a Ray that was started here asks of its clients; empty where it asks nothing, or is somebody else's."""
    python_path: str = ""
    """Where workers in a Ray that was started here find modules; empty where their Ray is somebody else's."""
    worker_to_build: dict[str, str] = field(default_factory=dict)
    """What each worker was made of, as `changes.build_of` tells; of one that is not in here nobody knows."""

    @property
    def worker_tag(self) -> str:
        """What the names of this run's workers end with."""
        return worker_tag(self.marker, self.settings)

    @property
    def has_own_ray(self) -> bool:
        """Whether the Ray that the workers live in was started here, and ends with the run."""
        return not self.settings.get("ray_address")

    @property
    def has_own_store(self) -> bool:
        """Whether the store was started here, and ends with the run."""
        return bool(self.redis_url) and not self.settings.get("redis_url")

    @property
    def is_alive(self) -> bool:
        """Whether anything of the run lives, as far as this host can tell; workers elsewhere tell by their leases."""
        return not self.has_own_ray or bool(processes_of(self.marker))


def new_marker() -> str:
    """A marker for the processes of one run."""
    return secrets.token_hex(16)


def worker_tag(marker: str, settings: Mapping[str, Any]) -> str:
    """What tells one run's workers from others' on a store or a Ray that both may use; empty where there are none."""
    return f"-{marker[:6]}" if settings.get("redis_url") or settings.get("ray_address") else ""


def default_run_dir() -> Path:
    """The user's own run folder, or one in the temporary folder that nobody else can read."""
    base = Path(f"/run/user/{os.getuid()}")
    if base.is_dir() and os.access(base, os.W_OK):
        return base / "kvroute"
    return Path(tempfile.gettempdir()) / f"kvroute-{os.getuid()}"


@contextlib.contextmanager
def changing(run_dir: Path) -> Iterator[None]:
    """Be the only one that starts or drains workers of this folder, for as long as this lasts or the process lives.

    Raises:
        ConfigError: somebody else is, or the folder is not ours or cannot be written.
    """
    try:
        _make_own_folder(run_dir)
        descriptor = os.open(run_dir / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write {run_dir}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another `kvroute up`, `scale` or `drain` is at work in {run_dir}") from None
        yield
    finally:
        os.close(descriptor)


def write_run(run_dir: Path, run: Run) -> None:
    """Write the run file, readable by its owner only, whole or not at all.

    Raises:
        ConfigError: the folder is not ours or cannot be written.
    """
    try:
        _make_own_folder(run_dir)
        descriptor, name = tempfile.mkstemp(dir=run_dir)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(run), file)
        Path(name).replace(run_dir / _FILE_NAME)
    except OSError as error:
        raise ConfigError(f"--run-dir: cannot write {run_dir}: {error.strerror}") from None


def update_run(run_dir: Path, run: Run) -> None:
    """Write the file of a run that stands. Raises `ConfigError` where it was ended meanwhile."""
    standing = read_run(run_dir)
    if standing is None or standing.marker != run.marker:
        raise ConfigError("the deployment was ended meanwhile")
    write_run(run_dir, run)


def alive(run_dir: Path) -> Run | None:
    """The deployment that is ready and runs; `None` where there is none."""
    run = read_run(run_dir)
    return run if run is not None and run.is_ready and run.is_alive else None


def running(run_dir: Path) -> Run:
    """The deployment that stands in the folder. Raises `ConfigError` where none does, or it has died."""
    run = read_run(run_dir)
    if run is None or not run.is_ready:
        raise ConfigError("nothing is running; `kvroute up` starts workers")
    if not run.is_alive:
        raise ConfigError("`kvroute up` has died without `kvroute down`; run that first")
    return run


def read_run(run_dir: Path) -> Run | None:
    """The run that stands in the folder; `None` where there is none.

    Raises:
        ConfigError: the file is not one of ours.
    """
    path = run_dir / _FILE_NAME
    try:
        if {run_dir.stat().st_uid, path.stat().st_uid} != {os.getuid()}:
            # Whoever can write here could lend us workers of theirs, and have us end processes of ours.
            raise ConfigError(f"--run-dir: {path} belongs to another user")
        fields = json.loads(path.read_text())
        return Run(**{**fields, "workers": tuple(fields["workers"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a run file of this version ({error}); end what it names with the version that wrote it, "
            "or remove it"
        ) from None


def remove_run(run_dir: Path) -> None:
    """Forget the run."""
    (run_dir / _FILE_NAME).unlink(missing_ok=True)


def processes_of(marker: str) -> list[psutil.Process]:
    """All processes that carry the marker, but for the caller."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARKER_VARIABLE) == marker:
                found.append(process)
    return found


def end_processes(marker: str) -> int:
    """End everything that carries the marker, and what descends from it: politely, then by force. Says how many there
    were.
    """
    processes = _with_descendants(processes_of(marker))
    _signal(processes, psutil.Process.terminate)
    _, deaf = psutil.wait_procs(processes, timeout=_GRACE_S)
    # Ending takes time in which a supervisor may have started a child more.
    leftover = [*deaf, *_with_descendants(processes_of(marker))]
    _signal(leftover, psutil.Process.kill)
    psutil.wait_procs(leftover, timeout=_GRACE_S)
    return len(processes)


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those too that show no marker, but for the caller: Ray's agents write their titles over their environment."""
    found = set(processes)
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return [process for process in found if process.pid != os.getpid()]


def _make_own_folder(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_dir.stat().st_uid != os.getuid():
        raise ConfigError(f"--run-dir: {run_dir} belongs to another user")


def _signal(processes: Iterable[psutil.Process], send: Any) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            send(process)
