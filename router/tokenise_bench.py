"""Measures what it takes to get from messages to token ids, and from token ids to text.

For two kinds of tokenizer: the demo model's (byte-level, special tokens around each message), and one made here in the
manner of Llama 2 (a space before each text, bytes for what has no piece, system text and instructions marked by plain
text).
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from router.known_keys import KnownKeys
from router.launch import prepare_model_folder
from router.tokenizer import Message, Tokenizer
from shared.config import load_settings
from shared.hashing import block_keys, root_key, unpack_tokens
from shared.types import CacheScheme

_MODEL = "smollm2"
_BLOCK_SIZE_TOKENS = 64
_MESSAGE_WORDS = 150
_NEW_WORDS = 60
"""Of the next user's message."""

_VOCABULARY = 4_000
_TRAINING_SEED = 0
_FREQUENT_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an they "
    "you were there one all we can had her their has if will each about how up out them then she many some so "
    "these would other into more two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our me man too any day same right look think also around another "
    "came come work three word must because does part even place well such here take why things help put years "
    "different away again off went old number great tell men say small every found still between name should home "
    "big give air line set own under read last never us left end along while next sound below saw something "
    "thought both few those always looked show large often together asked house world going want school important "
    "until form food keep children feet land side without once animals life enough took sometimes four head above "
    "kind began almost live page got earth need far hand high year mother parts country father let night "
    "following picture being study second eyes soon times story since white days ever paper hard near sentence "
    "better best across during today others however sure means knew try told young miles sun server answers "
    "request tokens memory cache worker error returned function value model response measured latency "
)
_LLAMA_2_TEMPLATE = (
    "{% set system = '' %}{% set turns = messages %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}"
    "{% endif %}"
    "{% for m in turns %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    seed: int = 0
    num_rounds: int = 30
    chat_tokens: int = 7_500
    num_streamed: int = 2_000


async def measure(say: Callable[[str], None], *, sizes: Sizes | None = None) -> dict[str, float]:
    """Figures by name: medians in microseconds, with the 10th and 90th percentile of what `ratio` is made of.

    The ratio is that of the 10th percentiles: whatever else the machine does makes rounds slower, never faster.
    """
    sizes = sizes or Sizes()
    folder = await prepare_model_folder(load_settings(flags={"model": _MODEL}, environment={}), say)
    figures: dict[str, float] = {"seed": sizes.seed, "num_rounds": sizes.num_rounds}
    with tempfile.TemporaryDirectory() as made:
        for name, path in (("", folder), ("llama2_", write_llama_2_manner(Path(made)))):
            say(f"tokenising chats of {sizes.chat_tokens} tokens with {path.name if not name else 'Llama 2 manners'}")
            chats = _Chats(await asyncio.to_thread(Tokenizer, path), random.Random(sizes.seed), sizes)
            figures |= {name + key: figure for key, figure in (await chats.measure()).items()}
    return figures


class _Chats:
    """The same chats with earlier turns known, and as whole texts."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, sizes: Sizes) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._sizes = sizes

    async def measure(self) -> dict[str, float]:
        whole_us: list[float] = []
        first_us: list[float] = []
        next_us: list[float] = []
        keys_us: list[float] = []
        known_keys_us: list[float] = []
        found = b""
        scheme = CacheScheme("bench", _BLOCK_SIZE_TOKENS)
        chat = [self._message("system", _MESSAGE_WORDS)]
        while (num_tokens := len(self._tokenizer.render_chat(chat))) < self._sizes.chat_tokens:
            chat += [self._message("user", _MESSAGE_WORDS), self._message("assistant", _MESSAGE_WORDS)]
        for number in range(self._sizes.num_rounds):
            # What is known under one salt is new under the next.
            salt, known = str(number), KnownKeys(scheme)
            earlier = await self._timed(first_us, chat[:-1], salt)
            known.of(earlier, salt=salt)
            turn = [*chat, self._message("user", _NEW_WORDS)]
            whole_us.append(_us(partial(self._whole, turn)))
            found = await self._timed(next_us, turn, salt)
            if found != self._whole(turn):
                raise RuntimeError("the next turn has other token ids in pieces than as a whole")
            root = root_key(scheme, salt=salt)
            keys_us.append(_us(partial(block_keys, found, _BLOCK_SIZE_TOKENS, root)))
            known_keys_us.append(_us(partial(known.of, found, salt=salt)))
        return {
            "chat_tokens": float(num_tokens),
            "whole_us": median(whole_us),
            "whole_us_p10": _share(whole_us, 0.1),
            "whole_us_p90": _share(whole_us, 0.9),
            "first_turn_us": median(first_us),
            "next_turn_us": median(next_us),
            "next_turn_us_p10": _share(next_us, 0.1),
            "next_turn_us_p90": _share(next_us, 0.9),
            "ratio": _share(next_us, 0.1) / _share(whole_us, 0.1),
            "short_us": median(await self._short()),
            "block_keys_us": median(keys_us),
            "known_block_keys_us": median(known_keys_us),
            "detokenise_us_per_token": median(self._streamed(found) for _ in range(self._sizes.num_rounds)),
        }

    def _whole(self, chat: list[Message]) -> bytes:
        return self._tokenizer.segments.whole(self._tokenizer.chat_text(chat))

    async def _short(self) -> list[float]:
        """Prompts of one short message that nobody has sent before."""
        durations_us: list[float] = []
        for _ in range(self._sizes.num_rounds):
            await self._timed(durations_us, [self._message("user", _NEW_WORDS)], "")
        return durations_us

    def _streamed(self, packed: bytes) -> float:
        """Microseconds for each token of an answer that comes token by token."""
        token_ids = unpack_tokens(packed)[: self._sizes.num_streamed]
        detokenizer = self._tokenizer.detokenizer(packed)

        def stream() -> None:
            for token_id in token_ids:
                detokenizer.push((token_id,))

        return _us(stream) / len(token_ids)

    async def _timed(self, durations_us: list[float], chat: list[Message], salt: str) -> bytes:
        started_at_s = time.perf_counter()
        packed = await self._tokenizer.tokens_of(messages=chat, salt=salt)
        durations_us.append((time.perf_counter() - started_at_s) * 1e6)
        return packed

    def _message(self, role: str, num_words: int) -> Message:
        return {"role": role, "content": sample_text(self._rng, num_words)}


def sample_text(rng: random.Random, num_words: int) -> str:
    """English words, of which few are frequent, as in a language."""
    known = _FREQUENT_WORDS.split()
    ends = rng.choices(("", ",", ".\n", " 17"), (80, 10, 8, 2), k=num_words)
    return " ".join(known[int(len(known) ** rng.random()) - 1] + end for end in ends)


def write_llama_2_manner(folder: Path, *, template: str = _LLAMA_2_TEMPLATE) -> Path:
    """A folder with a tokenizer that treats text as Llama 2's does, trained on `sample_text`."""
    import tokenizers as hf
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>"]
    raw = hf.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # In training alone: SentencePiece makes no pieces across words, but merges whole texts.
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    rng = random.Random(_TRAINING_SEED)
    raw.train_from_iterator([f"[INST] <<SYS>> {sample_text(rng, 100)} [/INST]" for _ in range(300)], trainer)
    told = json.loads(raw.to_str())
    told["pre_tokenizer"] = None
    told["added_tokens"] = []
    raw = hf.Tokenizer.from_str(json.dumps(told))
    raw.add_special_tokens([hf.AddedToken(token, special=True, normalized=False) for token in special])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _us(call: Callable[[], object]) -> float:
    started_at_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_at_s) * 1e6


def _share(durations: list[float], share: float) -> float:
    ordered = sorted(durations)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
