"""Text to token ids and back: a model's own tokenizer and chat template, used by routers alone.

Workers get token ids and give token ids; how long a prompt may be is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from router.cuts import Cuts, prove_cuts
from router.detokenizer import CONTEXT_TOKENS, Detokenizer
from router.segments import Lookup, Segments
from router.skeletons import Message, Skeletons, Written
from router.template_doubts import template_doubt
from router.tokenizer_files import load_tokenizer
from router.words import Words, prove_words
from shared.errors import ConfigError, InvalidRequest
from shared.hashing import TOKEN_SIZE_BYTES, pack_tokens, tokenizer_fingerprint, unpack_tokens
from shared.telemetry import Readings

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

__all__ = ["THREAD_THRESHOLD_CHARS", "Detokenizer", "Message", "Tokenizer"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

THREAD_THRESHOLD_CHARS = 8192
"""Longer texts, what is known of them left out, are tokenised in a thread: at 0.2 to 1 us a character they would hold
the event loop for over 2 ms; the way to a thread and back costs some 0.05 ms."""
_RENDER_THRESHOLD_CHARS = 131_072
"""Longer conversations are rendered and cut in a thread, too: both take some 4 ns a character."""
_CHARS_PER_MESSAGE = 512
"""As which a message counts besides its text: its own part of rendering, some 3 us."""
_CONTEXT_BYTES = CONTEXT_TOKENS * TOKEN_SIZE_BYTES
_NUM_THREADS = 2
_COMPARED_SHARE = 1 / 1000
"""Of the prompts, those that are tokenised once more as a whole, in a thread."""
_PROOF_SEED = 0
_PROBE_ROLES = (("user", "assistant", "user"), ("system", "user", "assistant", "user"))
"""Conversations that show what a template writes; not every one takes a system message."""
_MAX_UNWRITTEN = 32
"""Special tokens that plain prompts are cut at, where there is no template to tell which are in use."""


class Tokenizer:
    """One model's tokenizer; safe to use from several threads at once.

    Gives the same ids whatever it was asked before: only how long it takes depends on which texts it has seen.
    """

    def __init__(self, folder: Path, *, rng: random.Random | None = None, why_borrowed: str = "") -> None:
        """Read the tokenizer of a model folder. Never goes to the network; takes seconds, for its imports.

        `rng` draws the prompts whose ids are compared; none are without it. `why_borrowed` says what is wrong with the
        router's own, where this is a worker's.

        Raises:
            ConfigError: the folder has no usable tokenizer.
        """
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} is not a folder")
        try:
            loaded = load_tokenizer(folder)
        except Exception as error:
            # The library raises whatever its parsers meet; to the user all of it means one thing.
            raise ConfigError(f"cannot load a tokenizer from {folder}: {_first_line(error)}") from error
        raw: RawTokenizer | None = getattr(loaded, "backend_tokenizer", None)
        if raw is None:
            raise ConfigError(f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast form (tokenizer.json)")
        # Both are changed by transformers' own calls, which are not made again: from here on nothing modifies `raw`.
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        self._render: Callable[..., Any] | None = loaded.apply_chat_template if loaded.chat_template else None
        self._knows_developer_role = "developer" in str(loaded.chat_template)
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = frozenset(_eos_token_ids(folder, loaded.eos_token_id))
        """Ids that end an answer by themselves."""
        self.fingerprint = tokenizer_fingerprint(folder)
        """Equal for equal tokenizer and template files; see `shared.hashing.tokenizer_fingerprint`."""
        self._around = self._special_tokens_around(folder)
        self.why_borrowed = why_borrowed
        self._rng = rng
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenise")
        written = self._written_by_template()
        cuts = self._proven_cuts("".join(written))
        # Some models have one for each purpose, under names.
        template = loaded.chat_template if isinstance(loaded.chat_template, str) else None
        why_off = "there is not one chat template" if template is None else template_doubt(template)
        self.skeletons = Skeletons(self._rendered, cuts.marks, why_off=why_off)
        words: Words | None = None
        if cuts.is_any:
            words = prove_words(raw, self._encode_all, random.Random(_PROOF_SEED), common_texts=written)
        self.segments = Segments(
            words.pack_all if words is not None else self._pack_all, cuts, pack_whole=self._pack_all
        )
        tails = [packed[-_CONTEXT_BYTES:] for packed in self._pack_all(written)]
        self._tail_to_text = {tail: self.decode(unpack_tokens(tail)) for tail in tails}
        """How prompts end that the template has written, as far as an answer's first text depends on it."""

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation in the model's chat template, which writes the special tokens itself.

        Raises:
            InvalidRequest: there is no template, or it cannot render these messages; says why.
        """
        return self._written(messages, tools, add_generation_prompt).text

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool
    ) -> Written:
        if tools:
            return Written(self._rendered(messages, add_generation_prompt, tools))
        found = self.skeletons.find(messages, add_generation_prompt=add_generation_prompt)
        return found or self.skeletons.write(messages, add_generation_prompt=add_generation_prompt)

    def _rendered(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        if self._render is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions instead", param="messages")
        try:
            text: str = self._render(
                [self._as_template_knows(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:
            # A template is a program of the model's author: it may raise anything on messages it does not foresee.
            logger.debug("chat template failed", exc_info=True)
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {_first_line(error)}", param="messages"
            ) from error
        return text

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of `chat_text`. Raises `InvalidRequest` as it does."""
        return unpack_tokens(self._tokens_of_text(self._written(messages, tools, add_generation_prompt), "messages"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts around one."""
        return unpack_tokens(self._tokens_of_text(Written(text), "prompt"))

    async def tokens_of(
        self,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | Sequence[int] | None = None,
        salt: str = "",
    ) -> bytes:
        """Packed token ids of a request's `messages` or `prompt`, of which it has one.

        Keeps the event loop free: where there is much text that was not seen under this salt before, a thread works on
        it. Cancelling ends that work soon.

        Raises:
            InvalidRequest: the template cannot render the messages, text is not Unicode, or an id is not in the
                vocabulary.
        """
        if prompt is not None and not isinstance(prompt, str):
            return self._checked(prompt)
        subject = messages if prompt is None else prompt
        if subject is None:
            raise TypeError("neither messages nor a prompt")
        param = "messages" if prompt is None else "prompt"
        written: Written | None = None
        if isinstance(subject, str):
            written = Written(subject)
        elif not tools:
            written = self.skeletons.find(subject, add_generation_prompt=True)
        num_chars = _num_chars(messages or (), tools) if written is None else len(written.text)

        def write() -> Written:
            return written or self._written(messages or (), tools, True)

        if num_chars > _RENDER_THRESHOLD_CHARS:
            return await self._in_thread(lambda given_up: self._tokens_of_text(write(), param, salt, given_up))
        written = write()
        lookup = self.segments.look_up(written.text, salt, written.marks)
        if lookup.missing_chars <= THREAD_THRESHOLD_CHARS:
            return self._tokens_of_text(written, param, salt, lookup=lookup)
        return await self._in_thread(lambda given_up: self._tokens_of_text(write(), param, salt, given_up, lookup))

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`render_chat` that keeps the event loop free."""
        return unpack_tokens(await self.tokens_of(messages=messages))

    def check_token_ids(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt that came as token ids. Raises `InvalidRequest` for an id that the vocabulary does not have."""
        self._checked(token_ids)
        return list(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._raw.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Text that one token adds within an answer, special tokens included; incomplete characters are U+FFFD."""
        # The second of two: decoders take a leading space off the first token.
        once, twice = (self._raw.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return twice[len(once) :] if twice.startswith(once) else once

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] | bytes = (),
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> Detokenizer:
        """A new stream's detokenizer, for an answer to `prompt_token_ids`, which may be packed."""
        context_text = None
        if isinstance(prompt_token_ids, bytes):
            packed = prompt_token_ids[-_CONTEXT_BYTES:]
            context_text = self._tail_to_text.get(packed)
            prompt_token_ids = unpack_tokens(packed)
        return Detokenizer(
            self.decode,
            prompt_token_ids[-CONTEXT_TOKENS:],
            context_text=context_text,
            stop=stop,
            stop_token_ids=self.eos_token_ids.union(stop_token_ids),
        )

    def expose(self, readings: Readings) -> None:
        """Have what is counted here told as metrics."""
        self.segments.expose(readings)
        self.skeletons.expose(readings)
        readings.add_gauge(
            "kvroute_tokenizer_borrowed",
            "1 where the router has no tokenizer of its own that it can use, and works with a copy of a worker's.",
            lambda: bool(self.why_borrowed),
        )

    def _tokens_of_text(
        self,
        written: Written,
        param: str,
        salt: str = "",
        is_given_up: Callable[[], bool] | None = None,
        lookup: Lookup | None = None,
    ) -> bytes:
        """Packed token ids of a rendered conversation or a plain prompt; `lookup` is what is known of it already."""
        try:
            lookup = lookup or self.segments.look_up(written.text, salt, written.marks)
            packed = self.segments.complete(lookup, is_given_up)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"{param} holds text that is not Unicode: {_first_line(error)}", param=param) from None
        if self._rng is not None and self.segments.is_on and self._rng.random() < _COMPARED_SHARE:
            self._pool.submit(self._compare, written, packed)
        if param == "messages":
            return packed
        before, after = self._around
        return before + packed + after

    def _compare(self, written: Written, packed: bytes) -> None:
        self.skeletons.compare(written)
        self.segments.compare(written.text, packed)

    def _checked(self, token_ids: Sequence[int]) -> bytes:
        try:
            packed = pack_tokens(token_ids)
            is_known = int(np.frombuffer(packed, "<i4").max(initial=0)) < self.vocab_size
        except OverflowError:
            is_known = False
        if not is_known:
            index = next(index for index, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"Invalid 'prompt[{index}]': token id {token_ids[index]} is not in the vocabulary "
                f"of {self.vocab_size} tokens.",
                param=f"prompt[{index}]",
            )
        return packed

    def _special_tokens_around(self, folder: Path) -> tuple[bytes, bytes]:
        """What the tokenizer puts before and behind a plain prompt, packed."""

        def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            return self._raw.encode(text, add_special_tokens=add_special_tokens).ids

        bare, whole = encode("a", add_special_tokens=False), encode("a", add_special_tokens=True)
        for start in range(len(whole) - len(bare) + 1):
            before, after = whole[:start], whole[start + len(bare) :]
            if all(
                before + encode(text, add_special_tokens=False) + after == encode(text, add_special_tokens=True)
                for text in ("a", "", "a b")
            ):
                return pack_tokens(before), pack_tokens(after)
        raise ConfigError(f"the tokenizer in {folder} puts special tokens elsewhere than around a prompt")

    def _written_by_template(self) -> list[str]:
        """What the template makes of short conversations; empty without one."""
        written = []
        for roles in _PROBE_ROLES:
            with contextlib.suppress(InvalidRequest):
                written.append(self._rendered([{"role": role, "content": "x"} for role in roles]))
        return written

    def _proven_cuts(self, written: str) -> Cuts:
        """Where prompts may be cut; of the special tokens those count that the template writes."""
        added = [token.content for token in self._raw.get_added_tokens_decoder().values()]
        wanted = [content for content in added if content in written] if written else added[:_MAX_UNWRITTEN]
        return prove_cuts(self._raw, wanted, self._encode_all, random.Random(_PROOF_SEED))

    async def _in_thread(self, work: Callable[[Callable[[], bool]], _Result]) -> _Result:
        """Have work done that asks now and then whether it is given up, as it is when the caller is cancelled."""
        given_up = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, given_up.is_set)
        finally:
            given_up.set()

    def _pack_all(self, texts: Sequence[str]) -> list[bytes]:
        return list(map(pack_tokens, self._encode_all(texts)))

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        # Unlike `encode`, the batch form lets other threads run meanwhile; the fast one leaves offsets out, which
        # takes a third off the time (tokenizers 0.23).
        encode = self._raw.encode_batch_fast
        if sum(map(len, texts)) <= THREAD_THRESHOLD_CHARS:
            # To wake the library's threads for so little takes longer.
            return [encode([text], add_special_tokens=False)[0].ids for text in texts]
        return [found.ids for found in encode(list(texts), add_special_tokens=False)]

    def _as_template_knows(self, message: Message) -> dict[str, Any]:
        """`developer` is OpenAI's later name for `system`; most templates know the first name only."""
        if message.get("role") == "developer" and not self._knows_developer_role:
            return {**message, "role": "system"}
        return dict(message)


def _num_chars(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> int:
    """About how much work it is to render and cut this."""
    text_chars = sum(map(_text_chars, messages))
    return text_chars + _CHARS_PER_MESSAGE * (len(messages) + len(tools or ())) + (_text_chars(tools) if tools else 0)


def _text_chars(value: Any) -> int:
    """Length of all text in a value, at any depth: a call's arguments weigh as much as what is said."""
    if isinstance(value, str):
        return len(value)
    # Most are plain dictionaries, which are told apart far faster than other mappings.
    if isinstance(value, (dict, Mapping)):
        return sum([_text_chars(item) for item in value.values()])
    return sum([_text_chars(item) for item in value]) if isinstance(value, list | tuple) else 1


def _eos_token_ids(folder: Path, tokenizers_own: int | None) -> set[int]:
    """End-of-sequence ids of the tokenizer and of `generation_config.json`, which may name several."""
    found: set[int] = set() if tokenizers_own is None else {tokenizers_own}
    try:
        listed = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except FileNotFoundError:
        return found
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {folder / 'generation_config.json'}: {error}") from None
    found.update(token_id for token_id in (listed if isinstance(listed, list) else [listed]) if type(token_id) is int)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
