"""Tokenizers made on the spot: every byte is a token, and a few merges make pieces that cut through characters."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|unk|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of which some pieces reach from one character into the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*SPECIAL_TOKENS, *alphabet])}
    merges: list[tuple[str, str]] = []
    # Last bytes of one character and the first of the next, as merges of the alphabet's stand-in characters.
    for text, start, end in (("好🎉", 2, 5), ("éé", 1, 3), ("你好", 1, 4), ("🎉🎉", 3, 6)):
        merges += _merges_of([_stand_in(byte) for byte in text.encode()[start:end]], vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return raw


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer in Llama 2's manner: a space before every text, and bytes for what has no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghij"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


def write_model_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A folder that holds what a tokenizer needs and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_TOKEN_ID, 7]}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def _stand_in(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies."""
    # The decoder's alphabet in byte order: printable bytes stand for themselves, the rest follow from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


def _merges_of(pieces: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    left = pieces[0]
    for right in pieces[1:]:
        merges.append((left, right))
        left += right
        vocab.setdefault(left, len(vocab))
    return merges
