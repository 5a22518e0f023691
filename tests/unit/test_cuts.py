"""Cuts are made where a tokenizer's description proves them, and declined with a reason where it does not."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from router.cuts import _WORD_PATTERNS, NO_CUTS, disproof, find_cuts, prove_cuts
from router.tokenise_bench import write_llama_2_manner
from shared.config import Settings
from tests.support.tokenizers import SPECIAL_TOKENS, byte_level_tokenizer
from worker.engines.demo_model import prepare_model

MARKS = SPECIAL_TOKENS[1:]


def encode_all_of(raw: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    return lambda texts: [found.ids for found in raw.encode_batch_fast(list(texts), add_special_tokens=False)]


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The description of a tokenizer in Llama 2's manner."""
    return (write_llama_2_manner(tmp_path_factory.mktemp("llama2")) / "tokenizer.json").read_text()


def changed(told: str, **parts: Any) -> Tokenizer:
    """The same tokenizer with other steps."""
    return Tokenizer.from_str(json.dumps(json.loads(told) | parts))


def words_of(size: int = 3_000) -> str:
    rng = random.Random(size)
    return " ".join(rng.choice(("kalo", "strra", "ming,", "x1", "don't", "\n")) for _ in range(size))


def test_pieces_make_up_the_text_and_begin_at_marks_and_between_words() -> None:
    cuts = replace(find_cuts(byte_level_tokenizer(), MARKS), is_cut_between_words=True, piece_chars=5)
    text = "one two three  four<|im_start|>a b<|im_end|><|im_end|>five, six seven\n eight nine"
    assert cuts.pieces(text) == [
        "one two",
        " three  four",
        "<|im_start|>a",
        " b",
        "<|im_end|>",
        "<|im_end|>five, six",
        " seven\n eight",
        " nine",
    ]


def test_short_texts_between_marks_share_a_piece() -> None:
    cuts = replace(find_cuts(byte_level_tokenizer(), MARKS), piece_chars=80)
    text = "<|im_start|>a<|im_end|>\n<|im_start|>b<|im_end|>\n<|im_start|>c"
    assert cuts.pieces(text) == ["<|im_start|>a<|im_end|>\n", "<|im_start|>b<|im_end|>\n", "<|im_start|>c"]
    assert cuts.pieces("") == []


def test_text_whose_marks_are_told_is_cut_at_those_alone() -> None:
    cuts = replace(find_cuts(byte_level_tokenizer(), MARKS), piece_chars=4)
    text = "<|im_start|>a<|im_end|>\n<|im_start|>b"
    assert cuts.pieces(text, [0, 24]) == ["<|im_start|>a<|im_end|>\n", "<|im_start|>b"]
    assert cuts.pieces(text, []) == [text]


def test_text_that_begins_alike_has_pieces_in_common(llama_2: str) -> None:
    cuts = replace(find_cuts(Tokenizer.from_str(llama_2), ["<s>", "</s>"]), piece_chars=1024)
    text = "<s>[INST] " + words_of()
    longer = cuts.pieces(text + " and a question")
    assert cuts.pieces(text)[:-1] == longer[: len(cuts.pieces(text)) - 1]
    assert len(longer) > 10


@pytest.fixture(scope="module")
def smollm2() -> str:
    """The description of SmolLM2's tokenizer."""
    return (prepare_model("smollm2", Settings().model_cache_dir) / "tokenizer.json").read_text()


def test_smollm2_is_cut_at_its_special_tokens_and_between_words(smollm2: str) -> None:
    raw = Tokenizer.from_str(smollm2)
    cuts = prove_cuts(raw, MARKS, encode_all_of(raw), random.Random(1))
    assert cuts.marks is not None
    assert cuts.marks.findall("<|im_start|>user <repo_name><|im_end|>") == ["<|im_start|>", "<|im_end|>"]
    assert (cuts.is_cut_between_words, cuts.drops_space, cuts.doubts) == (True, False, ())


@pytest.mark.parametrize("pattern", sorted(_WORD_PATTERNS))
@pytest.mark.parametrize("seed", range(5))
def test_known_patterns_keep_words_apart_under_smollm2s_merges(smollm2: str, pattern: str, seed: int) -> None:
    raw = Tokenizer.from_str(smollm2)
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    cuts = prove_cuts(raw, MARKS, encode_all_of(raw), random.Random(seed))
    assert (cuts.is_cut_between_words, cuts.doubts) == (True, ())


@pytest.mark.parametrize("add_prefix_space", [False, True])
def test_digits_apart_and_prefix_space_keep_words_apart(smollm2: str, add_prefix_space: bool) -> None:
    raw = Tokenizer.from_str(smollm2)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)]
    )
    cuts = prove_cuts(raw, MARKS, encode_all_of(raw), random.Random(1))
    assert (cuts.is_cut_between_words, cuts.doubts) == (True, ())


def test_llama_2_manner_is_cut_between_words_without_their_space(llama_2: str) -> None:
    raw = Tokenizer.from_str(llama_2)
    cuts = prove_cuts(raw, ["<s>", "</s>"], encode_all_of(raw), random.Random(1))
    assert (cuts.is_cut_between_words, cuts.drops_space, cuts.doubts) == (True, True, ())


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("split", [False, True])
def test_each_manner_of_prefix_space_is_handled(llama_2: str, scheme: str, split: bool) -> None:
    raw = changed(llama_2, normalizer=None)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    cuts = prove_cuts(raw, ["<s>", "</s>"], encode_all_of(raw), random.Random(1))
    assert (cuts.is_cut_between_words, cuts.drops_space, cuts.doubts) == (True, False, ())


def test_keeping_the_space_that_the_tokenizer_adds_by_itself_would_be_found_out(llama_2: str) -> None:
    raw = Tokenizer.from_str(llama_2)
    cuts = replace(find_cuts(raw, ["<s>"]), drops_space=False)
    assert disproof(cuts, raw, encode_all_of(raw), random.Random(1)) is not None


def test_piece_of_the_vocabulary_across_words_forbids_cuts_between_them(llama_2: str) -> None:
    told = json.loads(llama_2)
    told["model"]["vocab"]["a▁b"] = len(told["model"]["vocab"])
    told["model"]["merges"] = [["▁", "b"], ["a", "▁b"]]
    told["model"]["vocab"].setdefault("▁b", len(told["model"]["vocab"]))
    cuts = find_cuts(Tokenizer.from_str(json.dumps(told)), ["<s>"])
    assert not cuts.is_cut_between_words
    assert cuts.doubts == ("between words: vocabulary piece 'a▁b' spans them",)
    assert cuts.marks is not None


@pytest.mark.parametrize(
    ("token", "doubt"),
    [
        (AddedToken("<m>", lstrip=True, normalized=False), "takes white space before it"),
        (AddedToken("<m>", single_word=True, normalized=False), "depends on the letters around"),
        (AddedToken("<m>", normalized=True), "is looked for in normalised text only"),
        (AddedToken("\n<m>", normalized=False), "takes white space before it"),
    ],
)
def test_added_token_that_depends_on_what_stands_before_is_no_mark(token: AddedToken, doubt: str) -> None:
    raw = byte_level_tokenizer()
    raw.add_tokens([token])
    cuts = find_cuts(raw, [token.content])
    assert cuts.marks is None
    assert cuts.doubts[0] == f"{token.content}: {doubt}"


@pytest.mark.parametrize("other", ["x<m>", "x<", "<m><m>"])
def test_added_token_that_another_can_reach_into_is_no_mark(other: str) -> None:
    raw = byte_level_tokenizer()
    raw.add_tokens([AddedToken("<m>", normalized=False), AddedToken(other, normalized=False)])
    cuts = find_cuts(raw, ["<m>"])
    assert (cuts.marks, cuts.doubts[0]) == (None, f"<m>: added token {other!r} can reach into it")


def test_added_token_that_takes_white_space_behind_it_is_a_mark_and_forbids_cuts_between_words() -> None:
    raw = byte_level_tokenizer()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_tokens([AddedToken("<m>", rstrip=True, normalized=False)])
    cuts = prove_cuts(raw, ["<m>", *MARKS], encode_all_of(raw), random.Random(1))
    assert cuts.marks is not None
    assert cuts.marks.fullmatch("<m>")
    assert cuts.doubts == ("between words: added token '<m>' can take a space",)


@pytest.mark.parametrize(
    ("normaliser", "name"),
    [
        (normalizers.Strip(), "Strip"),
        (normalizers.Prepend(" "), "Prepend"),
        (normalizers.Replace("a b", "c"), "Replace"),
    ],
)
def test_unknown_normaliser_forbids_cuts_between_words_and_not_at_marks(normaliser: Any, name: str) -> None:
    raw = byte_level_tokenizer()
    raw.normalizer = normaliser
    cuts = prove_cuts(raw, MARKS, encode_all_of(raw), random.Random(1))
    assert cuts.marks is not None
    assert cuts.doubts == (f"between words: normaliser {name} is not known to leave words apart",)


def test_unknown_pre_tokeniser_forbids_cuts_between_words() -> None:
    raw = byte_level_tokenizer()
    raw.pre_tokenizer = pre_tokenizers.Split("a b", "isolated")
    assert find_cuts(raw, MARKS).doubts == ("between words: pre-tokeniser Split is not known to leave words apart",)


def test_random_merges_forbid_all_cuts_loudly(caplog: pytest.LogCaptureFixture) -> None:
    raw = byte_level_tokenizer()
    raw.model.dropout = 0.5
    with caplog.at_level(logging.WARNING, "router"):
        cuts = prove_cuts(raw, MARKS, encode_all_of(raw), random.Random(1))
    assert not cuts.is_any
    assert caplog.messages == ["prompts are tokenised as a whole, at full cost: the model draws its merges at random"]


def test_tokenizer_that_disproves_its_description_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    raw = byte_level_tokenizer()
    right = encode_all_of(raw)

    def wrong(texts: Sequence[str]) -> list[list[int]]:
        return [[len(text), *found] for text, found in zip(texts, right(texts), strict=True)]

    with caplog.at_level(logging.ERROR, "router"):
        cuts = prove_cuts(raw, MARKS, wrong, random.Random(1))
    assert replace(cuts, doubts=()) == NO_CUTS
    assert [record.levelname for record in caplog.records] == ["ERROR"]
