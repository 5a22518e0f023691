"""The dashboard as a front mounts it, and the batches that it shows."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path

from router.attach import attached_router, find_servers
from router.batch_book import BatchBook
from router.keys import KeyEntry
from router.openai import Endpoint
from router.overview import BatchJob
from router.serve import make_front
from router.serve_dashboard import newest_jobs
from shared.config import Settings
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.http_front import ask
from tests.support.tokenizers import write_model_folder


def test_newest_batches_are_shown_with_their_progress(tmp_path: Path) -> None:
    book = BatchBook(tmp_path)
    for number in range(12):
        record = book.create("", Endpoint.CHAT, f"file-{number}", None)
        record.created_at = 1000 + number
        record.num_total, record.num_completed, record.num_failed = 10, number % 8, 1
        record.become("in_progress")
        book.write(record)
        os.utime(tmp_path / f"{record.id}.json", (1000 + number, 1000 + number))
    shown = newest_jobs(book)
    assert [job.began_at for job in shown] == list(range(1011, 1001, -1))
    assert shown[0] == BatchJob(record.id, "in_progress", 10, 12 % 8, 1, 1011)


def test_folder_without_batches_shows_none(tmp_path: Path) -> None:
    assert newest_jobs(BatchBook(tmp_path)) == []


async def test_front_of_the_serve_command_shows_the_dashboard_to_who_has_a_key(tmp_path: Path) -> None:
    server = await FakeVllm(FakeOptions()).start()
    try:
        tokenizer = str(write_model_folder(tmp_path))
        settings = Settings(attach=(server.attach,), tokenizer=tokenizer, api_key="k" * 32)
        async with attached_router(await find_servers(settings, nobody), nobody) as serving:
            front = make_front(serving, [])
            for path in (
                "/dashboard",
                "/dashboard/snapshot.json",
                "/dashboard/events",
                "/dashboard/static/dashboard.js",
            ):
                assert (await ask(front, path)).status == 401
            shown = {"authorization": "Basic " + base64.b64encode(b":" + b"k" * 32).decode()}
            assert b"<html" in (await ask(front, "/dashboard", headers=shown)).body
            seen = (await ask(front, "/dashboard/snapshot.json", headers=shown)).json
            assert [(row["worker"], row["state"]) for row in seen["workers"]] == [(f"127.0.0.1:{server.port}", "ready")]
            asked = {"prompt": "What goes where?"}
            assert (await ask(front, "/dashboard/explain", asked)).status == 401
            told = (await ask(front, "/dashboard/explain", asked, headers=shown)).json
            assert told["worker"] == f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def test_prompt_is_explained_with_the_blocks_of_its_tenant_alone(tmp_path: Path) -> None:
    server = await FakeVllm(FakeOptions()).start()
    try:
        settings = Settings(attach=(server.attach,), tokenizer=str(write_model_folder(tmp_path)))
        entries = [KeyEntry(name="search", key="k" * 32), KeyEntry(name="ops", key="o" * 32, admin=True)]
        text = "What goes where, and why does it go there? " * 4
        async with attached_router(await find_servers(settings, nobody), nobody) as serving:
            front = make_front(serving, entries)
            body = {"model": settings.served_model_name or "tiny", "prompt": text, "max_tokens": 4}
            assert (await ask(front, "/v1/completions", body, headers=bearer("k" * 32))).status == 200

            async def matched(**fields: str) -> int:
                asked = {"prompt": text, **fields}
                told = (await ask(front, "/dashboard/explain", asked, headers=bearer("o" * 32))).json
                count: int = told["candidates"][0]["matched_tokens"]
                return count

            async with asyncio.timeout(30.0):
                while not await matched(tenant="search"):
                    await asyncio.sleep(0.01)
            assert await matched() == await matched(tenant="search", cache_salt="other") == 0
            unknown = await ask(front, "/dashboard/explain", {"prompt": text, "tenant": "x"}, headers=bearer("o" * 32))
            assert unknown.json["error"]["param"] == "tenant"
            # Whoever guesses a tenant's prompt finds nothing of it, with its own key or with the salt by name.
            guess = await ask(front, "/v1/completions", body, headers=bearer("o" * 32))
            assert guess.headers["x-kvroute-matched-tokens"] == "0"
            assert guess.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    finally:
        await server.stop()


async def test_tenant_learns_nothing_of_anothers_prompts(tmp_path: Path) -> None:
    server = await FakeVllm(FakeOptions()).start()
    try:
        settings = Settings(attach=(server.attach,), tokenizer=str(write_model_folder(tmp_path)))
        entries = [KeyEntry(name="search", key="k" * 32), KeyEntry(name="chat", key="c" * 32)]
        text = "The merger with Umbrella is to be told on Monday at nine. " * 4
        async with attached_router(await find_servers(settings, nobody), nobody) as serving:
            front = make_front(serving, entries)
            body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0}

            async def guess() -> tuple[object, ...]:
                """All that an answer tells, but for what differs between any two."""
                answered = await ask(front, "/v1/completions", body, headers=bearer("c" * 32))
                headers = dict(answered.headers)
                del headers["x-request-id"], headers["x-kvroute-queue-ms"], headers["content-length"]
                told = answered.json
                del told["id"], told["created"]
                return answered.status, headers, told

            # A salt of its own for each guess: what the guesser has asked itself is no news.
            body["cache_salt"] = "first"
            before = await guess()
            mine = {**body, "cache_salt": "second"}
            assert (await ask(front, "/v1/completions", mine, headers=bearer("k" * 32))).status == 200
            assert (await ask(front, "/v1/completions", mine, headers=bearer("k" * 32))).json["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"] > 0
            body["cache_salt"] = "second"
            assert await guess() == before
            for path in ("/metrics", "/dashboard", "/dashboard/snapshot.json", "/dashboard/events"):
                refused = await ask(front, path, headers=bearer("c" * 32))
                assert refused.error == (403, "permission_denied", None)
            listed = [await ask(front, path, headers=bearer("c" * 32)) for path in ("/ready", "/v1/models", "/version")]
            assert not any(b"search" in answered.body for answered in listed)
    finally:
        await server.stop()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def nobody(line: str) -> None:
    """Nobody is told."""
