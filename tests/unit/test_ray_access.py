"""Which token a command shows to Ray."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from router import ray_access, runfile

RUN = runfile.Run("m", "00", {"model": "tiny"}, "unix:///x", "127.0.0.1:1", ("w0",), is_ready=True, ray_token="theirs")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        # So that what is set meanwhile is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def shown(command: str, run_dir: Path, ray_address: str = "") -> tuple[str | None, str | None]:
    """Mode and token after a command has made ready."""
    starts_ray = command in ("up", "batch") and not ray_address
    ray_access.prepare(command, run_dir, ray_address=ray_address, starts_ray=starts_ray)
    return os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")


def test_own_ray_takes_calls_of_this_process_alone(home: Path) -> None:
    mode, token = shown("batch", home)
    assert (mode, len(token or "")) == ("token", 64)
    assert shown("batch", home) != (mode, token)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    del os.environ["RAY_AUTH_TOKEN"]
    assert shown("batch", home) == ("disabled", None)


@pytest.mark.parametrize("command", ["scale", "drain", "down"])
def test_ray_of_a_deployment_is_shown_its_own_token(home: Path, command: str) -> None:
    runfile.write_run(home, RUN)
    assert shown(command, home) == ("token", "theirs")


def test_up_shows_it_to_a_deployment_that_lives_and_starts_anew_where_none_does(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runfile.write_run(home, RUN)
    assert shown("up", home)[1] != "theirs"
    monkeypatch.setattr(runfile, "processes_of", lambda marker: ["ray"])
    assert shown("up", home) == ("token", "theirs")


def test_token_of_the_user_opens_the_ray_that_auto_finds_and_no_other(home: Path) -> None:
    runfile.write_run(home, replace(RUN, ray_token="", settings={"ray_address": "auto"}))
    assert shown("batch", home, "auto") == (None, None)
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("mine")
    assert shown("batch", home, "10.0.0.1:6379") == (None, None)
    assert shown("batch", home, "auto") == ("token", None)
    del os.environ["RAY_AUTH_MODE"]
    assert shown("down", home) == ("token", None)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    assert shown("batch", home, "auto") == ("disabled", None)
