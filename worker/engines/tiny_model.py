"""A random two-layer Llama of 94,000 parameters, for tests and demonstrations without a download.

Its weights are spread wide and its output layer is its own, so that its greedy answers vary and depend on the whole
prompt; with tied, small weights it would repeat one token for ever, and texts would be equal whatever went wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SEED = 0
CONTEXT_TOKENS = 4096
_SPECIAL_TOKENS = ("<|unk|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY_SIZE = 320
_HIDDEN, _INTERMEDIATE, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 128, 2, 2, 1, 32
_SPREAD = 0.25
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)


def write_tiny_model(folder: Path) -> None:
    """Write config, weights and a byte-level tokenizer into an existing folder; the same bytes each time."""
    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_weights(folder / "model.safetensors")
    _write_tokenizer(folder)


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "initializer_range": _SPREAD,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }


def _write_weights(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.Generator(np.random.PCG64(SEED))

    def spread(*shape: int) -> Any:
        return (random.standard_normal(shape) * _SPREAD).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": spread(_VOCABULARY_SIZE, _HIDDEN),
        "lm_head.weight": spread(_VOCABULARY_SIZE, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            prefix + "self_attn.q_proj.weight": spread(_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": spread(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": spread(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": spread(_HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "mlp.gate_proj.weight": spread(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": spread(_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": spread(_HIDDEN, _INTERMEDIATE),
        }
    save_file(weights, path, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown, start, end = _SPECIAL_TOKENS
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "unk_token": unknown,
            "bos_token": start,
            "eos_token": end,
            "pad_token": end,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
