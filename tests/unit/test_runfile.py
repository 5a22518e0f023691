"""The run file: whole or not at all, ours alone, and one starter at a time."""

from __future__ import annotations

from pathlib import Path

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
