"""The run file: whole or not at all, ours alone, and one starter at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from router import runfile
from shared.errors import ConfigError

RUN = runfile.Run("marker", "secret", {"model": "tiny"}, workers=("w0", "w1"))


def test_run_is_read_as_it_was_written_and_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runfile.read_run(folder) is None
    runfile.write_run(folder, RUN)
    assert runfile.read_run(folder) == RUN
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0, 0]
    runfile.remove_run(folder)
    runfile.remove_run(folder)
    assert runfile.read_run(folder) is None


@pytest.mark.parametrize(
    "content", ["", "null", "[]", "{}", '{"workers": 5}', '{"marker": "m", "secret": "s", "workers": [], "novel": 1}']
)
def test_file_of_another_version_is_named_and_what_to_do_about_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "kvroute.json").write_text(content)
    with pytest.raises(ConfigError, match=r"kvroute\.json is not a run file of this version .*remove it"):
        runfile.read_run(tmp_path)


def test_only_one_starts_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another `kvroute up`, `scale` or `drain` is at work")
    with runfile.changing(tmp_path), refused, runfile.changing(tmp_path):
        pass
    with runfile.changing(tmp_path):
        pass


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--run-dir: cannot write"), runfile.changing(tmp_path / "file" / "run"):
        pass


def test_what_a_marked_process_has_started_ends_with_it_even_where_it_shows_no_marker() -> None:
    """As Ray's agents, whose titles lie where their environment was."""
    child = "import signal; print('up', flush=True); signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], env={{}})"
    environment = {**os.environ, runfile.MARKER_VARIABLE: "of-this-test"}
    with subprocess.Popen([sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (unmarked,) = psutil.Process(process.pid).children()
        assert runfile.processes_of("of-this-test") == [psutil.Process(process.pid)]
        assert runfile.end_processes("of-this-test") == 2
    # Whose process number 1 collects nobody still lists the dead.
    with contextlib.suppress(psutil.NoSuchProcess):
        assert unmarked.status() == psutil.STATUS_ZOMBIE
