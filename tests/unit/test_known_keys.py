"""Block keys from known beginnings are those that hashing everything gives."""

from __future__ import annotations

import random

import pytest

from router.known_keys import KnownKeys
from shared.hashing import block_keys, root_key
from shared.types import CacheScheme


@pytest.mark.parametrize("block_size_tokens", [1, 16, 64, 256, 1024, 4096])
def test_keys_are_those_of_hashing_whatever_was_asked_before(block_size_tokens: int) -> None:
    rng = random.Random(block_size_tokens)
    scheme = CacheScheme("model", block_size_tokens)
    known = KnownKeys(scheme)
    prompts = [rng.randbytes(4 * 9_000)]
    for _ in range(30):
        beginning = rng.choice(prompts)
        prompts.append(beginning[: 4 * rng.randint(0, 9_000)] + rng.randbytes(4 * rng.randint(0, 3_000)))
    for _ in range(100):
        packed, salt, adapter = rng.choice(prompts), rng.choice(("", "a", "b")), rng.choice(("", "a"))
        expected = block_keys(packed, block_size_tokens, root_key(scheme, salt=salt, adapter=adapter))
        assert known.of(packed, salt=salt, adapter=adapter) == expected


def test_a_known_beginning_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(packed: bytes, block_size_tokens: int, root: bytes) -> list[bytes]:
        hashed.append(len(packed) // 4)
        return block_keys(packed, block_size_tokens, root)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr("router.known_keys.block_keys", counted)
    known = KnownKeys(CacheScheme("model", 64))
    prompt = random.Random(0).randbytes(4 * 4_096)
    known.of(prompt)
    hashed.clear()
    known.of(prompt + bytes(4 * 100))
    assert hashed == [100]


def test_what_is_known_is_bounded_and_the_least_recently_used_goes_first() -> None:
    known = KnownKeys(CacheScheme("model", 64), max_keys=32)
    rng = random.Random(0)
    first, second, third = (rng.randbytes(4 * 1_024) for _ in range(3))
    before = known.of(first)
    known.of(second)
    known.of(first)
    known.of(third)
    assert len(known._span_to_keys) == 2
    assert known.of(first)[0] is before[0]
