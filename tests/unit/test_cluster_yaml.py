"""cluster.yaml is one that Ray's cluster launcher takes and one that kvroute reads its settings from."""

from __future__ import annotations

from typing import Any

import pytest

from shared.config import load_settings
from tests.support.cluster_file import CLUSTER_FILE, VARIANTS, cluster_document

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("jsonschema", reason="jsonschema is not installed")


def _as_ray_sees_it(document: dict[str, Any]) -> dict[str, Any]:
    """Defaults filled in and checked by Ray's own code, as `ray up` does before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(document)
    validate_config(prepared)
    return prepared


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_accepts_every_variant_of_the_file(variant: str) -> None:
    document = cluster_document(variant)
    prepared = _as_ray_sees_it(document)
    assert prepared["head_node_type"] in prepared["available_node_types"]
    assert prepared["setup_commands"] == document["setup_commands"]
    assert prepared["max_workers"] == 4


def test_machines_on_premises_are_all_workers_from_the_start() -> None:
    document = cluster_document("On premises")
    (node_type,) = _as_ray_sees_it(document)["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(document["provider"]["worker_ips"])


def test_every_node_starts_with_the_token_that_it_is_given() -> None:
    document = cluster_document("AWS")
    assert document["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for kind in ("head", "worker"):
        stop, start = document[f"{kind}_start_ray_commands"]
        assert stop == "ray stop"
        assert "RAY_AUTH_MODE=token" in start


def test_all_that_an_installation_needs_is_copied_to_the_nodes() -> None:
    mounts = cluster_document("AWS")["file_mounts"]
    copied = {target.removeprefix("~/kvroute/"): source for target, source in mounts.items() if "kvroute" in target}
    assert all(target == source for target, source in copied.items())
    root = CLUSTER_FILE.parent
    packages = {folder.name for folder in root.iterdir() if (folder / "__init__.py").exists()} - {"tests"}
    assert copied.keys() == packages | {".ci", "LICENSE", "Makefile", "README.md", "cluster.yaml", "pyproject.toml"}
    assert all((root / source).exists() for source in copied.values())


def test_kvroute_reads_its_settings_from_it() -> None:
    settings = load_settings(flags={}, environment={}, file=CLUSTER_FILE)
    assert "13b" in settings.model.lower()
    assert settings.block_size == 64
    assert settings.ray_address == "auto"


@pytest.mark.parametrize("variant", ["AWS", "Google Cloud"])
def test_the_cluster_has_gpus_for_all_workers(variant: str) -> None:
    document = cluster_document(variant)
    settings = load_settings(flags={}, environment={}, file=CLUSTER_FILE)
    node_types = document["available_node_types"]
    num_gpus = sum(
        node_type.get("max_workers", 0) * node_type["resources"].get("GPU", 0) for node_type in node_types.values()
    )
    assert settings.workers * settings.tensor_parallel_size <= num_gpus
    assert "GPU" not in node_types[document["head_node_type"]]["resources"]
    assert document["max_workers"] >= sum(node_type.get("min_workers", 0) for node_type in node_types.values())
