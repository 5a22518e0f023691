"""Whose workers a command uses, where `kvroute up` has some."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.runfile import Run, write_run
from router.workers import find_workers
from shared.config import Settings


@pytest.mark.parametrize(
    ("asked", "is_used"), [("", True), ("auto", True), ("10.0.0.1:6379", True), ("10.0.0.2:6379", False)]
)
async def test_job_that_is_told_where_its_ray_is_uses_the_workers_that_live_there(
    tmp_path: Path, asked: str, is_used: bool
) -> None:
    given = {"model": "tiny", "ray_address": "auto"}
    write_run(tmp_path, Run("m", "00", given, "redis://nowhere", "10.0.0.1:6379", workers=("w0-m",), is_ready=True))
    settings = Settings(model="tiny", **({"ray_address": asked} if asked else {}))
    said: list[str] = []
    workers = await find_workers(settings, tmp_path, said.append)
    assert (workers.run is not None) == is_used, said
