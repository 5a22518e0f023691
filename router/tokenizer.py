"""Text to token ids and back: a model's own tokenizer and chat template, used by routers alone.

Workers get token ids and give token ids; how long a prompt may be is not decided here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError, InvalidRequest
from shared.hashing import tokenizer_fingerprint
from shared.types import FinishReason

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

THREAD_THRESHOLD_CHARS = 8192
"""Longer texts are tokenised in a thread: at 0.3 to 1 us a character they would hold the event loop for over 2 ms; the
way to a thread and back costs some 0.07 ms."""

_CONTEXT_TOKENS = 6
"""Prompt tokens before the answer that decoding sees, so that a leading space is neither lost nor invented."""
_MAX_HELD_TOKENS = 32
"""Most tokens held back for an unfinished character. A character has at most four bytes; past this bound the bytes
are garbage and come out as U+FFFD, as they would at the end."""
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """One model's tokenizer. Does not change once loaded; safe to use from several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of a model folder. Never goes to the network; takes seconds, for its imports.

        Raises:
            ConfigError: the folder has no usable tokenizer.
        """
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} is not a folder")
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
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

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            InvalidRequest: there is no template, or it cannot render these messages; says why.
        """
        if self._render is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions instead", param="messages")
        try:
            text = self._render(
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
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False, param="messages")

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts around one."""
        return self._encode(text, add_special_tokens=True, param="prompt")

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`render_chat` that keeps the event loop free: long conversations are worked on in a thread."""
        if sum(len(message.get("content") or "") for message in messages) <= THREAD_THRESHOLD_CHARS:
            return self.render_chat(messages)
        return await asyncio.to_thread(self.render_chat, messages)

    async def encode_prompt(self, text: str) -> list[int]:
        """`encode` that keeps the event loop free."""
        if len(text) <= THREAD_THRESHOLD_CHARS:
            return self.encode(text)
        return await asyncio.to_thread(self.encode, text)

    def check_token_ids(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt that came as token ids. Raises `InvalidRequest` for an id that the vocabulary does not have."""
        if token_ids and max(token_ids) >= self.vocab_size:
            index = next(index for index, token_id in enumerate(token_ids) if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"Invalid 'prompt[{index}]': token id {token_ids[index]} is not in the vocabulary "
                f"of {self.vocab_size} tokens.",
                param=f"prompt[{index}]",
            )
        return list(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._raw.decode(token_ids, skip_special_tokens=True)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, stop: Sequence[str] = (), stop_token_ids: Collection[int] = ()
    ) -> Detokenizer:
        """A new stream's detokenizer, for an answer to `prompt_token_ids`."""
        return Detokenizer(
            self.decode,
            prompt_token_ids[-_CONTEXT_TOKENS:],
            stop=stop,
            stop_token_ids=self.eos_token_ids.union(stop_token_ids),
        )

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            # Unlike `encode`, the batch form lets other threads run meanwhile; the fast one leaves offsets out, which
            # halves the time (tokenizers 0.23).
            return self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"{param} holds text that is not Unicode: {_first_line(error)}", param=param) from None

    def _as_template_knows(self, message: Message) -> dict[str, Any]:
        """`developer` is OpenAI's later name for `system`; most templates know the first name only."""
        if message.get("role") == "developer" and not self._knows_developer_role:
            return {**message, "role": "system"}
        return dict(message)


class Detokenizer:
    """Text of one stream, piece by piece, up to the first stop string.

    Text comes out once and in order; a character spread over tokens comes out whole; text that may be the beginning of
    a stop string is held back until that is decided. `tokenizers.decoders.DecodeStream` is not used: it has no flush
    for an unfinished character, and raises where a byte-fallback decoder changes its mind about earlier bytes.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._stop_token_ids = stop_token_ids
        # Tokens whose text is out but which the decoding of the next ones depends on, and their text.
        self._context = list(context)
        self._context_text = decode(self._context) if context else ""
        self._pending: list[int] = []
        self._held = ""
        self.is_stopped = False
        """Whether a stop string has ended the stream; later tokens give no text."""
        self.num_tokens = 0
        """Tokens taken, the one that completed a stop string included."""

    def push(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take the next tokens and return the text that is certain by now; all of it where `finish` is given.

        Modifies the stream. A stop *token* that ends the stream is counted and gives no text.
        """
        text = ""
        silent = finish is FinishReason.STOP and bool(token_ids) and token_ids[-1] in self._stop_token_ids
        visible = token_ids[:-1] if silent else token_ids
        # One at a time where a stop string may end the stream, so that how tokens arrive in groups changes nothing.
        for group in [[token_id] for token_id in visible] if self._stop else [visible]:
            if self.is_stopped:
                return text
            self.num_tokens += len(group)
            text += self._through_stop(self._decode_next(group))
        if self.is_stopped:
            return text
        self.num_tokens += silent
        return text + self.flush() if finish is not None else text

    def flush(self) -> str:
        """What is still held back, once no more tokens come. Modifies the stream."""
        if self.is_stopped:
            return ""
        text = self._through_stop(self._decode_next([], is_last=True)) + self._held
        if self.is_stopped:
            return text
        self._held = ""
        return text

    def _decode_next(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Text that `token_ids` add, as soon as it ends on a whole character."""
        self._pending += token_ids
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_HELD_TOKENS and not is_last:
            return ""
        added = text[len(self._context_text) :]
        if added:
            self._context = self._pending
            self._context_text = self._decode(self._context)
        # Tokens without text (special ones) are dropped, so that a run of them costs nothing.
        self._pending = []
        return added

    def _through_stop(self, added: str) -> str:
        """`added` after what was held, cut at the first complete stop string or before a possible beginning of one."""
        if not self._stop:
            return added
        text = self._held + added
        # The stop string that is complete first wins, as if characters came one by one.
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_held = max(_num_begun(text, stop) for stop in self._stop)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


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
