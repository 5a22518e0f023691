"""cluster.yaml is one that Ray's cluster launcher takes and one that kvroute reads its settings from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import load_settings

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("jsonschema", reason="jsonschema is not installed")

CLUSTER_FILE = Path(__file__).parents[2] / "cluster.yaml"
CLOUD_ONLY = ("provider", "auth", "docker", "max_workers", "available_node_types", "head_node_type")


def _as_ray_sees_it(document: dict[str, Any]) -> dict[str, Any]:
    """Defaults filled in and checked by Ray's own code, as `ray up` does before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(document)
    validate_config(prepared)
    return prepared


@pytest.fixture
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CLUSTER_FILE.read_text())
    return loaded


def test_ray_accepts_the_file_as_it_is(document: dict[str, Any]) -> None:
    prepared = _as_ray_sees_it(document)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert prepared["setup_commands"] == document["setup_commands"]


def test_ray_accepts_the_file_changed_for_machines_on_premises(document: dict[str, Any]) -> None:
    lines = CLUSTER_FILE.read_text().splitlines()
    local = yaml.safe_load("\n".join(line.removeprefix("#: ") for line in lines if line.startswith("#: ")))
    changed = {name: value for name, value in document.items() if name not in CLOUD_ONLY} | local
    prepared = _as_ray_sees_it(changed)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["max_workers"] == len(local["provider"]["worker_ips"])


def test_kvroute_reads_its_settings_from_it() -> None:
    settings = load_settings(flags={}, environment={}, file=CLUSTER_FILE)
    assert "13b" in settings.model.lower()
    assert settings.block_size == 64
    assert settings.ray_address == "auto"


def test_the_cluster_has_gpus_for_all_workers(document: dict[str, Any]) -> None:
    settings = load_settings(flags={}, environment={}, file=CLUSTER_FILE)
    node_types = document["available_node_types"]
    num_gpus = sum(
        node_type.get("max_workers", 0) * node_type["resources"].get("GPU", 0) for node_type in node_types.values()
    )
    assert settings.workers * settings.tensor_parallel_size <= num_gpus
    assert "GPU" not in node_types[document["head_node_type"]]["resources"]
    assert document["max_workers"] >= sum(node_type.get("min_workers", 0) for node_type in node_types.values())
