"""Words out of the table have the library's own ids, and tokenizers of another kind get no table."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from router.cuts import LLAMA_3_PATTERN, QWEN_2_PATTERN, Cuts
from router.segments import Segments
from router.tokenise_bench import sample_text
from router.words import Words, find_words, prove_words
from shared.config import load_settings
from shared.hashing import pack_tokens
from tests.support.tokenizers import byte_fallback_tokenizer
from worker.engines.demo_model import prepare_model

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_FRAGMENTS = st.sampled_from(
    (
        *("<|im_start|>", "<|im_end|>", "<|im_", "don't", "I'LL", "'s", " ", "  ", "\n", "\r\n", "\t", "\x1c", "12"),
        *(" 3", "word", " word", "Zq", ",", " (", "!\n", "xyzzy", "_", "\u00e9", "\u00a0", "\u4f60"),
    )
)


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL | {"use_regex": False}]}


@cache
def description() -> str:
    """That of SmolLM2's tokenizer."""
    folder = prepare_model("smollm2", load_settings(flags={}, environment={}).model_cache_dir)
    return (folder / "tokenizer.json").read_text()


def tokenizer_of(**parts: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(description()) | parts))


def encode_all_of(raw: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    return lambda texts: [raw.encode(text, add_special_tokens=False).ids for text in texts]


PRE_TOKENIZERS = {
    "gpt2": _BYTE_LEVEL,
    "smollm2": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "llama3": split_by(LLAMA_3_PATTERN),
    "qwen2": split_by(QWEN_2_PATTERN),
}


@cache
def words_of(kind: str) -> tuple[Tokenizer, Words]:
    raw = tokenizer_of(pre_tokenizer=PRE_TOKENIZERS[kind])
    words = prove_words(raw, encode_all_of(raw), random.Random(1))
    assert words is not None
    return raw, words


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@settings(deadline=None)
@given(fragments=st.lists(_FRAGMENTS | st.text(max_size=8), max_size=40))
def test_any_text_has_the_librarys_ids(kind: str, fragments: list[str]) -> None:
    raw, words = words_of(kind)
    text = "".join(fragments)
    assert words.pack_all([text]) == [pack_tokens(raw.encode(text, add_special_tokens=False).ids)]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_plain_words_need_no_tokenizer(kind: str) -> None:
    raw, words = words_of(kind)
    asked: list[str] = []
    counted = Words(words._atoms, words._words, words._word_to_packed, lambda texts: asked.extend(texts) or [])
    text = "<|im_start|>user\nWhere is the house, and who was there?<|im_end|>\n"
    assert counted.pack_all([text]) == [pack_tokens(raw.encode(text, add_special_tokens=False).ids)]
    assert asked == []


def test_words_of_common_texts_are_looked_up_though_they_are_several_tokens() -> None:
    raw = tokenizer_of()
    asked: list[str] = []
    right = encode_all_of(raw)

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return right(texts)

    words = prove_words(raw, encode_all, random.Random(1), common_texts=["<|im_start|>xyzzyq said\n"])
    assert words is not None
    asked.clear()
    assert words.pack_all(["xyzzyq"]) == [pack_tokens(raw.encode("xyzzyq", add_special_tokens=False).ids)]
    assert asked == []


def test_each_word_that_the_table_does_not_have_is_asked_for_once() -> None:
    _, words = words_of("gpt2")
    asked: list[str] = []

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[1, 2]] * len(texts)

    counted = Words(words._atoms, words._words, words._word_to_packed, encode_all)
    (packed,) = counted.pack_all(["xyzzyq xyzzyq the xyzzyq"])
    assert sorted(asked) == [" xyzzyq", "xyzzyq"]
    assert packed == pack_tokens([1, 2, 1, 2]) + words._word_to_packed[" the"] + pack_tokens([1, 2])


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": _BYTE_LEVEL | {"add_prefix_space": True}},
        {"pre_tokenizer": _BYTE_LEVEL | {"use_regex": False}},
        {"pre_tokenizer": split_by(r"\p{L}+|.")},
        {"pre_tokenizer": None},
    ],
    ids=["lowercase", "prefix_space", "no_pattern", "other_pattern", "no_pre_tokeniser"],
)
def test_other_steps_get_no_table(parts: dict[str, Any]) -> None:
    raw = tokenizer_of(**parts)
    assert find_words(raw, encode_all_of(raw)) is None


def test_sentencepiece_manner_gets_no_table() -> None:
    raw = byte_fallback_tokenizer()
    assert find_words(raw, encode_all_of(raw)) is None


@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip", "single_word"])
def test_added_token_that_looks_around_itself_forbids_the_table(flag: str) -> None:
    raw = tokenizer_of()
    raw.add_tokens([AddedToken("<odd>", **{"normalized": False, flag: True})])
    assert find_words(raw, encode_all_of(raw)) is None


def test_table_that_random_texts_disprove_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    raw = tokenizer_of()
    right = encode_all_of(raw)

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        # Alone each is right; together with others it is not, as if the pattern were another one.
        return [ids if len(text) < 40 else [*ids, 0] for text, ids in zip(texts, right(texts), strict=True)]

    with caplog.at_level(logging.ERROR):
        assert prove_words(raw, encode_all, random.Random(1)) is None
    assert "word by word" in caplog.text


def test_mismatch_ends_the_use_of_the_table() -> None:
    raw, _ = words_of("gpt2")
    cuts = Cuts(is_cut_between_words=True)
    segments = Segments(
        lambda texts: [pack_tokens([7]) for _ in texts],
        cuts,
        pack_whole=lambda texts: [pack_tokens(ids) for ids in encode_all_of(raw)(texts)],
    )
    text = sample_text(random.Random(0), 20)
    segments.compare(text, segments.complete(segments.look_up(text)))
    assert not segments.is_on
    assert segments.complete(segments.look_up(text)) == segments.whole(text)
