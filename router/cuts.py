"""Where a text may be cut so that the token ids of its pieces, one after the other, are those of the whole.

Read from a tokenizer's own description and then tried on random texts; where neither gives certainty there is no cut.
Holds for the pipeline of the `tokenizers` library, which takes added tokens out of the raw text before all else and
gives what lies between them to the normaliser, pre-tokeniser and model one by one (`AddedVocabulary`).
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

logger = logging.getLogger(__name__)

EncodeAll = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Token ids of several texts, without the special tokens that a tokenizer puts around one."""

_PIECE_CHARS = 2048
"""Length from which a piece ends at the next place that is certain: under 0.4 ms of tokenising, which is what a changed
character costs at most, and long enough that looking pieces up costs a tenth of a percent of that."""
_SHORTEST_SHARE = 4
"""A piece goes on beyond marks until it has one part in so many of that length: a mark for itself is not worth a place
of its own."""
_MAX_SPACES = 256
"""Of those that are looked at for the end of a piece; text without words in so many is cut no further."""
_SPACE_MARK = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_PATTERN = LLAMA_3_PATTERN.replace("{1,3}", "")
GPT_2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD_PATTERNS = frozenset({GPT_2_PATTERN, LLAMA_3_PATTERN, QWEN_2_PATTERN})
"""Pre-tokenising patterns no alternative of which matches across a space between two letters or digits, or looks behind
itself, or decides otherwise where the text ends before that space."""

_NUM_PROOFS = 300
_MAX_FRAGMENTS = 24
_PROOF_TEXTS = (
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u200b", "_", "'", "-", "", "word", "Word", "a", "I'LL"),
    *("don't", "123", "4", "12 345", "two words", "\u00e9", "e\u0301", "\u00df", "\u4f60\u597d", "\U0001f389"),
    *("\U0001f469\u200d\U0001f467", "\u0432\u043e\u0434\u0430", "\u0661", "\u00b2", "\u2581", "</", "<", "|>"),
    *("[INST]", "<<SYS>>\n", "system\n", "{", '": "', "\\n", "\u0000"),
)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How texts of one tokenizer are cut. `NO_CUTS` leaves them whole."""

    marks: re.Pattern[str] | None = None
    """Added tokens that may begin a piece wherever they stand."""
    is_cut_between_words: bool = False
    drops_space: bool = False
    """Whether a piece that begins between words leaves its space out, since the tokenizer puts one before each text."""
    piece_chars: int = _PIECE_CHARS
    doubts: tuple[str, ...] = ()
    """Why texts are not cut in more places."""

    @property
    def is_any(self) -> bool:
        """Whether there is a place where texts are cut."""
        return self.marks is not None or self.is_cut_between_words

    def pieces(self, text: str, starts: Iterable[int] | None = None) -> list[str]:
        """The pieces of a text; texts that begin alike have equal pieces up to one before the first difference.

        `starts` are where marks begin, as far as the text is to be cut at them; without them all are looked for.
        """
        if starts is None:
            starts = () if self.marks is None else [found.start() for found in self.marks.finditer(text)]
        least_chars = self.piece_chars // _SHORTEST_SHARE
        pieces = []
        start = 0
        for end in (*starts, len(text)):
            while self.is_cut_between_words and end - start > self.piece_chars:
                space = _space_between_words(text, start + self.piece_chars, end)
                if space is None:
                    break
                pieces.append(text[start:space])
                start = space + self.drops_space
            if end - start > least_chars:
                pieces.append(text[start:end])
                start = end
        if start < len(text):
            pieces.append(text[start:])
        return pieces


NO_CUTS = Cuts()


def prove_cuts(raw: RawTokenizer, wanted_marks: Iterable[str], encode_all: EncodeAll, rng: random.Random) -> Cuts:
    """Where texts of this tokenizer may be cut. Says loudly where they may not; takes some 0.2 s."""
    cuts = find_cuts(raw, wanted_marks)
    if not cuts.is_any:
        logger.warning("prompts are tokenised as a whole, at full cost: %s", "; ".join(cuts.doubts) or "no marks")
        return cuts
    logger.debug("prompts are not cut everywhere: %s", "; ".join(cuts.doubts))
    text = disproof(cuts, raw, encode_all, rng)
    if text is None:
        return cuts
    logger.error("prompts are tokenised as a whole, at full cost: %r has other token ids in pieces", text)
    return replace(NO_CUTS, doubts=(f"{text!r} has other token ids in pieces",))


def find_cuts(raw: RawTokenizer, wanted_marks: Iterable[str]) -> Cuts:
    """What the tokenizer's description proves, of `wanted_marks` those that are fit."""
    told: dict[str, Any] = json.loads(raw.to_str())
    if told["model"].get("dropout"):
        return replace(NO_CUTS, doubts=("the model draws its merges at random",))
    doubts = []
    fit = []
    for content in sorted(set(wanted_marks)):
        doubt = "special tokens are read as text" if raw.encode_special_tokens else _mark_doubt(content, told)
        if doubt is None:
            fit.append(content)
        else:
            doubts.append(f"{content}: {doubt}")
    word_doubt = _added_doubt(told) or _word_doubt(told)
    if word_doubt is not None:
        doubts.append(f"between words: {word_doubt}")
    return Cuts(
        re.compile("|".join(re.escape(content) for content in sorted(fit, key=len, reverse=True))) if fit else None,
        is_cut_between_words=word_doubt is None,
        drops_space=any(part["type"] == "Prepend" for part in parts_of(told["normalizer"], "normalizers")),
        doubts=tuple(doubts),
    )


def disproof(cuts: Cuts, raw: RawTokenizer, encode_all: EncodeAll, rng: random.Random) -> str | None:
    """A text whose pieces have other ids than the whole, or None if none of many random ones is such a text."""
    texts = proof_texts(raw, rng, cuts.marks)
    # Short pieces, so that a short text has many.
    pieces = [replace(cuts, piece_chars=rng.randint(1, 16)).pieces(text) for text in texts]
    # All at once, since the tokenizer then works on several.
    found = iter(encode_all([piece for of_text in pieces for piece in of_text]))
    for text, of_text, whole in zip(texts, pieces, encode_all(texts), strict=True):
        parts = itertools.islice(found, len(of_text))
        if list(itertools.chain.from_iterable(parts)) != list(whole):
            return text
    return None


def proof_texts(raw: RawTokenizer, rng: random.Random, marks: re.Pattern[str] | None = None) -> list[str]:
    """Random texts full of what is hard for a tokenizer, its own special tokens whole and broken among them."""
    added = [token.content for token in raw.get_added_tokens_decoder().values()]
    fit = [content for content in added if marks is not None and marks.fullmatch(content)]
    special = [*fit, *rng.sample(added, min(len(added), 32))]
    num_ids = raw.get_vocab_size()
    fragments = [*_PROOF_TEXTS, *special, *(text[:-1] for text in special), *(text[1:] for text in special)]
    fragments += [raw.decode([rng.randrange(num_ids)]) for _ in range(64)]
    return [
        rng.choice(("", " ")).join(rng.choices(fragments, k=rng.randint(1, _MAX_FRAGMENTS))) for _ in range(_NUM_PROOFS)
    ]


def _space_between_words(text: str, start: int, end: int) -> int | None:
    """The next space between two letters or digits, neither of which any rule takes for white space or for a mark."""
    space = start - 1
    for _ in range(_MAX_SPACES):
        space = text.find(" ", space + 1, end - 1)
        if space < 0:
            return None
        if text[space - 1].isalnum() and text[space + 1].isalnum():
            return space
    return None


def _mark_doubt(content: str, told: Mapping[str, Any]) -> str | None:
    """Why a text may not be cut wherever this added token stands; None if it may.

    The library takes unnormalised added tokens from the left, of several the longest. So one stands wherever its text
    does, unless another one that begins earlier reaches into it.
    """
    added = {token["content"]: token for token in told["added_tokens"]}
    token = added.get(content)
    if token is None:
        return "is no added token"
    if token["normalized"]:
        return "is looked for in normalised text only"
    if token["lstrip"] or content[0].isspace():
        return "takes white space before it"
    if token["single_word"] or (
        any(other["single_word"] for other in added.values()) and re.match(r"\w", content) is not None
    ):
        return "depends on the letters around"
    for name, other in added.items():
        if other["normalized"]:
            continue
        overlaps = any(content.startswith(name[-size:]) for size in range(1, min(len(name), len(content))))
        if overlaps or (name != content and content in name):
            return f"added token {name!r} can reach into it"
    return None


def _added_doubt(told: Mapping[str, Any]) -> str | None:
    """Why added tokens forbid cuts between words; None if they do not."""
    for token in told["added_tokens"]:
        if " " in token["content"] or any(token[flag] for flag in ("normalized", "lstrip", "rstrip", "single_word")):
            return f"added token {token['content']!r} can take a space"
    return None


def _word_doubt(told: Mapping[str, Any]) -> str | None:
    """Why the pipeline behind the added tokens forbids cuts before a space between two letters; None if it does not."""
    normalisers = parts_of(told["normalizer"], "normalizers")
    marks_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK} in normalisers
    for part in normalisers:
        is_known = (
            part["type"] == "NFC"
            or part == {"type": "Prepend", "prepend": _SPACE_MARK}
            or (part["type"] == "Replace" and marks_spaces)
        )
        if not is_known or len(normalisers) > 1 + marks_spaces:
            return f"normaliser {part['type']} is not known to leave words apart"
    space = _SPACE_MARK if marks_spaces else " "
    for part in parts_of(told["pre_tokenizer"], "pretokenizers"):
        match part:
            case {"type": "Digits"}:
                pass
            case {"type": "ByteLevel"} if not marks_spaces:
                if part["use_regex"]:
                    return None
                space = _BYTE_LEVEL_SPACE
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} if (
                pattern in _WORD_PATTERNS and not marks_spaces
            ):
                return None
            case {"type": "Metaspace", "replacement": mark} if mark == _SPACE_MARK and not normalisers:
                if part["split"]:
                    return None
                space = _SPACE_MARK
            case _:
                return f"pre-tokeniser {part['type']} is not known to leave words apart"
    return _vocabulary_doubt(told["model"], space)


def _vocabulary_doubt(model: Mapping[str, Any], space: str) -> str | None:
    """Why pieces of the vocabulary may span the space between two words; None if they cannot.

    Merges on both sides of a place that no piece spans do not know of each other.
    """
    if model["type"] != "BPE":
        return f"a {model['type']} model without known pre-tokenising weighs a text as a whole"
    if model["ignore_merges"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return "the model treats a text's beginning or end, or a text that is one piece, in a way of its own"
    if space not in model["vocab"]:
        return "spaces are unknown to the vocabulary"
    spanning = next((piece for piece in model["vocab"] if space in piece.lstrip(space)), None)
    return None if spanning is None else f"vocabulary piece {spanning!r} spans them"


def parts_of(told: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a normaliser or pre-tokeniser, also where they are nested."""
    if told is None:
        return []
    if told["type"] == "Sequence":
        return [part for inner in told[name] for part in parts_of(inner, name)]
    return [told]
