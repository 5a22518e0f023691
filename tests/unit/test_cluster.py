"""What is said of a Ray that is to be joined and is not there."""

from __future__ import annotations

import socket

import pytest

from router import cluster
from shared.errors import ConfigError

pytestmark = pytest.mark.ray


def refused(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cluster.connect_ray(address, num_local_cpus=0, environment={})
    return str(caught.value)


def test_auto_without_any_ray_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(address: str, temp_dir: None) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(cluster, "get_ray_address_from_environment", find)
    assert refused("auto") == (
        "--ray-address auto: no Ray runs on this host; start one with `ray start --head`, name one as HOST:PORT, or "
        "leave the flag out, and `kvroute up` starts its own (Could not find any running Ray instance.)"
    )


def test_auto_that_leads_to_a_ray_that_is_gone_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert refused("auto").startswith(f"--ray-address: cannot join Ray at '{address}': ")
    assert refused(address).startswith(f"--ray-address: cannot join Ray at '{address}': ")
