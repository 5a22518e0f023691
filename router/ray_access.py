"""The token that a Ray of ours asks of its clients. Ray reads it when it is imported, so this comes before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from router import runfile


def prepare(command: str, run_dir: Path | None, *, starts_ray: bool) -> None:
    """Let this process into the Ray that it goes to: that of `up`, or one that it starts for itself alone."""
    folder = run_dir or runfile.default_run_dir()
    if command in ("scale", "drain") or (command == "up" and runfile.alive(folder) is not None):
        run = runfile.read_run(folder)
        if run is not None and run.ray_token:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = run.ray_token
    elif starts_ray:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if os.environ["RAY_AUTH_MODE"] == "token":
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
