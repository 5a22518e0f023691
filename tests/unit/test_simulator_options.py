from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.config import Settings
from shared.errors import ConfigError
from shared.types import CacheScheme
from worker.engines.profiles import LatencyProfile, load_profile
from worker.engines.simulator_options import SimulatorOptions, simulator_options

CONFIG: dict[str, Any] = {
    "vocab_size": 500,
    "eos_token_id": [2, 7],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SCHEME = CacheScheme("m", 64)


def options(folder: Path, config: dict[str, Any] = CONFIG, **settings: Any) -> SimulatorOptions:
    (folder / "config.json").write_text(json.dumps(config))
    return simulator_options(Settings(model="m", engine="simulator", **settings), SCHEME, folder)


def test_a_model_gives_vocabulary_and_context_and_a_profile_the_rest(tmp_path: Path):
    found = options(tmp_path)
    assert (found.vocabulary_size, found.eos_token_ids) == (500, frozenset({2, 7}))
    assert (found.max_model_len_tokens, found.num_blocks, found.max_num_seqs) == (4096, 858, 8)
    assert found.profile == load_profile("13b-a100")


def test_settings_win(tmp_path: Path):
    found = options(tmp_path, max_model_len=1000, kv_cache_blocks=20, max_num_seqs=3, eviction="lru")
    assert (found.max_model_len_tokens, found.num_blocks, found.max_num_seqs) == (1000, 20, 3)
    assert found.eviction == "lru"


def test_bytes_of_cache_are_blocks_of_the_model(tmp_path: Path):
    # Two layers of four heads of 16, keys and values, two bytes each: 512 bytes a token.
    assert options(tmp_path, kv_cache_bytes=512 * 64 * 70 + 5).num_blocks == 70


def test_what_nothing_tells_is_asked_for_by_name(tmp_path: Path):
    profile = tmp_path / "profile.yaml"
    profile.write_text(LatencyProfile("own", 1.0, 1.0, 1.0, 1.0, 1.0).to_yaml())
    with pytest.raises(ConfigError, match="--kv-cache-blocks: needed, since profile own does not tell"):
        options(tmp_path, profile=str(profile))
    with pytest.raises(ConfigError, match="--max-model-len: needed"):
        options(tmp_path, {**CONFIG, "max_position_embeddings": None})
    with pytest.raises(ValueError, match="eviction 'stock' is vLLM's own pool"):
        options(tmp_path, eviction="stock")


def test_a_profiles_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert Settings(profile="own.yaml").profile == str(tmp_path / "own.yaml")
    assert Settings(profile="13b-h100").profile == "13b-h100"
