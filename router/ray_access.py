"""The token that a Ray asks of its clients. Ray reads it when it is imported, so this comes before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from router import runfile

_CHANGING_COMMANDS = ("scale", "drain", "down")
"""Commands that go into the Ray of `up`."""
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def prepare(command: str, run_dir: Path | None, *, ray_address: str, starts_ray: bool) -> None:
    """Let this process into the Ray that it goes to: that of `up`, one that is named, or one of its own."""
    folder = run_dir or runfile.default_run_dir()
    run = None
    if command in _CHANGING_COMMANDS or (command == "up" and runfile.alive(folder) is not None):
        run = runfile.read_run(folder)
    if run is not None:
        ray_address, starts_ray = run.settings.get("ray_address", ""), False
        if run.ray_token:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = run.ray_token
    if starts_ray:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if os.environ["RAY_AUTH_MODE"] == "token":
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif ray_address == "auto" and _has_token():
        # As Ray itself does for `auto`; here the address that it stands for is found before Ray is joined.
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _has_token() -> bool:
    """Whether the user has a token for Rays, where Ray looks for it."""
    return any(map(os.environ.get, _TOKEN_VARIABLES)) or Path("~/.ray/auth_token").expanduser().exists()
