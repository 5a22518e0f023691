"""What a changed setting means to a running deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router import changes, runfile
from router.changes import FIXED, OF_DEPLOYMENTS, OF_STARTS, OF_WORKERS, build_of, changed, differences
from shared.config import Settings
from shared.errors import ConfigError

RUN = runfile.Run(
    "abcdef0123",
    "00",
    {"model": "tiny", "workers": 2, "kv_cache_blocks": 100, "ray_address": "auto", "max_num_seqs": 4},
    "unix:///store.sock",
    "10.0.0.1:6379",
    is_ready=True,
)
OF_ROUTERS_AND_COMMANDS = {
    "policy", "redis_deadline_s", "attach", "attach_api_key", "tokenizer", "host", "port", "api_key", "api_key_file",
    "files_dir", "max_in_flight", "max_queued", "tenant_weights", "queue_timeout_s", "max_attempts",
    "min_prefix_tokens", "request_log", "drain_timeout_s", "otlp_endpoint", "run_dir",
}  # fmt: skip


def test_every_setting_is_one_of_workers_or_one_of_routers_and_commands() -> None:
    """A new setting must be entered in one of these: workers that lack it are not replaced, or are for nothing."""
    kinds = [set(FIXED), set(OF_WORKERS), set(OF_STARTS), {"workers"}, OF_ROUTERS_AND_COMMANDS]
    assert set().union(*kinds) == set(Settings.model_fields)
    assert sum(map(len, kinds)) == len(Settings.model_fields)
    assert set().union(*kinds[:4]) == OF_DEPLOYMENTS


def test_what_is_not_given_stays_and_what_is_no_workers_business_is_left_out() -> None:
    settings = Settings(max_num_seqs=8, eviction="lru", policy="random", api_key="sk-secret")
    later = changed(RUN, settings)
    assert later == {**RUN.settings, "max_num_seqs": 8, "eviction": "lru"}
    assert differences(RUN.settings, later) == ["--max-num-seqs: 4 -> 8", "--eviction: adaptive -> lru"]
    assert changed(RUN, Settings()) == RUN.settings
    assert differences(RUN.settings, RUN.settings) == []


def test_one_size_of_the_cache_takes_the_place_of_the_other() -> None:
    later = changed(RUN, Settings(kv_cache_bytes=1 << 20))
    assert "kv_cache_blocks" not in later
    assert differences(RUN.settings, later) == [
        "--kv-cache-blocks: 100 -> the default",
        "--kv-cache-bytes: the default -> 1048576",
    ]
    assert changed(RUN, Settings(kv_cache_blocks=None))["kv_cache_blocks"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "smollm2"}, r"^--model: smollm2 cannot take the place of tiny while the deployment runs"),
        ({"served_model_name": "gpt"}, r"^--served-model-name: gpt cannot take the place of none"),
        ({"block_size": 32}, r"^--block-size: 32 cannot take the place of 64"),
        ({"redis_url": "redis://x:1"}, r"^--redis-url: redis://x:1 cannot take the place of none"),
        ({"ray_address": "10.0.0.2:6379"}, r"^--ray-address: 10\.0\.0\.2:6379 cannot take the place of auto"),
        ({"lease_s": 1.5, "heartbeat_s": 0.1, "kv_cache_bytes": 5, "kv_cache_blocks": None}, None),
        ({"heartbeat_s": 2.5}, None),
    ],
)
def test_what_a_deployment_is_known_by_cannot_change(given: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert changed(RUN, Settings(**given)) == {**RUN.settings, **given}
    else:
        with pytest.raises(ConfigError, match=message):
            changed(RUN, Settings(**given))


def test_the_same_in_other_words_is_no_change() -> None:
    same = Settings(model="tiny", served_model_name="tiny", ray_address="10.0.0.1:6379", redis_url="unix:///store.sock")
    assert changed(RUN, same) == RUN.settings


def test_values_that_do_not_go_together_are_refused_by_name() -> None:
    run = runfile.Run("m", "00", {"model": "tiny", "heartbeat_s": 2.0})
    with pytest.raises(ConfigError, match=r"lease_s \(3\.0\) must be at least twice heartbeat_s \(2\.0\)"):
        changed(run, Settings(lease_s=3.0))
    simulated = runfile.Run("m", "00", {"model": "tiny", "engine": "simulator"})
    with pytest.raises(ConfigError, match="eviction 'stock' is vLLM's own pool"):
        changed(simulated, Settings(eviction="stock"))


def test_builds_differ_by_what_a_worker_is_made_of_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_of(Settings(**RUN.settings))
    given = {**RUN.settings, "workers": 7, "log_level": "debug", "start_timeout_s": 1.0, "policy": "random"}
    assert build_of(Settings(**given)) == build
    assert build_of(Settings(**{**RUN.settings, "max_num_seqs": 5})) != build
    assert build_of(Settings(**{**RUN.settings, "engine_args": {"a": 1}})) != build
    monkeypatch.setattr(changes, "__version__", "99.0")
    assert build_of(Settings(**RUN.settings)) != build


def test_workers_of_another_build_or_of_none_that_is_known_are_outdated() -> None:
    build = build_of(Settings(**RUN.settings))
    run = replace(RUN, workers=("w0", "w1", "w2"), worker_to_build={"w1": build, "w2": "another"})
    assert changes.outdated(run) == ["w0", "w2"]
    assert changes.outdated(run, "another") == ["w0", "w1"]
