"""The service on real vLLM workers, as OpenAI's own clients and curl see it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import typing
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
import pydantic
import pytest
import pytest_asyncio

from router import launch
from router.keys import KeyEntry
from router.serve import make_batch_service, make_front, open_files
from router.serving import Serving
from shared.config import Settings
from shared.types import WorkerId
from tests.support.commands import needs_curl
from tests.support.http_front import listening
from tests.support.rack import assert_no_leftovers

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

README = Path(__file__).parents[2] / "README.md"
SETTINGS = Settings(
    model="tiny",
    workers=2,
    dtype="float32",
    max_num_seqs=8,
    kv_cache_blocks=200,
    max_model_len=2048,
    tool_call_parser="hermes",
    lease_s=10.0,  # no stall of a busy machine is as long
    heartbeat_s=0.5,
)
KEY, OTHER_KEY, BUSY_KEY = "sk-of-the-tests", "sk-of-another-tenant", "sk-of-a-limited-one"
ADMIN_KEY = "sk-of-who-watches"
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a test. " * 20},
    {"role": "user", "content": "Say something, é?"},
]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Service:
    serving: Serving
    url: str

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def async_client(self, key: str = KEY, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    async def settle(self) -> None:
        """Wait until nothing is under way any more, at the router or at a worker."""
        async with asyncio.timeout(60.0):
            while self.serving.router.fleet.loads().num_requests.any() or self.serving.router.fleet.num_bookings:
                await asyncio.sleep(0.02)
        assert_no_leftovers(self.serving.router)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    entries = [
        KeyEntry(name="tests", key=KEY),
        KeyEntry(name="other", key=OTHER_KEY),
        KeyEntry(name="admin", key=ADMIN_KEY, admin=True),
        KeyEntry(name="busy", key=BUSY_KEY, requests_per_minute=6000, max_concurrent=1),
    ]
    async with launch.launched(SETTINGS, lambda line: None) as serving:
        settings = SETTINGS.model_copy(update={"files_dir": tmp_path_factory.mktemp("files")})
        files = open_files(settings)
        front = make_front(serving, entries, files=files)
        async with make_batch_service(serving, entries, files), listening(front) as url:
            yield Service(serving, url)


async def blocking(work: Callable[[], _Result]) -> _Result:
    """What a client gives that blocks its thread."""
    return await asyncio.to_thread(work)


def greedy(**options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0, **options}


async def test_sync_client_chats_and_second_turn_comes_from_the_cache(service: Service) -> None:
    def chat() -> None:
        with service.client() as client:
            first = client.chat.completions.create(**greedy())
            assert first.object == "chat.completion"
            assert first.choices[0].finish_reason in ("stop", "length")
            assert first.usage is not None
            assert first.usage.completion_tokens <= 24
            answer = {"role": "assistant", "content": first.choices[0].message.content}
            again = [*MESSAGES, answer, {"role": "user", "content": "and more"}]
            second = client.chat.completions.create(**greedy(messages=again))
            assert second.usage is not None
            assert second.usage.prompt_tokens_details is not None
            # All full blocks of the first prompt, by the engine's own count.
            assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens // 64 * 64

    await blocking(chat)
    await service.settle()


async def test_streams_of_the_async_client_say_what_whole_answers_say(service: Service) -> None:
    async with service.async_client() as client:
        whole = await client.chat.completions.create(**greedy())
        stream = await client.chat.completions.create(**greedy(stream=True, stream_options={"include_usage": True}))
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1
    await service.settle()


async def test_completions_take_texts_token_ids_and_lists_of_either(service: Service) -> None:
    async with service.async_client() as client:
        text = "The quick brown fox jumps over the lazy dog."
        ids = service.serving.tokenizer.encode(text)
        prompts: list[Any] = [text, ids, [text], [text, text], [ids, ids]]
        answers = [
            await client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0)
            for prompt in prompts
        ]
        texts = [[choice.text for choice in answer.choices] for answer in answers]
        assert [len(found) for found in texts] == [1, 1, 1, 2, 2]
        assert len({one for found in texts for one in found}) == 1
        assert answers[3].usage is not None
        assert answers[3].usage.prompt_tokens == 2 * len(ids)
        stream = await client.completions.create(
            model="tiny", prompt=[text, text], max_tokens=16, temperature=0, stream=True
        )
        pieces = ["", ""]
        async for chunk in stream:
            pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert pieces == texts[3]
    await service.settle()


async def test_seeds_make_answers_repeatable_and_different_from_each_other(service: Service) -> None:
    async with service.async_client() as client:
        asked = greedy(temperature=1.0, n=3, seed=11)
        first, second = [await client.chat.completions.create(**asked) for _ in range(2)]
        texts = [choice.message.content for choice in first.choices]
        assert texts == [choice.message.content for choice in second.choices]
        assert len(set(texts)) == 3
        alone = await client.chat.completions.create(**greedy(temperature=1.0, seed=12))
        assert alone.choices[0].message.content == texts[1]
        assert first.usage is not None
        assert alone.usage is not None
        assert first.usage.prompt_tokens == alone.usage.prompt_tokens
    await service.settle()


async def test_stop_string_cuts_what_the_model_would_say(service: Service) -> None:
    async with service.async_client() as client:
        whole = (await client.chat.completions.create(**greedy())).choices[0].message.content
        assert whole
        stop = whole[6:8]
        cut = (await client.chat.completions.create(**greedy(stop=[stop]))).choices[0]
        assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    await service.settle()


async def test_raw_response_shows_the_decision(service: Service) -> None:
    async with service.async_client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            **greedy(), extra_headers={"x-request-id": "mine-7"}
        )
        workers = {str(worker) for worker in service.serving.router.fleet.worker_to_instance}
        assert raw.headers["x-request-id"] == "mine-7"
        assert raw.headers["x-kvroute-worker"] in workers
        assert raw.headers["x-kvroute-policy"] == "cost"
        assert int(raw.headers["x-kvroute-matched-tokens"]) % 64 == 0
        assert float(raw.headers["x-kvroute-queue-ms"]) >= 0.0
        assert raw.parse()._request_id == "mine-7"


@pytest.mark.parametrize(
    ("asked", "kind", "code", "param"),
    [
        (greedy(model="gpt-9"), openai.NotFoundError, "model_not_found", "model"),
        (greedy(temperature=9), openai.BadRequestError, "invalid_value", "temperature"),
        (greedy(max_tokens=5000), openai.BadRequestError, "context_length_exceeded", "messages"),
        (greedy(logit_bias={"5": 1}), openai.BadRequestError, "invalid_value", "logit_bias"),
    ],
)
async def test_errors_are_the_clients_own_classes(
    service: Service, asked: dict[str, Any], kind: type[openai.APIStatusError], code: str, param: str
) -> None:
    async with service.async_client() as client:
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**asked)
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITIES = {"type": "string", "enum": ["Paris", "Rome"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": CITIES},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


def drawn(**options: Any) -> dict[str, Any]:
    """For answers that a grammar gives a form: the likeliest tokens of a random model may be blanks for ever."""
    return greedy(**{"max_tokens": 900, "temperature": 2.0, "seed": 5, **options})


def format_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def test_sync_client_gets_answers_of_the_form_that_it_asks_for(service: Service) -> None:
    def chat() -> None:
        with service.client() as client:
            asked = drawn(response_format=format_of(PERSON))
            for num_answers in (1, 2):
                answer = client.chat.completions.create(**asked, n=num_answers)
                for choice in answer.choices:
                    assert set(json.loads(choice.message.content or "")) == {"name", "age"}
                    assert choice.finish_reason == "stop"
            text = "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
            )
            assert set(json.loads(text)) == {"name", "age"}
            answer = client.chat.completions.create(**greedy(max_tokens=8, response_format={"type": "json_object"}))
            assert (answer.choices[0].message.content or "").startswith("{")
            found = client.completions.create(
                model="tiny",
                prompt="a",
                max_tokens=400,
                temperature=0,
                extra_body={"response_format": format_of(CITIES)},
            )
            assert json.loads(found.choices[0].text) in CITIES["enum"]

    await blocking(chat)
    await service.settle()


async def test_client_parses_an_answer_into_a_model_of_its_own(service: Service) -> None:
    class Person(pydantic.BaseModel):
        name: typing.Literal["Ada", "Bob"]
        is_old: bool

    async with service.async_client() as client:
        parsed = await client.chat.completions.parse(**drawn(), response_format=Person)
        assert isinstance(parsed.choices[0].message.parsed, Person)
    await service.settle()


async def test_tool_is_called_and_its_result_goes_into_the_next_turn(service: Service) -> None:
    async with service.async_client() as client:
        asked = drawn(tools=TOOLS)
        first = (await client.chat.completions.create(**asked, tool_choice=WEATHER)).choices[0]
        assert first.message.tool_calls
        (call,) = first.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, first.finish_reason, first.message.content) == ("weather", "stop", None)
        assert json.loads(call.function.arguments)["city"] in CITIES["enum"]
        any_tool = (await client.chat.completions.create(**asked, tool_choice="required")).choices[0]
        assert any_tool.finish_reason == "tool_calls"
        assert {call.function.name for call in any_tool.message.tool_calls or ()} <= {"weather", "now"}  # type: ignore[union-attr]
        result = {"role": "tool", "content": "sunny", "tool_call_id": call.id}
        again = {**asked, "messages": [*MESSAGES, first.message, result], "max_tokens": 8}
        for choice in ("auto", "none"):
            answer = await client.chat.completions.create(**again, tool_choice=choice)
            assert answer.choices[0].message.content
            assert not answer.choices[0].message.tool_calls
    await service.settle()


async def test_streamed_call_is_the_same_as_the_whole_one(service: Service) -> None:
    async with service.async_client() as client:
        asked = drawn(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            num_pieces = 0
            async for event in stream:
                num_pieces += event.type == "tool_calls.function.arguments.delta"
            streamed = (await stream.get_final_completion()).choices[0]
        assert num_pieces >= 1
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        (one,), (other,) = streamed.message.tool_calls or (), whole.message.tool_calls or ()
        assert other.type == "function"
        assert one.function.name == other.function.name
        assert json.loads(one.function.arguments) == json.loads(other.function.arguments)
    await service.settle()


async def test_probabilities_come_whole_and_streamed(service: Service) -> None:
    async with service.async_client() as client:
        asked = greedy(max_tokens=8, logprobs=True, top_logprobs=2)
        whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
        assert whole is not None
        assert whole.content
        assert [len(token.top_logprobs) for token in whole.content] == [2] * 8
        # A greedy answer takes the likeliest.
        assert [token.top_logprobs[0].token for token in whole.content] == [token.token for token in whole.content]
        tokens = []
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices[0].logprobs is not None:
                tokens += chunk.choices[0].logprobs.content or []
        assert [token.token for token in tokens] == [token.token for token in whole.content]
        text = await client.completions.create(model="tiny", prompt="a", max_tokens=4, temperature=0, logprobs=1)
        told = text.choices[0].logprobs
        assert told is not None
        assert [len(found) for found in told.top_logprobs or ()] == [1] * 4
        assert len(told.tokens or ()) == len(told.token_logprobs or ()) == len(told.text_offset or ()) == 4
    await service.settle()


@pytest.mark.parametrize(
    "schema",
    [{"type": "banana"}, {"$ref": "#/nope"}, {"type": "string", "pattern": "(("}, {"type": "integer", "multipleOf": 3}],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_schema_that_the_engine_cannot_hold_is_the_callers_error(
    service: Service, schema: Any, is_streamed: bool
) -> None:
    async with service.async_client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**greedy(response_format=format_of(schema), stream=is_streamed))
        assert (caught.value.code, caught.value.param) == ("invalid_value", "response_format")
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert (await client.chat.completions.create(**greedy(max_tokens=2))).choices
    state_to_count = service.serving.router.fleet.state_to_count()
    assert state_to_count["ready"] == SETTINGS.workers
    await service.settle()


async def test_raw_stream_of_a_call_is_in_openais_form(service: Service) -> None:
    async with service.async_client() as client:
        asked = drawn(tools=TOOLS, tool_choice=WEATHER, stream=True)
        async with client.chat.completions.with_streaming_response.create(**asked) as raw:
            lines = [line async for line in raw.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert set(calls[0]) == {"index", "id", "type", "function"}
        assert all(set(call) == {"index", "function"} for call in calls[1:])
        assert "".join(call["function"]["arguments"] for call in calls)
    await service.settle()


async def test_wrong_key_is_refused_and_models_are_listed_for_a_right_one(service: Service) -> None:
    async with service.async_client("sk-wrong-key") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with service.async_client() as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_client_that_is_turned_away_comes_back_by_itself(service: Service) -> None:
    async with service.async_client(BUSY_KEY, max_retries=20) as client:
        asked = [client.chat.completions.create(**greedy(max_tokens=2)) for _ in range(3)]
        async with asyncio.timeout(240.0):
            answers = await asyncio.gather(*asked)
        assert all(answer.choices for answer in answers)
    async with service.async_client(BUSY_KEY, max_retries=0) as client:
        results = await asyncio.gather(
            *(client.chat.completions.create(**greedy(max_tokens=200, extra_body={"ignore_eos": True})) for _ in "ab"),
            return_exceptions=True,
        )
        (refused,) = [result for result in results if isinstance(result, openai.RateLimitError)]
        assert refused.response.headers["retry-after-ms"] == "1000"
        assert refused.response.headers["x-ratelimit-limit-requests"] == "6000"
    await service.settle()


async def test_tenants_share_no_cached_block(service: Service) -> None:
    messages = [{"role": "user", "content": "a secret of one tenant " * 20}]
    cached = []
    for key in (KEY, KEY, OTHER_KEY):
        async with service.async_client(key) as client:
            answer = await client.chat.completions.create(**greedy(messages=messages, max_tokens=2))
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1]


async def test_client_that_leaves_in_mid_stream_frees_its_worker(service: Service) -> None:
    async with service.async_client() as client:
        stream = await client.chat.completions.create(
            **greedy(max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
        )
        async for _ in stream:
            break
        await stream.close()
    await service.settle()


async def test_batch_of_the_client_goes_from_upload_to_results(service: Service) -> None:
    url = "/v1/chat/completions"
    bodies = [greedy(max_tokens=4, messages=[{"role": "user", "content": f"row {number}"}]) for number in range(6)]
    rows = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {**body, "n": 1 + (number == 5)}}
        for number, body in enumerate(bodies)
    ]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    async with service.async_client() as client:
        uploaded = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert uploaded.bytes == len(content)
        batch = await client.batches.create(input_file_id=uploaded.id, endpoint=url, completion_window="24h")
        async with asyncio.timeout(240.0):
            while batch.status != "completed":
                assert batch.status in ("validating", "in_progress", "finalizing"), batch.errors
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
        assert batch.output_file_id
        assert batch.error_file_id
        answered = (await client.files.content(batch.output_file_id)).text.splitlines()
        assert {json.loads(line)["custom_id"] for line in answered} == {f"r{number}" for number in range(5)}
        (failed,) = (await client.files.content(batch.error_file_id)).text.splitlines()
        assert json.loads(failed)["error"]["param"] == "n"
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert uploaded.id in {one.id async for one in client.files.list()}
        assert (await client.files.delete(uploaded.id)).deleted
    async with service.async_client(OTHER_KEY) as stranger:
        with pytest.raises(openai.NotFoundError):
            await stranger.files.content(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            await stranger.batches.retrieve(batch.id)


def curls_of_the_readme() -> list[str]:
    """The calls that the README has its readers try."""
    lines = README.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("curl ")]


@needs_curl
async def test_curls_of_the_readme(service: Service) -> None:
    commands = curls_of_the_readme()
    assert commands
    for command in commands:
        for shown, ours in (("http://127.0.0.1:8000", service.url), ('"smollm2"', '"tiny"')):
            assert shown in command
            command = command.replace(shown, ours)
        ran = await blocking(
            lambda command=command: subprocess.run(
                ["bash", "-c", f"{command} -sS --fail-with-body --max-time 120 -H 'authorization: Bearer {KEY}'"],
                capture_output=True,
                text=True,
                check=False,
            )
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert openai.types.chat.ChatCompletion.model_validate_json(ran.stdout).choices[0].message.content
    await service.settle()


@needs_curl
async def test_curl_reads_streams_and_what_else_is_served(service: Service) -> None:
    def curl(*arguments: str, key: str = KEY) -> str:
        command = ["curl", "-sN", "--max-time", "120", "-H", f"Authorization: Bearer {key}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
    asked = [f"{service.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    whole = json.loads(await blocking(lambda: curl(*asked, body)))
    assert whole["choices"][0]["message"]["role"] == "assistant"
    streamed = await blocking(lambda: curl(*asked, body[:-1] + ', "stream": true}'))
    assert streamed.endswith("data: [DONE]\n\n")
    refused = json.loads(await blocking(lambda: curl(f"{service.url}/metrics")))
    assert refused["error"]["code"] == "permission_denied"
    assert "kvroute_requests_total" in await blocking(lambda: curl(f"{service.url}/metrics", key=ADMIN_KEY))
    ready = json.loads(await blocking(lambda: curl(f"{service.url}/ready")))
    assert ready["workers"]["ready"] == 2
    assert WorkerId("w0") in service.serving.router.fleet.worker_to_instance
