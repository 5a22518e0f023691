"""Which answers may go on elsewhere, and what is left of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from router.continuation import can_continue, continued, finish_at_border, reasons_against_continuing
from router.requests import GenerateRequest
from shared.hashing import pack_tokens
from shared.types import FinishReason, Reading, RequestId, Sampling


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({}, ()),
        ({"temperature": 0.0}, ()),
        ({"temperature": 0.7, "top_p": 0.5, "top_k": 9, "min_p": 0.1}, ()),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, ()),
        ({"temperature": 0.0, "seed": 3}, ()),
        ({"seed": 3}, ("seed",)),
        ({"seed": 0}, ("seed",)),
        ({"presence_penalty": 0.5}, ("presence_penalty",)),
        ({"temperature": 0.0, "frequency_penalty": -0.5}, ("frequency_penalty",)),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, ("repetition_penalty",)),
        ({"min_tokens": 1}, ("min_tokens",)),
        ({"seed": 1, "min_tokens": 4, "presence_penalty": 1.0}, ("seed", "presence_penalty", "min_tokens")),
    ],
)
def test_only_what_each_token_decides_alone_goes_on_elsewhere(
    fields: Mapping[str, object], reasons: tuple[str, ...]
) -> None:
    sampling = Sampling(max_tokens=8, **fields)  # type: ignore[arg-type]
    assert reasons_against_continuing(sampling) == reasons
    assert can_continue(sampling) == (not reasons)


def test_field_that_nobody_has_judged_yet_speaks_against_continuing() -> None:
    judged = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids"}
    for field in dataclasses.fields(Sampling):
        if field.name not in judged:
            sampling = dataclasses.replace(Sampling(max_tokens=8), **{field.name: 12345})
            told = {"json_schema": "response_format", "reading": "tools or reasoning"}.get(field.name, field.name)
            assert reasons_against_continuing(sampling) == (told,)


def test_answer_that_a_worker_reads_has_not_ended_before_its_end_is_told() -> None:
    sampling = Sampling(2, stop_token_ids=(9,))
    assert finish_at_border(sampling, [1, 9]) is FinishReason.STOP
    assert finish_at_border(dataclasses.replace(sampling, reading=Reading()), [1, 9]) is None


def test_rest_of_a_request_is_its_prompt_with_what_was_sent_and_fewer_tokens() -> None:
    request = GenerateRequest(
        RequestId("a"), pack_tokens([1, 2]), Sampling(8, temperature=0.0, seed=4), "salt", "adapter", 2, 9.5
    )
    assert continued(request, [3, 4, 5]) == GenerateRequest(
        RequestId("a"), pack_tokens([1, 2, 3, 4, 5]), Sampling(5, temperature=0.0), "salt", "adapter", 2, 9.5
    )


@pytest.mark.parametrize(
    ("sent", "finish"),
    [
        ([], None),
        ([1], None),
        ([7], FinishReason.STOP),
        ([7, 1], None),
        ([1, 2, 3], FinishReason.LENGTH),
        ([1, 2, 7], FinishReason.STOP),
    ],
)
def test_answer_that_had_come_to_its_end_is_told_from_one_that_had_not(
    sent: list[int], finish: FinishReason | None
) -> None:
    assert finish_at_border(Sampling(max_tokens=3, stop_token_ids=(7,)), sent) is finish
