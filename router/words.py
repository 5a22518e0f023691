"""Token ids of plain text word by word, out of a table: what most prompts consist of needs no tokenizer.

A byte-level tokenizer cuts text by a pattern before it looks at its vocabulary, and gives each word what it would give
it alone. Where the pattern is one that is known here, words that are one token are looked up, and the library is asked
for the others only. The table is made from the vocabulary at start: it tells nothing of anybody's prompts.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from router.cuts import GPT_2_PATTERN, LLAMA_3_PATTERN, QWEN_2_PATTERN, EncodeAll, parts_of, proof_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

logger = logging.getLogger(__name__)

_BYTE_LEVEL_TO_CHAR = {"\u0120": " ", "\u010a": "\n", "\u0109": "\t", "\u010d": "\r"}
"""How byte-level vocabularies write white space; other ASCII stands for itself."""


class Words:
    """An `EncodeAll` that gives the library's own ids, for less. Safe to use from several threads at once.

    Invariant: each word of the table is what the library's pattern would cut out, and its id what the library gives it.
    """

    def __init__(
        self, atoms: re.Pattern[str], words: re.Pattern[str], word_to_id: Mapping[str, int], encode_all: EncodeAll
    ) -> None:
        """`atoms` has one group: what is cut out before `words` looks at the text between."""
        self._atoms = atoms
        self._words = words
        self._word_to_id = word_to_id
        self._encode_all = encode_all

    def __len__(self) -> int:
        return len(self._word_to_id)

    def encode_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Token ids of several texts. Those that are not ASCII are left to the library, with its letters and spaces."""
        return [self._encode(text) if text.isascii() else self._encode_all([text])[0] for text in texts]

    def _encode(self, text: str) -> Sequence[int]:
        words: list[str] = []
        for number, part in enumerate(self._atoms.split(text)):
            if number % 2:
                words.append(part)
            else:
                words += self._words.findall(part)
        ids = list(map(self._word_to_id.get, words))
        if None not in ids:
            return ids  # type: ignore[return-value]
        missing = list(dict.fromkeys([word for word, token_id in zip(words, ids, strict=True) if token_id is None]))
        word_to_ids = dict(zip(missing, self._encode_all(missing), strict=True))
        found: list[int] = []
        for word, token_id in zip(words, ids, strict=True):
            if token_id is None:
                found += word_to_ids[word]
            else:
                found.append(token_id)
        return found


def prove_words(raw: RawTokenizer, encode_all: EncodeAll, rng: random.Random) -> Words | None:
    """The table of this tokenizer, tried on random texts; None where it is of another kind. Takes under a second."""
    words = find_words(raw, encode_all)
    if words is None:
        return None
    texts = proof_texts(raw, rng)
    for text, own, whole in zip(texts, words.encode_all(texts), encode_all(texts), strict=True):
        if list(own) != list(whole):
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
    word_to_id: dict[str, int] = {token["content"]: token["id"] for token in added}
    words = re.compile(word_pattern, re.ASCII)
    of_vocabulary = {
        text: token_id
        for piece, token_id in told["model"]["vocab"].items()
        if (text := _text_of(piece)) is not None and text not in word_to_id and words.findall(text) == [text]
    }
    for (text, token_id), ids in zip(of_vocabulary.items(), encode_all(list(of_vocabulary)), strict=True):
        # Merges need not lead to each piece of a vocabulary.
        if list(ids) == [token_id]:
            word_to_id[text] = token_id
    return Words(re.compile(f"({'|'.join(atoms)})" if atoms else "((?!))"), words, word_to_id, encode_all)


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
    """The same for text that is ASCII, in the words of Python's own `re`, which knows no properties of Unicode."""
    pattern = pattern.replace(r"\p{L}\p{N}", "A-Za-z0-9")
    return pattern.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


def _text_of(piece: str) -> str | None:
    """The ASCII text that a piece of a byte-level vocabulary stands for; None where it is none."""
    chars = [_BYTE_LEVEL_TO_CHAR.get(char, char) for char in piece]
    return "".join(chars) if all(char.isascii() for char in chars) else None
