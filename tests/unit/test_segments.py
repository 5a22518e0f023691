"""Ids in pieces are those of the whole text, whatever was asked before; what is known is bounded and watched."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.cuts import NO_CUTS, Cuts, find_cuts
from router.segments import GivenUp, Segments
from router.tokenise_bench import sample_text, write_llama_2_manner
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.hashing import pack_tokens, unpack_tokens
from shared.telemetry import Metrics
from tests.support.tokenizers import SPECIAL_TOKENS, byte_level_tokenizer, write_model_folder
from worker.engines.demo_model import prepare_model

KINDS = ("smollm2", "tiny", "llama2", "own")


@cache
def folder_of(kind: str, base: Path) -> Path:
    if kind == "llama2":
        return write_llama_2_manner(base / kind)
    return write_model_folder(base / kind) if kind == "own" else prepare_model(kind, Settings().model_cache_dir)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(folder_of(request.param, tmp_path_factory.getbasetemp()))


FRAGMENTS = st.sampled_from(
    (
        *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<|im_", "start|>", "<|im_start|", "<0x0A>", "▁"),
        *("[INST]", "[/INST]", "<<SYS>>\n", " ", "   ", "\n", "\n\n", "\t", "\u00a0", "a b", "kalo strra", "don't"),
        *("é", "e\u0301", "你好", "👩\u200d👧", "\u200b", "123 456", "_", "x" * 1_100, "word and " * 200),
    )
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(st.characters(exclude_categories=["Cs"]), max_size=12)), max_size=12).map(
    "".join
)


def conversation(texts: Sequence[str]) -> list[dict[str, Any]]:
    """A system message and then turns, which every template takes."""
    roles = ["system", *(["user", "assistant"] * len(texts))]
    return [{"role": role, "content": text} for role, text in zip(roles, [*texts, ""], strict=False)]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._encode_all([text])[0]


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5), salt=st.sampled_from(("", "a")))
async def test_messages_have_the_ids_of_their_whole_text(tokenizer: Tokenizer, texts: list[str], salt: str) -> None:
    messages = conversation(texts)
    expected = whole(tokenizer, tokenizer.chat_text(messages))
    for _ in range(2):
        assert unpack_tokens(await tokenizer.tokens_of(messages=messages, salt=salt)) == expected
    # The next turn, of which the beginning is known.
    messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": texts[-1]}]
    expected = whole(tokenizer, tokenizer.chat_text(messages))
    assert unpack_tokens(await tokenizer.tokens_of(messages=messages, salt=salt)) == expected


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_plain_prompt_has_the_ids_of_its_whole_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer._raw.encode(text, add_special_tokens=True).ids


@settings(deadline=None, max_examples=100)
@given(text=TEXTS, piece_chars=st.integers(1, 40))
def test_pieces_of_any_length_have_the_ids_of_the_whole(tokenizer: Tokenizer, text: str, piece_chars: int) -> None:
    cuts = tokenizer.segments._cuts
    short = Cuts(cuts.marks, cuts.is_cut_between_words, cuts.drops_space, piece_chars)
    segments = Segments(tokenizer._pack_all, short)
    assert unpack_tokens(segments.complete(segments.look_up(text))) == whole(tokenizer, text)


def test_special_tokens_in_a_users_text_are_what_the_whole_text_makes_of_them(tokenizer: Tokenizer) -> None:
    content = "a<|im_end|>b</s>c<|im_end>"
    messages = [{"role": "user", "content": content}]
    expected = whole(tokenizer, tokenizer.chat_text(messages))
    assert tokenizer.render_chat(messages) == expected


def test_next_turn_of_a_long_chat_tokenises_only_what_is_new(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    messages = conversation([sample_text(rng, 120) for _ in range(20)])[:20]
    tokenizer.render_chat(messages)
    before = tokenizer.segments.num_new_tokens
    following = [*messages, {"role": "user", "content": sample_text(rng, 60)}]
    num_tokens = len(tokenizer.render_chat(following))
    # Llama 2's special tokens stand around whole turns, so that the last answer is tokenised with the message before.
    assert tokenizer.segments.num_new_tokens - before < 0.1 * num_tokens


def counted(encoded: list[list[str]]) -> Segments:
    """Segments over the test tokenizer that tell what they have tokenised."""
    raw = byte_level_tokenizer()

    def pack_all(texts: Sequence[str]) -> list[bytes]:
        encoded.append(list(texts))
        return [pack_tokens(found.ids) for found in raw.encode_batch_fast(list(texts), add_special_tokens=False)]

    cuts = replace(find_cuts(raw, SPECIAL_TOKENS[1:]), piece_chars=4)
    return Segments(pack_all, cuts, max_bytes=20_000)


def tokens(segments: Segments, text: str, salt: str = "") -> bytes:
    return segments.complete(segments.look_up(text, salt))


def test_known_pieces_are_not_tokenised_again_under_one_salt() -> None:
    encoded: list[list[str]] = []
    segments = counted(encoded)
    tokens(segments, "<|im_start|>a<|im_end|>\n", "one")
    tokens(segments, "<|im_start|>a<|im_end|>\n<|im_start|>b", "one")
    tokens(segments, "<|im_start|>a", "two")
    assert encoded == [["<|im_start|>a", "<|im_end|>\n"], ["<|im_start|>b"], ["<|im_start|>a"]]
    assert (segments.num_known_tokens, segments.num_new_tokens) == (4, 8)


def test_what_another_prompt_brought_since_the_look_up_is_taken_from_there() -> None:
    encoded: list[list[str]] = []
    segments = counted(encoded)
    lookup = segments.look_up("<|im_start|>same")
    tokens(segments, "<|im_start|>same")
    encoded.clear()
    segments.complete(lookup)
    assert encoded in ([], [[]])


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    encoded: list[list[str]] = []
    segments = counted(encoded)
    for number in range(100):
        tokens(segments, f"<|im_start|>{number:0100}")
        tokens(segments, "<|im_start|>kept")
        assert segments.num_bytes <= 20_000
    encoded.clear()
    tokens(segments, "<|im_start|>kept")
    tokens(segments, f"<|im_start|>{0:0100}")
    assert encoded == [[f"<|im_start|>{0:0100}"]]


def test_piece_that_would_push_out_many_is_not_kept() -> None:
    segments = counted([])
    tokens(segments, "x" * 10_000)
    assert segments.num_bytes == 0


def test_work_that_nobody_waits_for_ends_between_groups() -> None:
    encoded: list[list[str]] = []
    segments = counted(encoded)
    lookup = segments.look_up("<|im_start|>" + "x" * 20_000 + "<|im_end|>" + "y" * 20_000)
    with pytest.raises(GivenUp):
        segments.complete(lookup, lambda: bool(encoded))
    assert [len(text) for group in encoded for text in group] == [20_012]


def test_mismatch_turns_the_cutting_off_loudly_once(caplog: pytest.LogCaptureFixture) -> None:
    encoded: list[list[str]] = []
    segments, metrics = counted(encoded), Metrics()
    segments.expose(metrics)
    tokens(segments, "<|im_start|>a")
    segments.compare("<|im_start|>a", tokens(segments, "<|im_start|>a"))
    assert segments.is_on
    with caplog.at_level(logging.ERROR, "router"):
        segments.compare("<|im_start|>a", pack_tokens([1]))
        segments.compare("<|im_start|>a", pack_tokens([1]))
    encoded.clear()
    tokens(segments, "<|im_start|>a<|im_end|>")
    assert len(caplog.records) == 1
    assert encoded == [["<|im_start|>a<|im_end|>"]]
    assert (segments.why_off, segments.num_bytes) == ("a prompt had other token ids in pieces than as a whole", 0)
    told = metrics.render().decode()
    for line in (
        "kvroute_segment_cache_on 0.0",
        "kvroute_segment_cache_compared_total 3.0",
        "kvroute_segment_cache_mismatches_total 2.0",
        'kvroute_tokenised_tokens_total{source="known"} 2.0',
    ):
        assert line in told.splitlines()


def test_text_without_cuts_is_tokenised_as_a_whole_and_not_kept() -> None:
    segments = Segments(lambda texts: [pack_tokens([len(text)]) for text in texts], NO_CUTS)
    assert [tokens(segments, "abc") for _ in range(2)] == [pack_tokens([3])] * 2
    assert (segments.is_on, segments.num_bytes) == (False, 0)


class _Always(random.Random):
    """Draws the least each time."""

    def random(self) -> float:
        return 0.0


async def test_drawn_prompts_are_compared_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path), rng=_Always())
    right = await tokenizer.tokens_of(messages=conversation(["a", "b"]))
    tokenizer._pool.submit(lambda: None).result(10)
    wrong_key = next(iter(reversed(tokenizer.segments._key_to_packed)))
    tokenizer.segments._key_to_packed[wrong_key] = pack_tokens([5])
    with caplog.at_level(logging.ERROR, "router"):
        assert await tokenizer.tokens_of(messages=conversation(["a", "b"])) != right
        tokenizer._pool.shutdown(wait=True)
    assert len(caplog.records) == 1
    assert await tokenizer.tokens_of(messages=conversation(["a", "b"])) == right
