"""A request's sampling in vLLM's words, and what vLLM tells of an answer in ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shared.errors import EngineError, InvalidRequest
from shared.messages import TokenLogprobs
from shared.types import FinishReason, Sampling
from worker.engines import vllm_schema

if TYPE_CHECKING:
    from vllm.exceptions import VLLMClientError
    from vllm.logprobs import Logprob
    from vllm.sampling_params import SamplingParams

    from worker.engines.vllm_reader import AnswerReader

_LEAST_LOGPROB = -9999.0
"""Told in place of minus infinity, as at OpenAI and in vLLM: JSON has no word for it."""


def sampling_params(
    sampling: Sampling, extra_args: dict[str, Any] | None = None, reader: AnswerReader | None = None
) -> SamplingParams:
    """Raises `InvalidRequest` if vLLM finds a value out of range. `reader` is whoever reads the answer's text."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    check_schema(sampling)
    try:
        structured_outputs = StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=sampling.logprobs,
            structured_outputs=structured_outputs if reader is None else reader.structured_outputs,
            stop=None if reader is None else list(reader.stop),
            skip_special_tokens=reader is None or reader.skips_special_tokens,
            extra_args=extra_args,
            detokenize=reader is not None,
            output_kind=RequestOutputKind.DELTA,
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def check_schema(sampling: Sampling) -> None:
    """Raises `InvalidRequest` for a schema of which vLLM would pass something over."""
    if not sampling.json_schema:
        return
    try:
        refusal = vllm_schema.refusal_of(json.loads(sampling.json_schema))
    except (ValueError, RecursionError) as error:
        refusal = f"is no JSON: {error}"
    if refusal is not None:
        raise InvalidRequest(f"Invalid 'response_format': of JSON Schema, {refusal}.", param="response_format")


def refusal_of(error: VLLMClientError, sampling: Sampling) -> InvalidRequest:
    """What vLLM refuses, by the request's own name of the field: of a grammar it tells no name."""
    param = getattr(error, "parameter", None) or _grammar_param(sampling)
    message = str(error)
    return InvalidRequest(f"Invalid '{param}': {message}" if param == "response_format" else message, param=param)


def finish_reason(reason: str | None, sampling: Sampling) -> FinishReason | None:
    """Raises for an end that is none: `InvalidRequest` where a grammar could not be compiled, else `EngineError`."""
    if reason is None:
        return None
    try:
        return FinishReason(reason)
    except ValueError:
        if reason == "error" and (param := _grammar_param(sampling)) is not None:
            # vLLM's scheduler ends one request in this way where compiling its grammar failed, and says no more.
            raise InvalidRequest(f"Invalid '{param}': the engine cannot hold an answer to it", param=param) from None
        raise EngineError(f"the engine ended the request with {reason!r}") from None


def told_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None] | None, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """What vLLM tells of each token, which is always the token's own and may be one more than the likeliest."""
    return tuple(
        [_one(token_id, found or {}, num_top) for token_id, found in zip(token_ids, logprobs or (), strict=True)]
    )


def _one(token_id: int, found: Mapping[int, Logprob], num_top: int) -> TokenLogprobs:
    own = found.get(token_id)
    ranked = sorted(
        (logprob.rank or 0, other, logprob.logprob)
        for other, logprob in found.items()
        if logprob.rank is None or logprob.rank <= num_top
    )
    return TokenLogprobs(
        _LEAST_LOGPROB if own is None else max(own.logprob, _LEAST_LOGPROB),
        tuple([other for _, other, _ in ranked]),
        tuple([max(logprob, _LEAST_LOGPROB) for _, _, logprob in ranked]),
    )


def _grammar_param(sampling: Sampling) -> str | None:
    """The request's field that its grammar comes from."""
    if sampling.json_schema:
        return "response_format"
    return "tools" if sampling.reading is not None and sampling.reading.tools else None
