"""The service on real vLLM workers, as OpenAI's own clients and curl see it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import openai
import pytest
import pytest_asyncio

from router import launch
from router.keys import KeyEntry
from router.launch import Serving
from router.serve import make_front
from shared.config import Settings
from shared.types import WorkerId
from tests.support.http_front import listening
from tests.support.rack import assert_no_leftovers

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = Settings(
    model="tiny",
    workers=2,
    dtype="float32",
    max_num_seqs=8,
    kv_cache_blocks=200,
    max_model_len=2048,
    lease_s=10.0,  # no stall of a busy machine is as long
    heartbeat_s=0.5,
)
KEY, OTHER_KEY, BUSY_KEY = "sk-of-the-tests", "sk-of-another-tenant", "sk-of-a-limited-one"
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
async def service() -> AsyncIterator[Service]:
    entries = [
        KeyEntry(name="tests", key=KEY),
        KeyEntry(name="other", key=OTHER_KEY),
        KeyEntry(name="busy", key=BUSY_KEY, requests_per_minute=6000, max_concurrent=1),
    ]
    async with launch.launched(SETTINGS, lambda line: None) as serving:
        front = make_front(serving, entries)
        async with listening(front) as url:
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
        (greedy(logprobs=True), openai.BadRequestError, "invalid_value", "logprobs"),
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


async def test_curl_of_the_readme(service: Service) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not on PATH")

    def curl(*arguments: str) -> str:
        command = ["curl", "-sN", "--max-time", "120", "-H", f"Authorization: Bearer {KEY}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
    asked = [f"{service.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    whole = json.loads(await blocking(lambda: curl(*asked, body)))
    assert whole["choices"][0]["message"]["role"] == "assistant"
    streamed = await blocking(lambda: curl(*asked, body[:-1] + ', "stream": true}'))
    assert streamed.endswith("data: [DONE]\n\n")
    assert "kvroute_requests_total" in await blocking(lambda: curl(f"{service.url}/metrics"))
    ready = json.loads(await blocking(lambda: curl(f"{service.url}/ready")))
    assert ready["workers"]["ready"] == 2
    assert WorkerId("w0") in service.serving.router.fleet.worker_to_instance
