"""Token ids of plain text word by word, out of a table: what most prompts consist of needs no tokenizer.

A byte-level tokenizer cuts text by a pattern before it looks at its vocabulary, and gives each word what it would give
it alone. Where the pattern is one that is known here, words are looked up in a table, and the library is asked for the
others only. The table is made from the vocabulary at start: it tells nothing of anybody's prompts.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from router.cuts import GPT_2_PATTERN, LLAMA_3_PATTERN, QWEN_2_PATTERN, EncodeAll, parts_of, proof_texts
from shared.hashing import pack_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

logger = logging.getLogger(__name__)

_BYTE_LEVEL_TO_CHAR = {"\u0120": " ", "\u010a": "\n", "\u0109": "\t", "\u010d": "\r"}
"""How byte-level vocabularies write white space; other ASCII stands for itself."""


class Words:
    """Packs texts as the library's own ids, for less. Safe to use from several threads at once.

    Invariant: each word of the table is what the library's pattern would cut out, and has the ids that the library
    gives it, packed.
    """

    def __init__(
        self, atoms: re.Pattern[str], words: re.Pattern[str], word_to_packed: Mapping[str, bytes], encode_all: EncodeAll
    ) -> None:
        """`atoms` has one group: what is cut out before `words` looks at the text between."""
        self._atoms = atoms
        self._words = words
        self._word_to_packed = word_to_packed
        self._encode_all = encode_all

    def __len__(self) -> int:
        return len(self._word_to_packed)

    def pack_all(self, texts: Sequence[str]) -> list[bytes]:
        """Packed token ids of several texts. Those that are not ASCII are left to the library, with its letters and
        spaces."""
        return [self._pack(text) if text.isascii() else pack_tokens(self._encode_all([text])[0]) for text in texts]

    def cut(self, text: str) -> list[str]:
        """The words of an ASCII text."""
        words: list[str] = []
        for number, part in enumerate(self._atoms.split(text)):
            if number % 2:
                words.append(part)
            else:
                words += self._words.findall(part)
        return words

    def with_words_of(self, texts: Iterable[str]) -> Words:
        """The same with all words of some texts in its table."""
        found = {word for text in texts if text.isascii() for word in self.cut(text)} - self._word_to_packed.keys()
        more = self._packed_words(sorted(found))
        return Words(self._atoms, self._words, {**self._word_to_packed, **more}, self._encode_all)

    def _pack(self, text: str) -> bytes:
        words, table = self.cut(text), self._word_to_packed
        try:
            return b"".join([table[word] for word in words])
        except KeyError:
            word_to_packed = self._packed_words(list(set(words).difference(table)))
            return b"".join([table[word] if word in table else word_to_packed[word] for word in words])

    def _packed_words(self, words: Sequence[str]) -> dict[str, bytes]:
        return dict(zip(words, map(pack_tokens, self._encode_all(words)), strict=True))


def prove_words(
    raw: RawTokenizer, encode_all: EncodeAll, rng: random.Random, *, common_texts: Iterable[str] = ()
) -> Words | None:
    """The table of this tokenizer, tried on random texts; None where it is of another kind. Takes about a second.

    Words of `common_texts` are in it, too: that is for what a chat template writes into each prompt.
    """
    words = find_words(raw, encode_all)
    if words is None:
        return None
    words = words.with_words_of(common_texts)
    texts = [*proof_texts(raw, rng), *common_texts]
    for text, own, whole in zip(texts, words.pack_all(texts), encode_all(texts), strict=True):
        if own != pack_tokens(whole):
            logger.error("prompts are tokenised at full cost: %r has other token ids word by word", text)
            return None
    return words


def find_words(raw: RawTokenizer, encode_all: EncodeAll) -> Words | None:
    """What the tokenizer's description allows; None where that is nothing."""
    told: dict[str, Any] = json.loads(raw.to_str())
    word_pattern = _word_pattern(told)
    if word_pattern is None or raw.encode_special_tokens:
        return None
    added = told["added_tokens"]
    if any(token[flag] for token in added for flag in ("normalized", "lstrip", "rstrip", "single_word")):
        return None
    # The library takes the longest of those that begin at one place.
    atoms = [re.escape(token["content"]) for token in sorted(added, key=lambda token: -len(token["content"]))]
    atoms += [
        "[0-9]" if part["individual_digits"] else "[0-9]+"
        for part in parts_of(told["pre_tokenizer"], "pretokenizers")
        if part["type"] == "Digits"
    ]
    word_to_packed: dict[str, bytes] = {token["content"]: pack_tokens([token["id"]]) for token in added}
    words = re.compile(word_pattern, re.ASCII)
    texts = {text for piece in told["model"]["vocab"] if (text := _text_of(piece)) is not None}
    # Vocabularies have most words with the space before them alone; at the beginning of a line there is none.
    texts |= {text[1:] for text in texts if text[:1] == " "}
    of_vocabulary = [text for text in sorted(texts - word_to_packed.keys()) if words.findall(text) == [text]]
    # Merges need not lead to each piece of a vocabulary.
    word_to_packed |= zip(of_vocabulary, map(pack_tokens, encode_all(of_vocabulary)), strict=True)
    return Words(re.compile(f"({'|'.join(atoms)})" if atoms else "((?!))"), words, word_to_packed, encode_all)


def _word_pattern(told: Mapping[str, Any]) -> str | None:
    """By what the tokenizer cuts ASCII text, digits that it sets apart left out; None where that is not known."""
    model = told["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    # To compose characters changes nothing in ASCII.
    if any(part["type"] != "NFC" for part in parts_of(told["normalizer"], "normalizers")):
        return None
    match [part for part in parts_of(told["pre_tokenizer"], "pretokenizers") if part["type"] != "Digits"]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _in_ascii(GPT_2_PATTERN)
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in (LLAMA_3_PATTERN, QWEN_2_PATTERN):
            return _in_ascii(pattern)
        case _:
            return None


def _in_ascii(pattern: str) -> str:
    """The same for text that is ASCII, in the words of Python's own `re`, which knows no properties of Unicode.

    Where a word's space and letters need not be given back, it is told so, which takes an eighth off the time.
    """
    pattern = pattern.replace(r"\p{L}\p{N}", "A-Za-z0-9").replace(" ?", " ?+").replace(r"\p{L}+", "[A-Za-z]++")
    return pattern.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


def _text_of(piece: str) -> str | None:
    """The ASCII text that a piece of a byte-level vocabulary stands for; None where it is none."""
    chars = [_BYTE_LEVEL_TO_CHAR.get(char, char) for char in piece]
    return "".join(chars) if all(char.isascii() for char in chars) else None
