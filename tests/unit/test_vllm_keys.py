"""Which caches block keys can describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared.types import CacheScheme
from worker.engines.vllm_keys import refusal_of_groups, refusal_of_model

SCHEME = CacheScheme("m", 64)


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
