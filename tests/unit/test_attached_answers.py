"""What servers say over HTTP, as recorded from vLLM 0.32, and what becomes of anything else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from shared.errors import ContextTooLong, EngineError, InvalidRequest, Overloaded
from shared.messages import TokenLogprobs
from shared.types import FinishReason, RequestId, Sampling
from worker.engines.attached_answers import (
    CompletionStream,
    ServedModels,
    ServerMetrics,
    completion_body,
    error_of_response,
    read_metrics,
    read_models,
)
from worker.engines.base import EngineRequest, RichEngineDelta

_CHUNK = (
    'data: {"id":"cmpl-840e27a88bd12228","object":"text_completion","created":1796010044,"model":"tiny","choices":'
    '[{"index":0,"text":"","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":%s,"token_ids":[%d]}]}'
    "\n\n"
)
_USAGE = (
    'data: {"id":"cmpl-840e27a88bd12228","object":"text_completion","created":1796010044,"model":"tiny","choices":[],'
    '"usage":{"prompt_tokens":100,"total_tokens":103,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":96}},'
    '"system_fingerprint":"vllm-0.32.0-e1e5d432"}\n\ndata: [DONE]\n\n'
)
RECORDED = "".join(
    [
        _CHUNK % ("null", "[5,6,7]", 196),
        _CHUNK % ("null", "null", 128),
        _CHUNK % ('"length"', "null", 12),
        _USAGE,
    ]
).encode()
RECORDED_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
process_start_time_seconds 1.7960098778e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 5.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7960098953018224e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 20.0
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="64"} 1.0
"""


@pytest.mark.parametrize("size", [1, 7, 100, len(RECORDED)])
def test_tokens_end_and_cache_come_out_however_the_bytes_are_cut(size: int):
    stream = CompletionStream()
    token_ids = []
    for start in range(0, len(RECORDED), size):
        token_ids += stream.feed(RECORDED[start : start + size])
    assert (token_ids, stream.finish, stream.cached_tokens, stream.is_done) == (
        [196, 128, 12],
        FinishReason.LENGTH,
        96,
        True,
    )


def test_comments_carriage_returns_and_other_fields_of_events_are_passed_over():
    stream = CompletionStream()
    assert stream.feed(
        b': ping\r\n\r\nevent: x\r\ndata: {"choices":[{"token_ids":[1],"finish_reason":null}]}\r\n\r\n'
    ) == [1]


def test_a_server_that_does_not_tell_of_its_cache_gives_none():
    stream = CompletionStream()
    stream.feed(b'data: {"choices":[],"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}\n\n')
    assert stream.cached_tokens is None


@pytest.mark.parametrize(
    "line",
    [
        b"<html>Bad gateway</html>",
        b"data: nonsense",
        b"data: 7",
        b"data: [1]",
        b"data: {}",
        b'data: {"choices":[{"text":"a server without return_token_ids"}]}',
        b'data: {"choices":[{"token_ids":["1"]}]}',
        b'data: {"choices":[{"token_ids":[true]}]}',
        b'data: {"choices":[{"token_ids":[1],"finish_reason":"repetition"}]}',
        b"data: " + b"[" * 100_000,
        b"data: \xff\xfe",
    ],
)
def test_what_is_no_completion_with_token_ids_fails_the_request(line: bytes):
    with pytest.raises(EngineError, match="the server's answer is no"):
        CompletionStream().feed(line + b"\n\n")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ({"message": "Token id 1000000 is out of vocabulary", "param": None, "code": 400}, InvalidRequest, "1000000"),
        ({"message": "Internal server error", "code": 500}, EngineError, r"failed on this request \(500\): Internal"),
        ({"message": "no code"}, EngineError, "no code"),
        ({"message": "slow down", "code": 429}, Overloaded, "slow down"),
    ],
)
def test_an_error_within_a_stream_is_the_servers_word(error: dict[str, Any], kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        CompletionStream().feed(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, {"error": {"message": "top_p must be in (0, 1], got 7.0.", "param": "top_p"}}, InvalidRequest, "top_p"),
        (400, {"error": {"message": "This model's maximum context length is 4"}}, ContextTooLong, "context length"),
        (404, {"error": {"message": "The model `poet` does not exist."}}, InvalidRequest, "poet"),
        (401, {"error": "Unauthorized"}, EngineError, r"refuses our API key \(401\): Unauthorized"),
        (429, {}, Overloaded, r"busy \(429\)"),
        (503, {"error": {"message": "queue full"}}, Overloaded, "queue full"),
        (500, {"error": {"message": "oops"}}, EngineError, "oops"),
        (502, None, EngineError, "failed on this request"),
        (302, {}, EngineError, "failed on this request"),
    ],
)
def test_statuses(status: int, body: Any, kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        raise error_of_response(status, None, b"<html>" if body is None else json.dumps(body).encode())


def test_a_busy_server_tells_when_to_come_again():
    error = error_of_response(429, "7", b"{}")
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 7.0
    assert error_of_response(429, "Wed, 21 Oct 2026 07:28:00 GMT", b"{}").retry_after_s is None


def test_a_strangers_words_are_cut_and_made_printable():
    told = str(error_of_response(500, None, b"\x1b[31m" + b"x" * 10_000))
    assert len(told) < 600
    assert "\x1b" not in told


def test_metrics_are_read_for_one_rank():
    assert read_metrics(RECORDED_METRICS, None) == ServerMetrics(
        num_running=3,
        num_waiting=1,
        kv_usage=0.25,
        num_tokens=120.0,
        started_at_s=1796009877.8,
        num_blocks=64,
        block_size_tokens=32,
        has_prefix_cache=True,
    )
    assert read_metrics(RECORDED_METRICS, 1) == ServerMetrics(5, 0, 0.5, started_at_s=1796009877.8)


@pytest.mark.parametrize(
    "text", ["", "<html>", 'vllm:num_requests_running{engine="0"} NaN', "vllm:num_requests_running e"]
)
def test_what_metrics_do_not_tell_is_none(text: str):
    assert read_metrics(text, None) == ServerMetrics()


def test_models_and_adapters_are_told_apart():
    cards = [
        {"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 1024},
        {"id": "alias", "root": "/models/tiny", "parent": None, "max_model_len": 1024},
        {"id": "poet", "root": "/adapters/poet", "parent": "tiny"},
    ]
    assert read_models({"data": cards}) == ServedModels(("tiny", "alias"), frozenset({"poet"}), "/models/tiny", 1024)


@pytest.mark.parametrize("body", [None, [], {}, {"data": []}, {"data": [7]}, {"data": [{"id": 7}]}])
def test_what_is_no_list_of_models_is_refused(body: Any):
    with pytest.raises(EngineError, match="something else than a list of models"):
        read_models(body)


def test_every_field_of_sampling_reaches_the_server():
    sampling = Sampling(9, 0.5, 0.9, 40, 0.1, 7, 0.2, 0.3, 1.1, 2, True, (3, 4))
    body = completion_body(EngineRequest(RequestId("r"), [1, 2], sampling, "salt", "poet", 5), "tiny", 8)
    more = ("logprobs", "json_schema", "reading")
    told = {
        field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling) if field.name not in more
    }
    assert body == told | {
        "max_tokens": 8,
        "stop_token_ids": [3, 4],
        "model": "poet",
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "salt",
        "priority": 5,
    }
    plain = completion_body(EngineRequest(RequestId("r"), [1], Sampling(1)), "tiny", 1)
    assert plain["model"] == "tiny"
    assert not {"seed", "cache_salt", "priority"} & plain.keys()


def test_schema_and_probabilities_are_asked_for_in_the_words_of_completions():
    sampling = Sampling(1, logprobs=2, json_schema='{"type":"object"}')
    body = completion_body(EngineRequest(RequestId("r"), [1], sampling), "tiny", 1)
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (2, True)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


def told_event(**logprobs: Any) -> bytes:
    choice = {"token_ids": [5, 6], "finish_reason": "stop", "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


def test_probabilities_come_with_their_tokens_and_the_likeliest_first():
    stream = CompletionStream(1)
    ids = stream.feed(
        told_event(
            token_logprobs=[-2.0, -0.5], top_logprobs=[{"token_id:5": -2.0, "token_id:9": -0.1}, {"token_id:6": -0.5}]
        )
    )
    assert stream.delta_of(ids, stream.finish, 4) == RichEngineDelta(
        (5, 6), FinishReason.STOP, 4, (TokenLogprobs(-2.0, (9,), (-0.1,)), TokenLogprobs(-0.5, (6,), (-0.5,)))
    )


@pytest.mark.parametrize(
    "logprobs",
    [
        {},
        {"token_logprobs": [-1.0, "x"], "top_logprobs": [{}, {}]},
        {"token_logprobs": [-1.0, float("-inf")], "top_logprobs": [{}, {}]},
        {"token_logprobs": [-1.0, -1.0], "top_logprobs": [{}]},
        {"token_logprobs": [-1.0, -1.0], "top_logprobs": [{"token_id:-3": -1.0}, {}]},
        {"token_logprobs": [-1.0, -1.0], "top_logprobs": [{"Hello": -1.0}, {}]},
    ],
)
def test_probabilities_that_are_none_are_refused(logprobs: dict[str, Any]):
    with pytest.raises(EngineError, match="no completion with token ids"):
        CompletionStream(1).feed(told_event(**logprobs))


def test_tokens_without_their_probabilities_are_refused():
    stream = CompletionStream(0)
    ids = stream.feed(told_event(token_logprobs=[-1.0], top_logprobs=[{}]))
    with pytest.raises(EngineError, match="probabilities of 1 of 2 tokens"):
        stream.delta_of(ids)
