"""Whether and how an answer that broke off goes on elsewhere: from its prompt and the tokens already handed out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from router.requests import GenerateRequest
from shared.hashing import pack_tokens
from shared.types import FinishReason, Sampling

_FORGETFUL = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids"})
"""Fields that act on each token alone, or that `continued` settles. Every other field is taken for one that looks at
where the answer began, as penalties and `min_tokens` do, unless it has its default."""
_LOOKING_BACK = tuple(
    (field.name, field.default) for field in dataclasses.fields(Sampling) if field.name not in _FORGETFUL
)
"""All others, with their defaults."""

_FIELD_TO_PARAM = {"json_schema": "response_format", "reading": "tools or reasoning"}
"""Fields whose names callers do not know, with what they know."""


def reasons_against_continuing(sampling: Sampling) -> tuple[str, ...]:
    """The fields that would make another engine go on differently, in the order of `Sampling`, as callers know them."""
    return tuple(
        [
            _FIELD_TO_PARAM.get(name, name)
            for name, default in _LOOKING_BACK
            # Where nothing is drawn, a seed has no say.
            if getattr(sampling, name) != default and not (name == "seed" and sampling.is_greedy)
        ]
    )


def can_continue(sampling: Sampling) -> bool:
    """Whether prompt and sent tokens together say all that another engine needs to go on as the first one would have.

    Greedy answers stay what they were where arithmetic does not depend on the batch, as in float32; drawn ones without
    a seed stay one valid draw. A draw by seed does not: an engine's generator begins anew with the rest.
    """
    return not reasons_against_continuing(sampling)


def finish_at_border(sampling: Sampling, sent: Sequence[int]) -> FinishReason | None:
    """How an answer has ended whose last token arrived and whose end did not; `None` where it has not ended."""
    if not sent or sampling.reading is not None:
        # What a worker would have read at the end is lost with it.
        return None
    if sent[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sent) >= sampling.max_tokens else None


def continued(request: GenerateRequest, sent: Sequence[int]) -> GenerateRequest:
    """What is left of `request` once `sent` has been handed out. It must be continuable and not have ended."""
    return dataclasses.replace(
        request,
        token_ids=request.token_ids + pack_tokens(sent),
        sampling=dataclasses.replace(request.sampling, max_tokens=request.sampling.max_tokens - len(sent), seed=None),
    )
