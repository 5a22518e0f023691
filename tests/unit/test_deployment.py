"""What a deployment's workers get from the commands that start them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from router import cluster, launch
from router.deployment import joined
from router.runfile import MARKER_VARIABLE, Run
from tests.support.stage import RUN

OWN = replace(RUN, settings={"model": "tiny"}, folder="/own")


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """What workers are to get that are started within each Ray that was joined."""
    given: list[Mapping[str, str]] = []

    def connect(address: str, *, environment: Mapping[str, str], **options: Any) -> str:
        given.append(environment)
        return address

    monkeypatch.setattr(cluster, "connect_ray", connect)
    monkeypatch.setattr(cluster, "leave_ray", lambda: None)
    return given


def test_workers_inherit_their_environment_from_a_ray_of_the_same_installation(
    environments: list[Mapping[str, str]],
) -> None:
    with joined(replace(OWN, python_path=launch.worker_environment(OWN.marker, OWN.folder)["PYTHONPATH"])):
        assert environments == [{}]


@pytest.mark.parametrize("run", [replace(OWN, python_path="/former/installation"), OWN])
def test_workers_get_the_code_of_the_installation_that_starts_them(
    environments: list[Mapping[str, str]], run: Run
) -> None:
    with joined(run):
        assert environments == [launch.worker_environment(run.marker, run.folder)]


def test_workers_in_a_ray_of_somebody_else_get_the_marker_alone(environments: list[Mapping[str, str]]) -> None:
    with joined(RUN):
        assert environments == [{MARKER_VARIABLE: RUN.marker}]
