"""The manifest for KubeRay says what the operator's RayCluster takes, in the fields of its API `ray.io/v1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

MANIFEST = Path(__file__).parents[2] / "router" / "static" / "kuberay.yaml"


def exactly(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object that has these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
PARAMS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
LIST = {"type": "array", "items": {"type": "object"}}
CONTAINER = exactly(
    {"name": TEXT, "image": TEXT, "resources": exactly({}, {"requests": AMOUNTS, "limits": AMOUNTS})},
    {"ports": LIST, "env": LIST, "volumeMounts": LIST},
)
POD = exactly({"spec": exactly({"containers": {"type": "array", "items": CONTAINER}}, {"volumes": LIST})})
RAY_CLUSTER = exactly(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": exactly({"name": TEXT}),
        "spec": exactly(
            {
                "headGroupSpec": exactly({"rayStartParams": PARAMS, "template": POD}),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": exactly(
                        {
                            "groupName": TEXT,
                            "minReplicas": COUNT,
                            "maxReplicas": COUNT,
                            "rayStartParams": PARAMS,
                            "template": POD,
                        },
                        {"replicas": COUNT},
                    ),
                },
            },
            {
                "rayVersion": TEXT,
                "authOptions": exactly({"mode": {"enum": ["token", "disabled"]}}, {"secretName": TEXT}),
            },
        ),
    }
)
"""What the operator's types in `ray-operator/apis/ray/v1` have of what we use, and the API reference of KubeRay 1.6.2;
any other field is a mistake."""


def test_manifest_has_the_fields_of_a_ray_cluster_and_room_for_its_workers() -> None:
    cluster, claim = yaml.safe_load_all(MANIFEST.read_text())
    jsonschema.validate(cluster, RAY_CLUSTER)
    assert claim["kind"] == "PersistentVolumeClaim"

    spec = cluster["spec"]
    (group,) = spec["workerGroupSpecs"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    (node,) = group["template"]["spec"]["containers"]
    assert head["image"] == node["image"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    asked = f"--workers {group['replicas'] * node['resources']['limits']['nvidia.com/gpu']} --gpus-per-worker 1"
    assert asked in MANIFEST.read_text()
    for pod in (spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("broken", ["numOfHost", "replica"])
def test_misspelt_field_would_be_found(broken: str) -> None:
    cluster, _ = yaml.safe_load_all(MANIFEST.read_text())
    cluster["spec"]["workerGroupSpecs"][0][broken] = 1
    with pytest.raises(jsonschema.ValidationError, match=broken):
        jsonschema.validate(cluster, RAY_CLUSTER)
