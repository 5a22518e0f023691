"""The size of caches is arithmetic on a model's configuration, checked against figures that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli import main
from router.plan import make_plan, parse_lengths, parse_size, show_bytes
from shared.errors import ConfigError
from shared.kv_size import ModelShape, model_shape, sequences_in_flight

LLAMA_2_13B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_8B = LLAMA_2_13B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def plan(shape: ModelShape, **more: Any) -> Any:
    defaults = {
        "gpu_memory_bytes": 80 << 30,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "block_size_tokens": 64,
        "lengths_tokens": [2048],
        "system_prompt_tokens": 1024,
    }
    return make_plan(shape, **{**defaults, **more})


def test_a_token_of_llama_2_13b_takes_819200_bytes_and_a_block_of_64_takes_50_mib():
    shape = model_shape(LLAMA_2_13B)
    assert shape.bytes_per_token() == 819_200
    assert (plan(shape).bytes_per_block, show_bytes(plan(shape).bytes_per_block)) == (50 << 20, "50 MiB")


def test_grouped_heads_and_a_head_size_of_its_own_count():
    assert model_shape(LLAMA_3_8B).bytes_per_token() == 131_072
    assert model_shape(LLAMA_3_8B | {"head_dim": 64}).bytes_per_token() == 65_536


def test_number_of_parameters_is_that_of_the_published_models():
    assert model_shape(LLAMA_2_13B).num_parameters == pytest.approx(13.016e9, rel=0.001)
    assert model_shape(LLAMA_3_8B).num_parameters == pytest.approx(8.030e9, rel=0.001)


@pytest.mark.parametrize(
    ("dtype", "own", "num_bytes"),
    [("auto", "float16", 2), ("auto", "float32", 2), ("float32", "float16", 4), ("bfloat16", "float32", 2)],
)
def test_dtype_means_what_it_means_to_vllm(dtype: str, own: str, num_bytes: int):
    assert model_shape(LLAMA_2_13B | {"torch_dtype": own}).bytes_per_token(dtype) == 409_600 * num_bytes


def test_gpus_beyond_the_number_of_heads_hold_copies():
    shape = model_shape(LLAMA_3_8B)
    assert [shape.bytes_per_token("auto", gpus) for gpus in (1, 8, 16)] == [131_072, 131_072, 262_144]


def test_plan_of_llama_2_13b_on_80_gib():
    found = plan(model_shape(LLAMA_2_13B), lengths_tokens=[512, 2048])
    assert found.num_blocks == ((80 << 30) * 9 // 10 - found.weight_bytes) // (50 << 20) == 978
    assert found.num_static == 978 // 64
    rows = [(row.length_tokens, row.num_alone, row.num_with_shared_prompt) for row in found.lengths]
    assert rows == [(512, 978 // 8, None), (2048, 978 // 32, (978 - 16) // 16)]


@pytest.mark.parametrize(
    ("length", "prefix", "expected"),
    [(64, 0, 10), (65, 0, 5), (65, 64, 9), (64, 64, 10), (64, 1000, 10), (641, 0, 0), (640, 576, 1), (704, 640, 0)],
)
def test_sequences_share_full_blocks_but_never_that_of_their_last_token(length: int, prefix: int, expected: int):
    assert sequences_in_flight(10, 64, length, prefix) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 in the model's configuration, must be a number above 0"),
        ({"num_attention_heads": None}, "num_attention_heads: None"),
        ({"hidden_size": "5120"}, "hidden_size: '5120'"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"text_config": 3}, "text_config: not a mapping"),
        ({"layer_types": 5}, "layer_types: 5 in the model's configuration, must be a list"),
        ({"hidden_size": 39}, "hidden_size: 39 is less than num_attention_heads, which is 40"),
        ({"num_hidden_layers": 10**400}, r"num_hidden_layers: 1000\d+\.\.\.\d+ in .* at most 1000000000"),
    ],
)
def test_configurations_that_cannot_be_planned_are_refused_by_field(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        model_shape(LLAMA_2_13B | change)


def test_a_sliding_window_that_is_off_is_full_attention():
    config = LLAMA_2_13B | {"sliding_window": 4096, "use_sliding_window": False}
    assert model_shape(config).bytes_per_token() == 819_200


def test_weights_that_cannot_be_computed_must_be_told():
    shape = model_shape(LLAMA_2_13B | {"num_local_experts": 8})
    with pytest.raises(ConfigError, match="--weights: needed"):
        plan(shape)
    assert plan(shape, weight_bytes=20 << 30).num_blocks == (52 << 30) // (50 << 20)


def test_a_gpu_too_small_for_the_weights_is_refused_with_the_figures():
    with pytest.raises(
        ConfigError, match=r"of 21\.6 GiB that may be used, weights take 24\.2 GiB; not one block of 50 MiB"
    ):
        plan(model_shape(LLAMA_2_13B), gpu_memory_bytes=24 << 30)


def test_sizes_and_lengths_are_read_as_people_write_them():
    texts = ["80GiB", "80 GB", "1.5KiB", "12", "12B", "3k"]
    assert [parse_size("--x", text) for text in texts] == [80 << 30, 80 * 10**9, 1536, 12, 12, 3000]
    assert parse_lengths("--lengths", "512, 2048") == [512, 2048]
    for text in ("", "GiB", "-1", "80 gigs", "1e9", "9" * 400, "٣"):
        with pytest.raises(ConfigError, match="--gpu-memory"):
            parse_size("--gpu-memory", text)
    for text in ("", "0", "1,,2", "-5", "x", "9" * 5000):
        with pytest.raises(ConfigError, match="--lengths"):
            parse_lengths("--lengths", text)


def test_the_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_2_13B))
    arguments = ["plan", "--config-json", str(path), "--gpu-memory", "80GiB", "--dtype", "float16"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "819,200 bytes" in text
    assert "block of 64 tokens       50 MiB" in text
    assert main([*arguments, "--json", "--block-size", "16"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["bytes_per_token"], figures["bytes_per_block"]) == (819_200, 819_200 * 16)


def test_the_command_reads_a_model_folder_and_a_built_in_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    for model in (str(tmp_path), "tiny"):
        arguments = ["plan", "--model", model, "--gpu-memory", "40GiB", "--json", "--cache-dir", str(tmp_path / "c")]
        assert main(arguments) == 0
    shapes = [json.loads(line)["bytes_per_token"] for line in capsys.readouterr().out.splitlines()]
    assert shapes == [131_072, 2 * 2 * 1 * 32 * 2]


def test_a_configuration_nested_too_deeply_is_refused_as_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "config.json"
    path.write_text("[" * 200_000)
    assert main(["plan", "--gpu-memory", "80GiB", "--config-json", str(path)]) == 2
    assert f"--config-json: {path} is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "much", "--model", "tiny"], "--gpu-memory: 'much' is no size"),
        (["--gpu-memory", "80GiB"], "--model: needed"),
        (["--gpu-memory", "80GiB", "--config-json", "absent.json"], "--config-json: cannot read absent.json"),
        (["--gpu-memory", "80GiB", "--model", "tiny", "--block-size", "8"], "--block-size: invalid value '8'"),
        (["--gpu-memory", "80GiB", "--model", "tiny", "--system-prompt", "-1"], "--system-prompt: '-1'"),
        (["--gpu-memory", "80GiB", "--model", "tiny", "--system-prompt", "9" * 5000], "of at most 9 digits"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", "--cache-dir", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
