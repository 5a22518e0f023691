"""The shipped cluster.yaml under Ray's own launcher: `ray up`, `ray submit`, a node lost and back, jobs, `ray down`.

The machines are addresses of loopback behind an sshd; GPUs are what their Ray is told, and workers are simulated.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.batches import chat_row, read_records, wait_for_rows, write_rows
from tests.support.cluster_file import cluster_document
from tests.support.commands import assert_no_process_left
from tests.support.machines_on_loopback import ROOT, LoopbackMachines, ssh_user
from tests.support.servers import free_port

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.ray,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (
            shutil.which("rsync") and shutil.which("ssh") and (shutil.which("sshd") or Path("/usr/sbin/sshd").exists())
        ),
        reason="needs openssh-server and rsync",
    ),
]

DEADLINE_S = 900.0
NUM_ROWS = 120
SIMULATED = ["--engine", "simulator", "--model", "tiny", "--workers", "2"]


class Cluster:
    """A cluster of two nodes with a GPU each and a head without, launched from the shipped file."""

    def __init__(self, machines: LoopbackMachines) -> None:
        self.head, *self.nodes = machines.machines
        self._environment = machines.environment()
        self._dashboard_port, ray_port, client_port = free_port(), free_port(), free_port()
        document = cluster_document("On premises")
        document["provider"] |= {"head_ip": self.head.address, "worker_ips": [node.address for node in self.nodes]}
        document["auth"] = {"ssh_user": ssh_user(), "ssh_private_key": str(machines.key)}
        document |= {"min_workers": len(self.nodes), "max_workers": len(self.nodes), "setup_commands": []}
        # Nodes on one host need ports, folders and addresses of their own.
        one_of_several = (
            "--node-ip-address=$(echo $SSH_CONNECTION | cut -d' ' -f3) --temp-dir=$HOME/ray "
            "--dashboard-agent-listen-port=0 --num-cpus=2"
        )
        replaced = {
            "--port=6379": f"--port={ray_port} {one_of_several} "
            f"--dashboard-port={self._dashboard_port} --ray-client-server-port={client_port}",
            "$RAY_HEAD_IP:6379": f"$RAY_HEAD_IP:{ray_port} {one_of_several} --num-gpus=1",
            "--object-manager-port=8076": "",
        }
        for kind in ("head", "worker"):
            name = f"{kind}_start_ray_commands"
            for old, new in replaced.items():
                document[name] = [command.replace(old, new) for command in document[name]]
        self._file = machines.folder / "cluster.yaml"
        self._file.write_text(yaml.safe_dump(document))

    def run(self, *command: str | Path, timeout_s: float = DEADLINE_S) -> str:
        """Run a command on the launching computer; what it said."""
        process = self.start(*command)
        said, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, said
        return said

    def start(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a command on the launching computer, in a checkout."""
        words = [str(self._file) if word == "cluster.yaml" else str(word) for word in command]
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self._dashboard_port}"

    def actors(self) -> list[dict[str, Any]]:
        """The workers that live, as Ray's dashboard shows them."""
        return [actor for actor in self._alive("actors") if actor["name"].startswith("kvroute:")]

    def gpu_nodes(self) -> set[str]:
        """The nodes that have a GPU, as Ray's dashboard names them."""
        return {node["node_id"] for node in self._alive("nodes") if node["resources_total"].get("GPU")}

    def _alive(self, kind: str) -> list[dict[str, Any]]:
        token = (Path(self._environment["HOME"]) / ".ray" / "auth_token").read_text().strip()
        request = urllib.request.Request(
            f"{self.dashboard_url}/api/v0/{kind}?detail=1", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            listed = json.load(answer)["data"]["result"]["result"]
        return [one for one in listed if one["state"] == "ALIVE"]


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for the test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def rows() -> list[dict[str, Any]]:
    beginnings = [f"beginning {group} " * 60 for group in range(4)]
    return [
        chat_row(f"row-{index}", f"{beginnings[index % 4]} question {index}", model="tiny", max_tokens=64)
        for index in range(NUM_ROWS)
    ]


def assert_complete(path: Path) -> None:
    records = read_records(path)
    assert Counter(record["custom_id"] for record in records) == Counter(f"row-{index}" for index in range(NUM_ROWS))
    assert all(record["response"]["status_code"] == 200 for record in records)


def test_cluster_comes_up_runs_batches_over_a_lost_node_and_goes_down(tmp_path: Path, tag: str) -> None:
    input_path = write_rows(tmp_path / "in.jsonl", rows())
    with LoopbackMachines(3, tag=tag, rng=random.Random()) as machines:
        cluster = Cluster(machines)
        home = cluster.head.home
        cluster.run("ray", "get-auth-token", "--generate")
        cluster.run("ray", "up", "-y", "--no-config-cache", "cluster.yaml")
        cluster.run("ray", "rsync-up", "cluster.yaml", input_path, "~/in.jsonl")

        # Its workers wait for the nodes, which come up after the head.
        submitted = cluster.start(
            *("ray", "submit", "cluster.yaml", "router/cli.py", "--", "batch", "in.jsonl", "-o", "out.jsonl"),
            *("--config", "kvroute/cluster.yaml", *SIMULATED),
        )
        wait_for_rows(home / "out.jsonl", 10, submitted, within_s=DEADLINE_S)
        assert cluster.nodes[1].kill() > 0
        said, _ = submitted.communicate(timeout=DEADLINE_S)
        assert submitted.returncode == 0, said
        assert f"{NUM_ROWS} rows answered, 0 failed" in said
        fetched = tmp_path / "out.jsonl"
        cluster.run("ray", "rsync-down", "cluster.yaml", "~/out.jsonl", fetched)
        assert_complete(fetched)

        # Two workers find room only once the lost node is back.
        (folder := tmp_path / "job").mkdir()
        shutil.copy(input_path, folder / "in.jsonl")
        job = cluster.start(
            *("env", "RAY_AUTH_MODE=token", "ray", "job", "submit", "--address", cluster.dashboard_url),
            *("--working-dir", folder, "--", "kvroute", "batch", "in.jsonl", "-o", home / "job.jsonl"),
            # Few at once take a minute, by the profile: its workers can be looked at on any machine.
            *("--config", home / "kvroute/cluster.yaml", *SIMULATED, "--max-in-flight", "2"),
        )
        wait_for_rows(home / "job.jsonl", 1, job, within_s=DEADLINE_S)
        actors, gpu_nodes = cluster.actors(), cluster.gpu_nodes()
        said, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, said
        assert "succeeded" in said
        assert f"{NUM_ROWS} rows answered, 0 failed" in said
        assert_complete(home / "job.jsonl")
        assert {actor["class_name"] for actor in actors} == {"WorkerActor"}
        assert sorted(actor["name"].split("-")[0] for actor in actors) == ["kvroute:w0", "kvroute:w1"]
        # Ray names a resource for the placement group that it is reserved in.
        for actor in actors:
            gpus = [amount for kind, amount in actor["required_resources"].items() if kind.startswith("GPU_group_")]
            assert set(gpus) == {1}, actor
        places = {actor["node_id"] for actor in actors}
        assert len(places) == 2
        assert places <= gpu_nodes

        cluster.run("ray", "down", "-y", "cluster.yaml")
        assert not [process for process in cluster.head.processes() if "gcs_server" in process.name()]
