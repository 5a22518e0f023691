"""The description of the service: true to what is served, and no request made from it breaks anything."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from router.batch_book import BatchBook
from router.http_call import Limits
from router.http_files import FilesApi
from router.stored_files import FileStore
from router.tokenizer import Tokenizer
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import MODEL, ask, echo, listening, make_front
from tests.support.tokenizers import write_model_folder

NUM_EXAMPLES = 40
"""Of each operation."""


class _Server:
    """A server with a loop of its own, in a thread, for callers that block theirs."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.url = ""

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        api = FilesApi(FileStore(self._folder / "files"), BatchBook(self._folder / "batches"), Limits())
        front = make_front(FakeGenerate(echo(self._tokenizer)), self._tokenizer, files_api=api)
        async with listening(front) as url:
            self.url = url
            self._is_up.set()
            await self._end.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._is_up.wait(60.0)
        return self.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    with _Server(Tokenizer(write_model_folder(folder / "model")), folder) as url:
        yield url


def test_requests_made_from_the_description_never_break_the_server(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: set[int] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @seed(7)
        @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                # A name that is made up would never get past the first look.
                case.body = {**case.body, "model": MODEL}
            response = case.call(base_url=url)
            statuses.add(response.status_code)
            case.validate_response(
                response, checks=(not_a_server_error, status_code_conformance, response_schema_conformance)
            )

        ask()
    assert {200, 400, 404} <= statuses


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_are_as_described(url: str, path: str) -> None:
    # Made-up requests seldom ask for one.
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path]["POST"]
    subject = {"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("/v1/chat") else {"prompt": "Hi"}
    case = operation.Case(body={"model": MODEL, "stream": True, **subject}, media_type="application/json")
    response = case.call(base_url=url)
    assert response.status_code == 200
    case.validate_response(response, checks=(status_code_conformance, response_schema_conformance))


def test_broken_requests_made_from_the_description_are_refused(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if not any(body.media_type == "application/json" for body in operation.body):
            # Forms have no types that could be wrong.
            continue

        @seed(7)
        @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(schemathesis.GenerationMode.NEGATIVE))
        def ask(case: Any) -> None:
            response = case.call(base_url=url)
            assert 400 <= response.status_code < 500, (case.body, response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()


async def test_every_address_is_described_and_served(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path / "model"))
    api = FilesApi(FileStore(tmp_path / "files"), BatchBook(tmp_path / "batches"), Limits())
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, files_api=api)
    described = (await ask(front, "/openapi.json")).json["paths"]
    assert set(front._routes) <= set(described)
    for path, operations in described.items():
        answered = await ask(front, re.sub("{.*?}", "x", path), method="PATCH")
        assert answered.status == 405
        assert {method.lower() for method in answered.headers["allow"].split(", ")} == set(operations)


@pytest.mark.parametrize(
    ("message", "is_taken"),
    [
        ({"content": None, "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}, True),
        ({"tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"}}], "reasoning": "Hm."}, True),
        ({"content": "Hi", "tool_calls": None}, True),
        ({"content": "Hi", "tool_calls": []}, True),
        ({"content": None}, False),
        ({"content": None, "tool_calls": []}, False),
        ({"tool_calls": [{"function": {}}]}, False),
    ],
)
async def test_what_an_assistant_has_said_is_taken_as_described(
    tmp_path: Path, message: dict[str, Any], is_taken: bool
) -> None:
    tokenizer = Tokenizer(write_model_folder(tmp_path))
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer)
    described = (await ask(front, "/openapi.json")).json
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "assistant", **message}]}
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": described["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_taken
    assert (await ask(front, "/v1/chat/completions", body)).status == (200 if is_taken else 400)
