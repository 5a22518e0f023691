"""Keys of vLLM's blocks, and which caches they can describe."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from shared.types import CacheScheme
from worker.engines.vllm_keys import LazyKey, chain_keys, refusal_of_groups, refusal_of_model

SCHEME = CacheScheme("m", 64)


@pytest.mark.parametrize(
    ("extra_keys", "adapter"),
    [
        ([None, None, None], None),
        (None, "tuned"),
        ([("tenant",), None, None], None),
        ([("tuned", "tenant"), ("tuned",), ("tuned",)], "tuned"),
        ([None, (("image", 3),), None], None),
    ],
    ids=["plain", "adapter", "salt", "adapter and salt", "image"],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_lazy_keys_are_those_of_the_whole_chain(extra_keys: Any, adapter: str | None, order: tuple[int, ...]):
    scheme = CacheScheme("m", 4)
    lazy_keys: list[LazyKey] = []
    for number in range(3):
        before = lazy_keys[-1] if lazy_keys else None
        token_ids = tuple(range(4 * number, 4 * number + 4))
        lazy_keys.append(LazyKey(before, token_ids, extra_keys[number] if extra_keys else None, adapter))
    keys = {number: lazy_keys[number].value(scheme) for number in order}
    assert [keys[number] for number in range(3)] == chain_keys(
        scheme, None, is_first=True, token_ids=range(12), extra_keys=extra_keys, adapter=adapter
    )


def test_the_last_lazy_key_of_a_very_long_prompt_can_be_asked_for_first():
    scheme, num_blocks = CacheScheme("m", 1), 20_000
    last: LazyKey | None = None
    for token in range(num_blocks):
        last = LazyKey(last, (token,), None, None)
    assert last is not None
    keys = chain_keys(scheme, None, is_first=True, token_ids=range(num_blocks), extra_keys=None, adapter=None)
    assert last.value(scheme) == keys[-1]


def test_a_very_long_prompt_can_be_dropped_without_its_keys_having_been_asked_for():
    class Extra:
        pass

    extra = Extra()
    first_is_there = weakref.ref(extra)
    last = LazyKey(None, (0,), (extra,), None)
    del extra
    for token in range(100_000):
        last = LazyKey(last, (token,), None, None)
    assert first_is_there()
    del last
    assert not first_is_there()


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ([("full_attention", 64)], None),
        ([("full_attention", 32)], "the engine's blocks have 32 tokens, announced were 64"),
        ([("sliding_window", 64)], "its cache is not one group of full attention but sliding_window"),
        (
            [("full_attention", 64), ("mamba", 64)],
            "its cache is not one group of full attention but full_attention, mamba",
        ),
        ([], "its cache is not one group of full attention but none"),
    ],
)
def test_one_group_of_full_attention_is_described(groups: list[tuple[str, int]], refusal: str | None):
    assert refusal_of_groups(SCHEME, groups) == refusal


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ({}, None),
        ({"is_attention_free": True}, "no attention"),
        ({"is_hybrid": True}, "layers of other kinds than attention"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"get_sliding_window": lambda: 4096}, "a sliding window"),
    ],
)
def test_a_model_of_plain_attention_is_described(field: dict[str, Any], what: str | None):
    plain = {
        "is_attention_free": False,
        "is_hybrid": False,
        "is_encoder_decoder": False,
        "attention_chunk_size": None,
        "get_sliding_window": lambda: None,
    }
    found = refusal_of_model(SimpleNamespace(**(plain | field)))
    assert found == (what and f"it has {what}, and its cache need not be one group of full attention")
