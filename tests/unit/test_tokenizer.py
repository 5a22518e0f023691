"""Chat templates and token ids, and text that comes back piece by piece."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.detokenizer import Detokenizer
from router.tokenizer import THREAD_THRESHOLD_CHARS, Tokenizer
from shared.config import Settings
from shared.errors import ConfigError, InvalidRequest
from shared.hashing import pack_tokens, tokenizer_fingerprint, unpack_tokens
from shared.types import FinishReason
from tests.support.tokenizers import EOS_TOKEN_ID, byte_fallback_tokenizer, write_model_folder
from worker.engines.demo_model import prepare_model

TEXTS = ("plain words, 123", "é你好🎉 mixed", "好🎉🎉éé", "family 👨‍👩‍👧‍👦 end", " leading space", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def streamed(detokenizer: Detokenizer, token_ids: list[int], finish: FinishReason | None = None) -> str:
    """All text of a stream whose tokens come one by one."""
    return "".join(detokenizer.push([token_id]) for token_id in token_ids) + (
        detokenizer.push([], finish) if finish else detokenizer.flush()
    )


def test_chat_is_rendered_in_the_models_template(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.render_chat(user("Hi"))
    assert token_ids == [
        1, *tokenizer.encode("user\nHi"), EOS_TOKEN_ID, *tokenizer.encode("\n"), 1, *tokenizer.encode("assistant\n")
    ]  # fmt: skip


def test_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.render_chat(user("Hi"), add_generation_prompt=False)
    assert token_ids == [1, *tokenizer.encode("user\nHi"), EOS_TOKEN_ID, *tokenizer.encode("\n")]


def test_developer_role_is_rendered_as_system(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat([{"role": "developer", "content": "x"}]) == tokenizer.render_chat(
        [{"role": "system", "content": "x"}]
    )


def test_failing_template_is_the_requests_fault_and_names_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages: no tools here") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


def test_message_that_the_template_does_not_foresee_names_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat([{"role": "user"}])
    assert caught.value.param == "messages"


def test_text_that_is_not_unicode_names_its_parameter(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode("half \ud83d")
    assert caught.value.param == "prompt"


def test_model_without_template_refuses_chat_and_serves_completions(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.render_chat(user("Hi"))
    assert caught.value.param == "messages"
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"


def test_eos_ids_come_from_tokenizer_and_generation_config(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {EOS_TOKEN_ID, 7}


def test_fingerprint_is_that_of_the_folder(tokenizer: Tokenizer, folder: Path) -> None:
    assert tokenizer.fingerprint == tokenizer_fingerprint(folder)


def test_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Tokenizer(tmp_path / "none")


def test_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a tokenizer from"):
        Tokenizer(tmp_path)


def test_unknown_token_id_in_a_prompt_names_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.check_token_ids([5, tokenizer.vocab_size])
    assert caught.value.param == "prompt[1]"


@pytest.fixture
def threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of the tokenizer from now on, whether it was made on the test's own thread."""
    own, pack_all, seen = threading.current_thread(), tokenizer._pack_all, list[bool]()

    def watched(texts: Sequence[str]) -> list[bytes]:
        seen.append(threading.current_thread() is own)
        return pack_all(texts)

    monkeypatch.setattr(tokenizer.segments, "_pack_all", watched)
    return seen


async def test_much_new_text_is_tokenised_in_a_thread_and_little_is_not(
    tokenizer: Tokenizer, threads: list[bool]
) -> None:
    await tokenizer.tokens_of(prompt="x" * THREAD_THRESHOLD_CHARS)
    await tokenizer.tokens_of(prompt="x" * (THREAD_THRESHOLD_CHARS + 1))
    assert threads == [True, False]


async def test_much_known_text_needs_no_thread(tokenizer: Tokenizer, threads: list[bool]) -> None:
    first = await tokenizer.tokens_of(messages=user("z" * 20_000))
    second = await tokenizer.tokens_of(messages=[*user("z" * 20_000), *user("new")])
    assert (threads[0], threads[-1]) == (False, True)
    assert tokenizer.render_chat([*user("z" * 20_000), *user("new")]) == unpack_tokens(second)
    assert second.startswith(first[: 4 * 20_000])


async def test_very_long_conversation_is_rendered_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, render, seen = threading.current_thread(), tokenizer._render, list[bool]()

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread() is own)
        assert render is not None
        return render(*args, **options)

    monkeypatch.setattr(tokenizer, "_render", watched)
    # What has a name is rendered each time.
    named = {"role": "user", "content": "x", "name": "ann"}
    await tokenizer.tokens_of(messages=[named])
    await tokenizer.tokens_of(messages=[{**named, "content": "x" * 200_000}])
    await tokenizer.tokens_of(messages=[named] * 1_000)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": ["x" * 200_000]}}}
    await tokenizer.tokens_of(messages=[*user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}])
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 200_000}}
    await tokenizer.tokens_of(messages=user("x"), tools=[tool])
    assert seen == [True, False, False, False, False]


async def test_tokens_of_a_request_are_those_of_the_plain_calls(tokenizer: Tokenizer) -> None:
    assert unpack_tokens(await tokenizer.tokens_of(messages=user("Hi"))) == tokenizer.render_chat(user("Hi"))
    assert unpack_tokens(await tokenizer.tokens_of(prompt="Hi")) == tokenizer.encode("Hi")
    assert unpack_tokens(await tokenizer.tokens_of(prompt=[5, 6])) == [5, 6]


async def test_cancelled_tokenising_ends_after_the_piece_under_way(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, pack_all = threading.Event(), threading.Event(), tokenizer._pack_all
    begun_texts: list[str] = []

    def held(texts: Sequence[str]) -> list[bytes]:
        begun_texts.extend(texts)
        begun.set()
        go_on.wait(10)
        return pack_all(texts)

    monkeypatch.setattr(tokenizer.segments, "_pack_all", held)
    pieces = ["<|im_start|>" + "q" * 20_000, "<|im_end|>" + "q" * 20_000]
    task = asyncio.create_task(tokenizer.tokens_of(prompt="".join(pieces)))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    # All threads meet only once none of them is at work.
    meeting = threading.Barrier(2)
    await asyncio.gather(*(asyncio.wrap_future(tokenizer._pool.submit(meeting.wait, 10)) for _ in range(2)))
    assert begun_texts == pieces[:1]


async def test_event_loop_goes_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    num_turns = 0
    num_words = 25_000
    # A thread that kept the interpreter's lock would leave the loop a handful of turns, at its start and end, however
    # long the text is; so a machine that is done before the loop had its turns is given more to do.
    while num_turns <= 20 and num_words < 1_000_000:
        # Words that come once each, since what is known of earlier text costs nothing.
        text = " ".join(f"{rng.getrandbits(40):x}" for _ in range(num_words))
        encoding = asyncio.create_task(tokenizer.tokens_of(prompt=text))
        num_turns = 0
        while not encoding.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        assert len(unpack_tokens(await encoding)) == len(text)
        num_words *= 2
    assert num_turns > 20


async def test_many_threads_tokenise_at_once_and_agree(tokenizer: Tokenizer) -> None:
    text = "words and é你好🎉 " * 1000
    answers = await asyncio.gather(*(tokenizer.tokens_of(prompt=text) for _ in range(16)))
    assert list(map(unpack_tokens, answers)) == [tokenizer.encode(text)] * 16


@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_back_whole_one_token_at_a_time(tokenizer: Tokenizer, text: str) -> None:
    pieces = []
    detokenizer = tokenizer.detokenizer(tokenizer.encode("prompt"))
    for token_id in tokenizer.encode(text):
        pieces.append(detokenizer.push([token_id]))
    assert ("".join(pieces), detokenizer.flush()) == (text, "")
    assert not any("\ufffd" in piece for piece in pieces)


def test_how_tokens_are_grouped_changes_nothing(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    token_ids = tokenizer.encode("".join(TEXTS) * 3)
    for stop in ((), ("👧",), ("zzz", "end ")):
        expected = streamed(tokenizer.detokenizer(stop=stop), token_ids)
        for _ in range(50):
            detokenizer, text, at = tokenizer.detokenizer(stop=stop), "", 0
            while at < len(token_ids):
                size = rng.randint(1, 7)
                text += detokenizer.push(token_ids[at : at + size])
                at += size
            assert text + detokenizer.flush() == expected


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("a"), 1, 1, 2, *tokenizer.encode("b")]
    assert streamed(tokenizer.detokenizer(), token_ids) == "ab"


def test_unfinished_character_comes_out_at_the_end_as_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    token_ids = tokenizer.encode("a🎉")
    assert [detokenizer.push([token_id]) for token_id in token_ids[:-1]] == ["a", "", "", ""]
    assert detokenizer.push([], FinishReason.LENGTH) == "\ufffd"


def test_endless_garbage_is_not_held_for_ever(tokenizer: Tokenizer) -> None:
    continuation_byte = tokenizer.encode("é")[-1:]
    garbage = next(token_id for token_id in range(3, 259) if tokenizer.decode([token_id]) == "\ufffd")
    detokenizer = tokenizer.detokenizer(continuation_byte)
    text = "".join(detokenizer.push([garbage]) for _ in range(100))
    assert len(text) >= 64
    assert set(text) == {"\ufffd"}


def test_stop_string_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(stop=["STOP"])
    text = "".join(detokenizer.push([token_id]) for token_id in tokenizer.encode("go on STOP never"))
    assert (text, detokenizer.is_stopped, detokenizer.flush()) == ("go on ", True, "")
    assert detokenizer.num_tokens == len(tokenizer.encode("go on STOP"))


def test_beginning_of_a_stop_string_is_held_until_it_is_decided(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(stop=["abcd"])
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode("xabcabcx")]
    assert pieces == ["x", "", "", "", "abc", "", "", "abcx"]


def test_held_beginning_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer.detokenizer(stop=["abcd"]), tokenizer.encode("xabc"), FinishReason.LENGTH) == "xabc"


def test_the_stop_string_that_is_complete_first_wins(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(stop=["bcdef", "cd"])
    assert detokenizer.push(tokenizer.encode("abcdef")) == "ab"


def test_stop_string_across_a_cut_character(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer(stop=["🎉"])
    assert streamed(detokenizer, tokenizer.encode("你好🎉!")) == "你好"
    assert detokenizer.is_stopped


def test_stop_token_counts_and_gives_no_text(tokenizer: Tokenizer) -> None:
    visible = tokenizer.encode("ab")
    detokenizer = tokenizer.detokenizer(stop_token_ids=visible[-1:])
    assert detokenizer.push(visible, FinishReason.STOP) == "a"
    assert detokenizer.num_tokens == 2


def test_same_token_gives_text_where_length_ends_the_stream(tokenizer: Tokenizer) -> None:
    visible = tokenizer.encode("ab")
    assert tokenizer.detokenizer(stop_token_ids=visible[-1:]).push(visible, FinishReason.LENGTH) == "ab"


def test_random_bytes_stream_as_they_decode_at_once(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    for _ in range(200):
        text = "".join(rng.choice("ab é你好🎉👩\u200d") for _ in range(rng.randint(0, 40)))
        assert streamed(tokenizer.detokenizer(), tokenizer.encode(text)) == text


def test_byte_fallback_with_prefix_space_streams_as_it_decodes_at_once() -> None:
    raw = byte_fallback_tokenizer()
    rng = random.Random(3)
    prompt = raw.encode("abc:", add_special_tokens=False).ids
    for _ in range(200):
        text = "".join(rng.choice("ab é你好🎉👩\u200d") for _ in range(rng.randint(1, 30)))
        detokenizer = Detokenizer(raw.decode, prompt)
        # The tokenizer puts a space before every text; after a prompt it is part of the answer.
        assert streamed(detokenizer, raw.encode(text, add_special_tokens=False).ids) == " " + text


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    """SmolLM2's own tokenizer, as the demo uses it."""
    return Tokenizer(prepare_model("smollm2", Settings().model_cache_dir))


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_streams_text_back_whole(smollm2: Tokenizer, text: str) -> None:
    prompt = smollm2.render_chat(user("Hi"))
    assert streamed(smollm2.detokenizer(prompt), smollm2.encode(text)) == text


def test_smollm2_chat_has_its_default_system_prompt(smollm2: Tokenizer) -> None:
    text = smollm2.decode(smollm2.render_chat(user("Hi")))
    assert text.startswith("system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("user\nHi\nassistant\n")
    assert smollm2.eos_token_ids == {2}


def test_answer_to_a_chat_reads_as_after_a_prompt_of_which_nothing_is_known(tokenizer: Tokenizer) -> None:
    prompt = pack_tokens(tokenizer.render_chat([{"role": "user", "content": "Where?"}]))
    token_ids = tokenizer.encode(" here \u00e9 and there")
    known, unknown = tokenizer.detokenizer(prompt), Detokenizer(tokenizer.decode, unpack_tokens(prompt)[-6:])
    told = [[one.push([token_id]) for token_id in token_ids] + [one.flush()] for one in (known, unknown)]
    assert told[0] == told[1]
    assert "".join(told[0]).strip() == "here \u00e9 and there"
