"""Settings come from four sources in a fixed order, and whatever is wrong is named with its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shared.config import TEST_PREFIX, Settings, load_settings
from shared.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(text: str | bytes) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


def _load(
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    return load_settings(flags=flags or {}, environment=environment or {}, file=file, defaults=defaults)


def _error(**sources: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        _load(**sources)
    return str(raised.value)


def test_without_any_source_the_defaults_hold() -> None:
    assert _load() == Settings()


def test_each_source_is_stronger_than_the_one_before(write: Any) -> None:
    everything = {
        "defaults": {"workers": 2, "seed": 2, "block_size": 32, "max_attempts": 2},
        "file": write("workers: 3\nseed: 3\nblock-size: 48\n"),
        "environment": {"KVROUTE_WORKERS": "4", "KVROUTE_SEED": "4"},
        "flags": {"workers": 5},
    }
    settings = _load(**everything)
    assert (settings.workers, settings.seed, settings.block_size, settings.max_attempts) == (5, 4, 48, 2)


def test_flags_may_be_text_as_they_come_from_the_command_line() -> None:
    assert _load(flags={"workers": "3", "lease_s": "7.5"}) == Settings(workers=3, lease_s=7.5)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"flags": {"worker_count": 2}}, "--worker-count: unknown setting (command line)"),
        ({"environment": {"KVROUTE_WORKER_COUNT": "2"}}, "KVROUTE_WORKER_COUNT: unknown setting (environment)"),
    ],
)
def test_unknown_setting_is_named_as_its_source_writes_it(sources: dict[str, Any], message: str) -> None:
    assert _error(**sources) == message


def test_unknown_setting_in_a_file_names_the_file(write: Any) -> None:
    path = write("worker_count: 2\n")
    assert _error(file=path) == f"worker_count: unknown setting (file {path})"


@pytest.mark.parametrize(
    ("sources", "start", "end"),
    [
        ({"flags": {"workers": "many"}}, "--workers: invalid value 'many'", "(command line)"),
        ({"flags": {"engine": "best"}}, "--engine: invalid value 'best': Input should be 'vllm'", "(command line)"),
        ({"environment": {"KVROUTE_BLOCK_SIZE": "8"}}, "KVROUTE_BLOCK_SIZE: invalid value '8'", "(environment)"),
        ({"environment": {"KVROUTE_WORKERS": ""}}, "KVROUTE_WORKERS: invalid value ''", "(environment)"),
        ({"environment": {"KVROUTE_LEASE_S": "nan"}}, "KVROUTE_LEASE_S: invalid value 'nan'", "(environment)"),
        ({"defaults": {"seed": "x"}}, "seed: invalid value 'x'", "(default)"),
    ],
)
def test_malformed_value_names_key_value_and_source(sources: dict[str, Any], start: str, end: str) -> None:
    message = _error(**sources)
    assert message.startswith(start)
    assert message.endswith(end)


def test_all_malformed_values_are_reported_at_once() -> None:
    message = _error(flags={"workers": 0}, environment={"KVROUTE_SEED": "x"})
    assert "--workers: invalid value 0" in message
    assert "KVROUTE_SEED: invalid value 'x'" in message


def test_engine_args_in_the_environment_are_json() -> None:
    settings = _load(environment={"KVROUTE_ENGINE_ARGS": '{"enforce_eager": true}'})
    assert settings.engine_args == {"enforce_eager": True}
    assert _error(environment={"KVROUTE_ENGINE_ARGS": "{"}).startswith("KVROUTE_ENGINE_ARGS: not JSON: ")
    assert _error(environment={"KVROUTE_ENGINE_ARGS": "[1]"}).startswith("KVROUTE_ENGINE_ARGS: invalid value [1]")


def test_combinations_are_checked() -> None:
    assert _error(flags={"lease_s": 1.5, "heartbeat_s": 1.0}) == (
        "lease_s (1.5) must be at least twice heartbeat_s (1.0), or one lost heartbeat loses the worker"
    )
    assert _error(flags={"kv_cache_blocks": 100, "kv_cache_bytes": 1 << 30}) == (
        "kv_cache_blocks and kv_cache_bytes exclude each other"
    )


def test_ray_address_counts_unless_our_own_variable_is_set() -> None:
    theirs = {"RAY_ADDRESS": "192.0.2.1:6379"}
    assert _load(environment=theirs).ray_address == "192.0.2.1:6379"
    assert _load(environment={"KVROUTE_RAY_ADDRESS": "auto", **theirs}).ray_address == "auto"


@pytest.mark.parametrize("text", ["inf", "nan", "1e999"])
def test_durations_are_finite(text: str) -> None:
    with pytest.raises(ConfigError, match="--lease-s: invalid value"):
        load_settings(flags={"lease_s": text}, environment={})


def test_other_variables_and_those_of_the_tests_are_no_settings() -> None:
    environment = {"HOME": "/home/somebody", "kvroute_workers": "9", f"{TEST_PREFIX}TRACE_DIR": "traces"}
    assert _load(environment=environment) == Settings()
    assert not any(name.startswith("test_") for name in Settings.model_fields)


def test_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    assert _error(file=path) == f"--config: cannot read {path}: No such file or directory"
    assert _error(file=tmp_path) == f"--config: cannot read {tmp_path}: Is a directory"


# "0x_" passes YAML's pattern of a number and is none. (A date that is none would do, too, were it not that a library
# of vLLM's has PyYAML read dates as texts from then on.)
@pytest.mark.parametrize("text", ["a: [1", "seed: 0x_", b"\xff\xfe\x00", "? [a]\n: b"])
def test_file_that_is_not_yaml_is_an_error(write: Any, text: str | bytes) -> None:
    path = write(text)
    assert _error(file=path).startswith(f"--config: {path} is not YAML: ")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("- workers\n", "the file"),
        ("just words\n", "the file"),
        ("1: 2\n", "the file"),
        ("cluster_name: c\nmetadata: [kvroute]\n", "metadata"),
        ("cluster_name: c\nmetadata:\n  kvroute: words\n", "metadata.kvroute"),
    ],
)
def test_file_that_holds_no_mapping_is_an_error(write: Any, text: str, where: str) -> None:
    path = write(text)
    assert _error(file=path) == f"--config: {path}: {where} must hold a mapping of settings"


def test_setting_in_both_spellings_is_an_error(write: Any) -> None:
    path = write("block-size: 32\nblock_size: 64\n")
    assert _error(file=path) == f"block_size: given twice (file {path})"


@pytest.mark.parametrize(
    "text", ["", "# nothing yet\n", "cluster_name: c\n", "cluster_name: c\nmetadata:\n  kvroute:\n"]
)
def test_file_without_settings_changes_nothing(write: Any, text: str) -> None:
    assert _load(file=write(text)) == Settings()


def test_cluster_file_gives_what_stands_under_our_name(write: Any) -> None:
    text = (
        "cluster_name: c\nmax_workers: 9\nmetadata:\n  team: search\n  kvroute:\n    workers: 3\n    max-num-seqs: 4\n"
    )
    assert _load(file=write(text)) == Settings(workers=3, max_num_seqs=4)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().workers = 2  # type: ignore[misc]


def test_user_without_a_home_has_to_name_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="--cache-dir: needed"):
        _ = Settings().model_cache_dir
    assert Settings(cache_dir=Path("/c")).model_cache_dir == Path("/c")


def test_model_name_is_the_served_one_where_given() -> None:
    assert Settings(model="tiny").model_name == "tiny"
    assert Settings(model="tiny", served_model_name="small").model_name == "small"


def test_folder_of_traces_is_no_setting() -> None:
    assert _load(environment={"KVROUTE_TRACE_DIR": "anywhere"}) == _load()
