"""The HTTP front over a stand-in for the router: bodies, streams, errors and headers, as callers get them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.membership import STATES
from router.requests import Generated, GenerateRequest, RequestTrace
from router.tokenizer import Tokenizer
from shared.errors import AttemptsExhausted, EngineError, NoWorker, Overloaded, StreamBroken
from shared.hashing import unpack_tokens
from shared.types import FinishReason, WorkerId
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import MODEL, PATIENT_S, Asking, Fleet, ask, echo, make_front
from tests.support.tokenizers import write_model_folder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def fake(tokenizer: Tokenizer) -> FakeGenerate:
    return FakeGenerate(echo(tokenizer))


def chat(text: str = "Hi é", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any = "Hi é", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 100, **fields}


class BrokenGenerate:
    """Gives one token and then fails."""

    def __init__(self, first: int, error: Exception) -> None:
        self._first = first
        self._error = error

    async def __call__(self, request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        trace.worker = WorkerId("w0")
        yield Generated((self._first,))
        raise self._error


async def test_chat_is_answered_with_its_decision(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(make_front(fake, tokenizer), CHAT, chat(), headers={"x-request-id": "mine-1"})
    body = answered.json
    assert body.pop("id").startswith("chatcmpl-test-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi é", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": fake.requests[0].num_prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": fake.requests[0].num_prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    told = dict(answered.headers)
    assert float(told.pop("x-kvroute-queue-ms")) >= 0.0
    assert told == {
        "content-type": "application/json",
        "content-length": str(len(answered.body)),
        "x-request-id": "mine-1",
        "x-kvroute-worker": "w1",
        "x-kvroute-policy": "cost",
        "x-kvroute-matched-tokens": "0",
    }
    assert fake.num_live == 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_the_engine_does_not_tell_of_its_cache_is_left_out_of_usage(
    tokenizer: Tokenizer, is_streamed: bool
) -> None:
    fake = FakeGenerate(echo(tokenizer), cached_tokens=None)
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    answered = await ask(make_front(fake, tokenizer), COMPLETIONS, completion(["ab", "c"], **options))
    usage = answered.events[-2]["usage"] if is_streamed else answered.json["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }


async def test_list_of_prompts_is_answered_in_order_and_each_n_times(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    prompts = ["one", tokenizer.encode("two"), "three"]
    answered = await ask(make_front(fake, tokenizer), COMPLETIONS, completion(prompts, n=2))
    body = answered.json
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "one"),
        (1, "one"),
        (2, "two"),
        (3, "two"),
        (4, "three"),
        (5, "three"),
    ]
    assert body["usage"]["prompt_tokens"] == 3 + 3 + 5
    assert body["usage"]["completion_tokens"] == 2 * (4 + 4 + 6)


async def test_answers_of_one_request_are_drawn_by_seeds_that_follow_each_other(
    fake: FakeGenerate, tokenizer: Tokenizer
) -> None:
    front = make_front(fake, tokenizer)
    await ask(front, COMPLETIONS, completion("a", n=3, seed=7))
    await ask(front, COMPLETIONS, completion("a", n=2))
    assert [request.sampling.seed for request in fake.requests] == [7, 8, 9, None, None]
    assert len({request.request for request in fake.requests}) == 5


async def test_golden_chat_stream(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(
        make_front(fake, tokenizer), CHAT, chat("aé", stream=True, stream_options={"include_usage": True})
    )
    *events, last = answered.events
    assert last == "[DONE]"
    heads = {(event.pop("id"), event.pop("created"), event.pop("object"), event.pop("model")) for event in events}
    ((_, _, kind, model),) = heads
    assert (kind, model) == ("chat.completion.chunk", MODEL)

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {"choices": [choice], "usage": None}

    assert events == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "a"}),
        chunk({"content": "é"}),
        chunk({}, "stop"),
        {
            "choices": [],
            "usage": {
                "prompt_tokens": fake.requests[0].num_prompt_tokens,
                "completion_tokens": 4,
                "total_tokens": fake.requests[0].num_prompt_tokens + 4,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    ]
    assert answered.headers["content-type"].startswith("text/event-stream")
    assert answered.headers["x-kvroute-worker"] == "w1"


async def test_golden_text_stream(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(make_front(fake, tokenizer), COMPLETIONS, completion("ab", stream=True))
    *events, last = answered.events
    assert last == "[DONE]"
    assert [(event["choices"], "usage" in event) for event in events] == [
        ([{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}], False),
        ([{"index": 0, "text": "b", "logprobs": None, "finish_reason": None}], False),
        ([{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}], False),
    ]
    assert {event["object"] for event in events} == {"text_completion"}


async def test_streams_of_several_answers_are_whole_each(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(
        make_front(fake, tokenizer),
        COMPLETIONS,
        completion(["one é", "two"], n=2, stream=True, stream_options={"include_usage": True}),
    )
    *events, usage, last = answered.events
    assert (usage["choices"], usage["usage"]["completion_tokens"], last) == ([], 2 * (7 + 4), "[DONE]")
    texts, finishes = [""] * 4, [""] * 4
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finishes[choice["index"]] += choice["finish_reason"]
    assert (texts, finishes) == (["one é", "one é", "two", "two"], ["stop"] * 4)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stop_string_ends_the_answer_and_frees_the_request(
    fake: FakeGenerate, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    answered = await ask(
        make_front(fake, tokenizer), COMPLETIONS, completion("abcdef", stop=["cd"], stream=is_streamed)
    )
    choices = [event["choices"][0] for event in answered.events[:-1]] if is_streamed else answered.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert choices[-1]["finish_reason"] == "stop"
    assert fake.num_live == 0


async def test_length_is_told_as_the_reason(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(make_front(fake, tokenizer), COMPLETIONS, completion("abcdef", max_tokens=2))
    assert answered.json["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]


WRONG_BODIES: list[tuple[str, Any, int, str, str | None]] = [
    (CHAT, chat(temperature=3), 400, "invalid_value", "temperature"),
    (CHAT, chat(n=0), 400, "invalid_value", "n"),
    (CHAT, chat(n=129), 400, "invalid_value", "n"),
    (CHAT, chat(n=10**30), 400, "invalid_value", "n"),
    (CHAT, chat(logprobs=1), 400, "invalid_value", "logprobs"),
    (CHAT, chat(tools=[]), 400, "invalid_value", "tools"),
    (CHAT, chat(response_format={"type": "grammar"}), 400, "invalid_value", "response_format.type"),
    (CHAT, chat(stream="yes"), 400, "invalid_value", "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), 400, "invalid_value", "stream_options.x"),
    (CHAT, chat(stream=True, stream_options={"include_obfuscation": True}), 400, "invalid_value",
     "stream_options.include_obfuscation"),
    (CHAT, chat(surprise=1), 400, "invalid_value", "surprise"),
    (CHAT, chat(stop=["a"] * 5), 400, "invalid_value", "stop"),
    (CHAT, {"model": MODEL}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_value", "model"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
    (CHAT, {"model": MODEL, "messages": [{"role": "king", "content": ""}]}, 400, "invalid_value", "messages[0].role"),
    (CHAT, chat("x" * 600), 400, "context_length_exceeded", "messages"),
    (CHAT, chat(max_tokens=512), 400, "context_length_exceeded", "messages"),
    (COMPLETIONS, completion("x" * 600), 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion([[1], []]), 400, "invalid_value", "prompt[1]"),
    (COMPLETIONS, completion([[1], ["a"]]), 400, "invalid_value", "prompt[1][0]"),
    (COMPLETIONS, completion(["a"] * 1025), 400, "invalid_value", "prompt"),
    (COMPLETIONS, completion(["a"] * 100, n=128), 400, "invalid_value", "n"),
    (COMPLETIONS, completion([99999]), 400, "invalid_value", "prompt[0]"),
    (COMPLETIONS, {**completion(), "model": "gpt"}, 404, "model_not_found", "model"),
    (CHAT, [1], 400, "invalid_value", None),
    (CHAT, b"", 400, "invalid_value", None),
    (CHAT, b"{", 400, "invalid_value", None),
    (CHAT, b'{"model": NaN}', 400, "invalid_value", None),
    (CHAT, b"\xff\xfe{}", 400, "invalid_value", None),
    (CHAT, b'{"model": "\xff"}', 400, "invalid_value", None),
    (CHAT, b'{"model": "\\ud800"}', 400, "invalid_value", None),
    (CHAT, b'{"a":' * 100_000, 400, "invalid_value", None),
    (CHAT, b"[" * 1_000_000, 400, "invalid_value", None),
    (CHAT, b'{"model": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", 400, "invalid_value", None),
    (CHAT, b'{"model": "m", "messages": ' + b"[" * 200 + b"]" * 200 + b"}", 400, "invalid_value", "messages[0]"),
    (CHAT, b'{"model": "m", "max_tokens": 1' + b"0" * 100_000 + b"}", 400, "invalid_value", None),
    (CHAT, chat(n=10**9), 400, "invalid_value", "n"),
    (COMPLETIONS, completion(["a"] * 1000, n=128), 400, "invalid_value", "n"),
    (COMPLETIONS, completion(["a"] * 100_000), 400, "invalid_value", "prompt"),
    (CHAT, {**chat(), **{f"field{number}": 1 for number in range(10_000)}}, 400, "invalid_value", "field0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), WRONG_BODIES)
async def test_wrong_body_is_refused_by_name(
    fake: FakeGenerate, tokenizer: Tokenizer, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    answered = await ask(make_front(fake, tokenizer), path, body)
    assert answered.error == (status, code, param)
    assert answered.headers["x-should-retry"] == "false"
    assert "retry-after" not in answered.headers
    assert "Traceback" not in answered.body.decode()
    assert fake.requests == []


async def test_name_of_a_field_that_is_no_text_is_told_all_the_same(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(make_front(fake, tokenizer), CHAT, chat(**{"x" * 1000: 1}))
    assert answered.error == (400, "invalid_value", "x" * 61 + "...")


@pytest.mark.parametrize(
    ("error", "status", "code", "hints"),
    [
        (Overloaded("full", retry_after_s=0.25), 429, "rate_limit_exceeded", ("true", "250", "1")),
        (NoWorker("nobody"), 503, "service_unavailable", ("true", "1000", "1")),
        (EngineError("broken"), 500, "engine_error", ("true", "1000", "1")),
        (AttemptsExhausted("poison"), 503, "attempts_exhausted", ("false", None, None)),
        (ZeroDivisionError("secret"), 500, "internal_error", ("false", None, None)),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_error_before_the_first_token_has_a_status_and_says_when_to_come_back(
    tokenizer: Tokenizer,
    error: Exception,
    status: int,
    code: str,
    hints: tuple[str, str | None, str | None],
    is_streamed: bool,
) -> None:
    fake = FakeGenerate(echo(tokenizer), faults=[error])
    answered = await ask(make_front(fake, tokenizer), CHAT, chat(stream=is_streamed))
    assert answered.error == (status, code, None)
    assert tuple(map(answered.headers.get, ("x-should-retry", "retry-after-ms", "retry-after"))) == hints
    assert "secret" not in answered.body.decode()


@pytest.mark.parametrize(
    ("error", "code"), [(StreamBroken("gone"), "stream_broken"), (ZeroDivisionError("secret"), "internal_error")]
)
async def test_error_after_the_first_token_is_the_streams_last_event(
    tokenizer: Tokenizer, error: Exception, code: str
) -> None:
    broken = BrokenGenerate(tokenizer.encode("a")[0], error)
    answered = await ask(make_front(broken, tokenizer), COMPLETIONS, completion(stream=True))
    *_, last = answered.events
    assert answered.status == 200
    assert last["error"]["code"] == code
    assert "secret" not in answered.body.decode()


async def test_one_broken_answer_of_several_ends_all(tokenizer: Tokenizer) -> None:
    fake = FakeGenerate(echo(tokenizer), faults=[EngineError("broken")], gate=asyncio.Event())
    front = make_front(fake, tokenizer)
    for is_streamed in (False, True):
        fake._faults = [EngineError("broken")]
        answered = await ask(front, COMPLETIONS, completion(n=3, stream=is_streamed))
        told = answered.events[-1]["error"]["code"] if answered.status == 200 else answered.error[1]
        assert told == "engine_error"
        assert fake.num_live == 0


@pytest.mark.parametrize("coming", ["away", "resting", "silent"])
async def test_no_worker_is_told_at_once_and_workers_that_come_back_are_waited_for(
    fake: FakeGenerate, tokenizer: Tokenizer, coming: str
) -> None:
    fleet = Fleet(dict.fromkeys(STATES, 0) | {"draining": 1, "suspected": 1})
    front = make_front(fake, tokenizer, fleet=fleet)
    answered = await ask(front, CHAT, chat())
    assert answered.error == (503, "service_unavailable", None)
    assert (answered.headers["x-should-retry"], answered.headers["retry-after-ms"]) == ("true", "2000")
    assert (await ask(front, "/ready")).status == 503
    fleet.state_to_count[coming] = 1
    assert (await ask(front, CHAT, chat())).status == 200
    assert (await ask(front, "/ready")).status == 503
    fleet.state_to_count["ready"] = 1
    ready = await ask(front, "/ready")
    assert (ready.status, ready.json["is_ready"]) == (200, True)


async def test_requests_refused_for_want_of_workers_are_counted_and_told_once(
    fake: FakeGenerate, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(dict.fromkeys(STATES, 0))
    failures: Counter[str] = Counter()
    front = make_front(fake, tokenizer, fleet=fleet, failures=failures)
    for num_refused in (3, 2):
        for _ in range(num_refused):
            assert (await ask(front, CHAT, chat())).status == 503
        fleet.state_to_count["ready"] = 1
        assert (await ask(front, CHAT, chat())).status == 200
        fleet.state_to_count["ready"] = 0
        # Until what was seen is seen anew.
        while (await ask(front, CHAT, chat())).status == 200:
            await asyncio.sleep(0.01)
    told = [record.getMessage() for record in caplog.records]
    loss = "no worker is ready: requests are refused with status 503 until one is"
    assert [line.partition(" after ")[0] for line in told] == [loss, "there are workers again"] * 2 + [loss]
    # The refusal that ended a round counts with those of the next.
    assert [line.partition("; ")[2] for line in told[1::2]] == ["3 requests were refused", "3 requests were refused"]
    assert failures == {"service_unavailable": 7}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_caller_that_goes_away_before_the_first_token_frees_its_request(
    tokenizer: Tokenizer, is_streamed: bool, num_choices: int
) -> None:
    waiting = asyncio.Event()

    async def never(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        waiting.set()
        try:
            await asyncio.Event().wait()
            yield Generated(())
        finally:
            waiting.clear()

    front = make_front(never, tokenizer)
    body = b'{"model": "m", "prompt": "a", "n": %d, "stream": %b}' % (num_choices, str(is_streamed).lower().encode())
    asking = Asking(front, "POST", COMPLETIONS, body, {"content-type": "application/json"})
    async with asyncio.timeout(PATIENT_S):
        await waiting.wait()
        asking.go_away()
        await asking.task
    assert (asking.sent, waiting.is_set(), front.num_under_way) == ([], False, 0)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_caller_that_goes_away_in_mid_stream_frees_its_request(tokenizer: Tokenizer, num_choices: int) -> None:
    fake = FakeGenerate(echo(tokenizer), gate=asyncio.Event())
    front = make_front(fake, tokenizer)
    body = b'{"model": "m", "prompt": "abc", "n": %d, "stream": true}' % num_choices
    asking = Asking(front, "POST", COMPLETIONS, body, {"content-type": "application/json"})
    async with asyncio.timeout(PATIENT_S):
        while not any(message["type"] == "http.response.body" for message in asking.sent):
            asking.news.clear()
            await asking.news.wait()
        assert fake.num_live == num_choices
        asking.go_away()
        await asking.task
    assert (fake.num_live, front.num_under_way) == (0, 0)


async def test_tokenisation_error_names_the_prompt(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}
    assert (await ask(make_front(fake, tokenizer), CHAT, body)).error == (400, "invalid_value", "messages")


async def test_request_carries_what_the_body_says(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    body = completion("ab", temperature=0, seed=3, cache_salt="s", priority=-2, user="kim")
    await ask(make_front(fake, tokenizer), COMPLETIONS, body)
    (request,) = fake.requests
    assert unpack_tokens(request.token_ids) == tokenizer.encode("ab")
    assert (request.salt, request.priority, request.tenant) == ("s", -2, "kim")
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.max_tokens) == (0.0, 3, 100)


@pytest.mark.parametrize(
    ("shown", "is_taken"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("localhost.:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        # Nobody can give an address another address.
        ("10.1.2.3:8000", True),
        ("kvroute.localhost", True),
        ("this-machine:8000", True),
        (None, True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example.", False),
        ("evil.example:localhost", False),
        ("[::1", False),
        ("", False),
        ("evil.example:80@localhost", False),
        ("a" * 5000, False),
        ("\xe9.example", False),
    ],
)
async def test_front_without_keys_takes_requests_for_its_own_host_alone(
    fake: FakeGenerate, tokenizer: Tokenizer, shown: str | None, is_taken: bool
) -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    front = make_front(fake, tokenizer, own_hosts={"localhost", "this-machine"}, mounts={"page": page})
    headers = {} if shown is None else {"host": shown}
    bodies = {COMPLETIONS: completion(), "/metrics": None, "/v1/models": None, "/page/x": None}
    for answered in [await ask(front, path, body, headers=headers) for path, body in bodies.items()]:
        if is_taken:
            assert answered.status == 200
        else:
            assert answered.error == (403, "permission_denied", "host")
            assert "--api-key" in answered.json["error"]["message"]
            assert len(answered.body) < 600
    assert len(fake.requests) == is_taken


async def test_addresses_without_a_prompt(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    front = make_front(fake, tokenizer)
    models = (await ask(front, "/v1/models")).json
    assert (models["object"], [model["id"] for model in models["data"]]) == ("list", [MODEL])
    assert (await ask(front, "/v1/models/m")).json == models["data"][0]
    assert (await ask(front, "/v1/models/other")).error == (404, "model_not_found", "model")
    health = await ask(front, "/health")
    assert (health.status, health.body) == (200, b"")
    assert (await ask(front, "/version")).json.keys() == {"version"}
    assert (await ask(front, "/metrics")).body == b"# no metrics\n"
    assert (await ask(front, "/openapi.json")).json["openapi"].startswith("3.1")
    assert (await ask(front, "/nowhere")).error == (404, "not_found", None)
    refused = await ask(front, CHAT)
    assert (refused.error, refused.headers["allow"]) == ((405, "method_not_allowed", None), "POST")


async def test_unusable_request_id_is_replaced(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    front = make_front(fake, tokenizer)
    for given in ("", "x" * 129, "a b", "é"):
        answered = await ask(front, "/version", headers={"x-request-id": given})
        assert answered.headers["x-request-id"].startswith("req-test-")


async def test_two_requests_of_one_id_do_not_meet(tokenizer: Tokenizer) -> None:
    fake = FakeGenerate(echo(tokenizer))
    front = make_front(fake, tokenizer)
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(ask(front, CHAT, chat(), headers=headers) for _ in range(2)))
    assert {answer.status for answer in answers} == {200}
    assert len({request.request for request in fake.requests}) == 2


async def test_form_of_a_foreign_page_is_refused(fake: FakeGenerate, tokenizer: Tokenizer) -> None:
    answered = await ask(make_front(fake, tokenizer), CHAT, chat(), headers={"content-type": "text/plain"})
    assert answered.error == (400, "invalid_value", "content-type")


async def test_engine_that_gives_up_is_an_error(tokenizer: Tokenizer) -> None:
    async def aborted(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        yield Generated((), FinishReason.ABORT)

    for is_streamed in (False, True):
        answered = await ask(make_front(aborted, tokenizer), COMPLETIONS, completion(stream=is_streamed))
        assert answered.error == (500, "engine_error", None)


async def test_draining_front_refuses_new_work_and_finishes_what_it_has(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    fake = FakeGenerate(echo(tokenizer), gate=gate)
    front = make_front(fake, tokenizer)
    streaming = asyncio.create_task(ask(front, COMPLETIONS, completion("abc", stream=True)))
    await fake.is_busy.wait()
    draining = asyncio.create_task(front.drain(PATIENT_S))
    await asyncio.sleep(0)
    refused = await ask(front, CHAT, chat())
    assert (refused.error, refused.headers["x-should-retry"]) == ((503, "service_unavailable", None), "true")
    ready = await ask(front, "/ready")
    assert (ready.status, ready.json["is_draining"]) == (503, True)
    assert (await ask(front, "/health")).status == 200
    assert not draining.done()
    gate.set()
    answered = await streaming
    assert "".join(event["choices"][0]["text"] for event in answered.events[:-1]) == "abc"
    await draining


async def test_what_outlasts_a_drain_ends_with_an_error(tokenizer: Tokenizer) -> None:
    fake = FakeGenerate(echo(tokenizer), gate=asyncio.Event())
    front = make_front(fake, tokenizer)
    streaming = asyncio.create_task(ask(front, COMPLETIONS, completion("abc", stream=True)))
    waiting = asyncio.create_task(ask(front, COMPLETIONS, completion("abc")))
    while fake.num_live < 2:
        await asyncio.sleep(0)
    await front.drain(0.01)
    front.cut()
    assert (await streaming).events[-1]["error"]["code"] == "service_unavailable"
    assert (await waiting).error == (503, "service_unavailable", None)
    assert fake.num_live == 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_answer_that_ends_by_itself_is_read_to_its_end(
    tokenizer: Tokenizer, is_streamed: bool, num_choices: int
) -> None:
    num_ended = 0

    async def counting(request: GenerateRequest, trace: RequestTrace) -> AsyncIterator[Generated]:
        nonlocal num_ended
        yield Generated(tuple(tokenizer.encode("a")), FinishReason.LENGTH)
        num_ended += 1

    body = completion("a", stream=is_streamed, n=num_choices)
    assert (await ask(make_front(counting, tokenizer), COMPLETIONS, body)).status == 200
    assert num_ended == num_choices
