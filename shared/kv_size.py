"""How large a model's KV cache is, from its configuration alone. Arithmetic; reads no files and knows no engine."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError

DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
"""Types by the names that vLLM takes, and their bytes."""
_MAX_COUNT = 10**9
"""Far over any field of a model's configuration."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the size of a cache and of weights, for models whose layers all attend to the whole text."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int | None
    dtype: str
    """As the configuration names it."""
    num_parameters: int | None
    """None where the configuration does not tell them in a way that is known here."""

    def bytes_per_token(self, dtype: str = "auto", tensor_parallel_size: int = 1) -> int:
        """Keys and values of one token in all layers, on all GPUs together."""
        # GPUs beyond the number of heads hold copies of them.
        num_kv_heads = max(self.num_kv_heads, tensor_parallel_size)
        return 2 * self.num_layers * num_kv_heads * self.head_dim * self.dtype_bytes(dtype)

    def weight_bytes(self, dtype: str = "auto") -> int | None:
        """Of all weights; None where their number is not known."""
        return None if self.num_parameters is None else self.num_parameters * self.dtype_bytes(dtype)

    def dtype_bytes(self, dtype: str = "auto") -> int:
        """Bytes of one number. `auto` is the model's own type, and 16 bits where that is float32, as in vLLM."""
        name = self.dtype if dtype == "auto" else dtype
        if name not in DTYPE_BYTES:
            raise ConfigError(f"--dtype: {name!r} is none of auto, {', '.join(DTYPE_BYTES)}")
        return 2 if dtype == "auto" else DTYPE_BYTES[name]


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a model's `config.json` describes.

    Raises:
        ConfigError: a field is missing or of the wrong type, or the cache is not one of full attention.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError("text_config: not a mapping")
    _refuse_other_caches(text)
    num_heads = _count(text, "num_attention_heads")
    head_dim = _count(text, "head_dim") if text.get("head_dim") else _count(text, "hidden_size") // num_heads
    if not head_dim:
        raise ConfigError(f"hidden_size: {text['hidden_size']} is less than num_attention_heads, which is {num_heads}")
    return ModelShape(
        num_layers=_count(text, "num_hidden_layers"),
        num_kv_heads=_count(text, "num_key_value_heads") if text.get("num_key_value_heads") else num_heads,
        head_dim=head_dim,
        context_tokens=_count(text, "max_position_embeddings") if text.get("max_position_embeddings") else None,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float16"),
        num_parameters=_num_parameters(text, num_heads, head_dim),
    )


def sequences_in_flight(
    num_blocks: int, block_size_tokens: int, length_tokens: int, shared_prefix_tokens: int = 0
) -> int:
    """How many sequences of one length fit at once, if they all begin with the same tokens.

    Only full blocks are shared, and the block of a sequence's last token never is.
    """
    shared = min(shared_prefix_tokens, length_tokens - 1) // block_size_tokens
    own = -(-length_tokens // block_size_tokens) - shared
    return max(0, num_blocks - shared) // own


def _refuse_other_caches(text: Mapping[str, Any]) -> None:
    """Caches whose size is not layers times tokens."""
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types: {reprlib.repr(kinds)} in the model's configuration, must be a list")
    other_layers = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other_layers:
        raise ConfigError(f"layer_types: {', '.join(other_layers)}: only models of full attention can be planned")
    if text.get("kv_lora_rank"):
        raise ConfigError("kv_lora_rank: latent attention keeps other blocks; only full attention can be planned")
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        raise ConfigError("sliding_window: its cache stops growing; only models of full attention can be planned")


def _num_parameters(text: Mapping[str, Any], num_heads: int, head_dim: int) -> int | None:
    """Of a dense model with a gated MLP, as Llama, Mistral, Qwen and SmolLM are; small terms left out."""
    if any("expert" in name for name in text) or "quantization_config" in text:
        return None
    if not text.get("intermediate_size") or not text.get("vocab_size") or text.get("hidden_act") != "silu":
        return None
    hidden = _count(text, "hidden_size")
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    attention = 2 * hidden * num_heads * head_dim + 2 * hidden * num_kv_heads * head_dim
    layer = attention + 3 * hidden * _count(text, "intermediate_size")
    num_embeddings = 1 if text.get("tie_word_embeddings") else 2
    return _count(text, "num_hidden_layers") * layer + num_embeddings * hidden * _count(text, "vocab_size")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
        raise ConfigError(
            f"{name}: {reprlib.repr(value)} in the model's configuration, must be a number above 0, "
            f"at most {_MAX_COUNT}"
        )
    return value
