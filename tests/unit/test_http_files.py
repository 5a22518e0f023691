"""Files and batches over HTTP, on disk and over restarts, with a stand-in for the router."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router import batch_service, http_files
from router.batch import BatchLimits, PreparedBatch, prepare_batch
from router.batch_book import BatchBook, BatchRecord
from router.batch_service import BatchRuns, BatchService
from router.http import Front
from router.http_call import Limits
from router.http_files import FilesApi
from router.keys import KeyEntry, KeyRing
from router.requests import ServiceClass
from router.stored_files import FileStore
from router.tokenizer import Tokenizer
from shared.types import CacheScheme
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import CONTEXT_TOKENS, MODEL, PATIENT_S, Answered, ask, echo, make_front
from tests.support.tokenizers import write_model_folder

KEYS = {"a": "sk-key-of-team-a", "b": "sk-key-of-team-b"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def upload(
    content: bytes, *, filename: str = "in.jsonl", purpose: str | None = "batch", name: str = "file"
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a multipart upload."""
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="{filename}"\r\n\r\n'.encode() + content]
    if purpose is not None:
        parts.insert(0, f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}'.encode())
    return b"\r\n".join([*parts, b"--b--\r\n"]), {"content-type": "multipart/form-data; boundary=b"}


def rows(*bodies: Any, url: str = CHAT) -> bytes:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@dataclass(slots=True)
class Desk:
    """One life of a server with files."""

    front: Front
    fake: FakeGenerate

    async def ask(self, path: str, body: Any = None, *, key: str = "a", **options: Any) -> Answered:
        headers = {"authorization": f"Bearer {KEYS[key]}", **options.pop("headers", {})}
        return await ask(self.front, path, body, headers=headers, **options)

    async def upload(self, content: bytes, *, key: str = "a", **options: Any) -> Answered:
        body, headers = upload(content, **options)
        return await self.ask("/v1/files", body, key=key, headers=headers)

    async def start_batch(self, content: bytes, *, key: str = "a", endpoint: str = CHAT) -> str:
        stored = await self.upload(content, key=key)
        assert stored.status == 200, stored.body
        body = {"input_file_id": stored.json["id"], "endpoint": endpoint, "completion_window": "24h"}
        created = await self.ask("/v1/batches", body, key=key)
        assert created.status == 200, created.body
        found: str = created.json["id"]
        return found

    async def until(self, batch_id: str, *statuses: str, key: str = "a") -> dict[str, Any]:
        async with asyncio.timeout(PATIENT_S):
            while True:
                batch: dict[str, Any] = (await self.ask(f"/v1/batches/{batch_id}", key=key)).json
                if batch["status"] in statuses:
                    return batch
                await asyncio.sleep(0.01)

    async def lines(self, file_id: str, *, key: str = "a") -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (await self.ask(f"/v1/files/{file_id}/content", key=key)).body.splitlines()
        ]


@contextlib.asynccontextmanager
async def desk(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    tenants: str = "ab",
    max_file_bytes: int = 1 << 20,
    requests_per_minute: int | None = None,
    **fake: Any,
) -> AsyncIterator[Desk]:
    files, book = FileStore(folder / "files"), BatchBook(folder / "batches")
    entries = [KeyEntry(name=name, key=KEYS[name], requests_per_minute=requests_per_minute) for name in tenants]
    keys = KeyRing(entries, asyncio.get_running_loop().time)
    generate = FakeGenerate(echo(tokenizer), **fake)
    runs = BatchRuns(
        generate=generate,
        tokenizer=tokenizer,
        scheme=CacheScheme(MODEL, 16),
        model=MODEL,
        max_model_len_tokens=CONTEXT_TOKENS,
        limits=BatchLimits(max_in_flight=4, backoff_s=0.001),
        caller_of=keys.caller_of,
    )
    api = FilesApi(files, book, Limits(), max_file_bytes=max_file_bytes)
    async with BatchService(runs, files, book, random.Random(0)):
        yield Desk(make_front(generate, tokenizer, keys=keys, files_api=api), generate)


async def test_batch_goes_from_an_upload_to_its_results(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer) as one:
        content = rows(chat("first"), chat("second", temperature=9), chat("third", cache_salt="s"))
        batch_id = await one.start_batch(content)
        batch = await one.until(batch_id, "completed")
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        answered, failed = await one.lines(batch["output_file_id"]), await one.lines(batch["error_file_id"])
        texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in answered}
        assert texts == {"r0": "first", "r2": "third"}
        assert [(line["custom_id"], line["error"]["param"]) for line in failed] == [("r1", "temperature")]
        # Of the tenant's, behind everybody who waits.
        assert {(request.tenant, request.service_class) for request in one.fake.requests} == {("a", ServiceClass.BATCH)}
        assert len({request.salt for request in one.fake.requests}) == 2
        listed = (await one.ask("/v1/batches")).json
        assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([batch_id], False)


async def test_file_is_kept_listed_given_back_and_deleted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer) as one:
        content = bytes(range(256)) * 10 + b"\r\n--x"
        stored = (await one.upload(content, filename="../..\\etc/p\u00e4ss\n.jsonl")).json
        assert stored.pop("created_at") > 1_700_000_000
        file_id = stored.pop("id")
        assert "/" not in stored["filename"]
        assert "\n" not in stored.pop("filename")
        assert stored == {"object": "file", "bytes": len(content), "purpose": "batch", "status": "processed"}
        other = (await one.upload(b"{}")).json["id"]
        page = (await one.ask("/v1/files")).json
        assert {body["id"] for body in page["data"]} == {file_id, other}
        assert len((await one.ask("/v1/files?limit=1")).json["data"]) == 1
        for limit in ("0", "10001", "-1", "x", "0000000001" + "0" * 5000):
            assert (await one.ask(f"/v1/files?limit={limit}")).error == (400, "invalid_value", "limit"), limit
        assert (await one.ask(f"/v1/files/{file_id}/content")).body == content
        assert (await one.ask(f"/v1/files/{file_id}", method="DELETE")).json["deleted"] is True
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert (await one.ask(path)).error == (404, "not_found", "id")


async def test_uploads_count_for_the_rate_of_their_key_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer, requests_per_minute=2) as one:
        told = [await one.upload(b"{}") for _ in range(3)]
        assert [answered.status for answered in told] == [200, 200, 429]
        assert told[1].headers["x-ratelimit-remaining-requests"] == "0"
        assert told[2].error == (429, "rate_limit_exceeded", None)
        assert int(told[2].headers["retry-after-ms"]) > 0
        assert (await one.ask("/v1/chat/completions", chat("later"))).status == 429
        assert (await one.upload(b"{}", key="b")).status == 200
        assert len((await one.ask("/v1/files")).json["data"]) == 2


async def test_tenants_see_nothing_of_each_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer) as one:
        batch_id = await one.start_batch(rows(chat("secret")))
        batch = await one.until(batch_id, "completed")
        for file_id in (batch["input_file_id"], batch["output_file_id"]):
            for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
                assert (await one.ask(path, key="b")).status == 404
            assert (await one.ask(f"/v1/files/{file_id}", key="b", method="DELETE")).status == 404
        assert (await one.ask(f"/v1/batches/{batch_id}", key="b")).error == (404, "not_found", "batch_id")
        assert (await one.ask(f"/v1/batches/{batch_id}/cancel", {}, key="b")).status == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await one.ask(path, key="b")).json["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await one.ask("/v1/batches", body, key="b")).error == (400, "invalid_value", "input_file_id")


async def test_batch_goes_on_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(12)]
    gate = asyncio.Event()
    async with desk(tmp_path, tokenizer, gate=gate, busy_at=4) as one:
        batch_id = await one.start_batch(rows(*map(chat, texts)))
        async with asyncio.timeout(PATIENT_S):
            await one.fake.is_busy.wait()
    async with desk(tmp_path, tokenizer) as two:
        batch = await two.until(batch_id, "completed")
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        lines = await two.lines(batch["output_file_id"])
        assert sorted(line["custom_id"] for line in lines) == sorted(f"r{number}" for number in range(12))


async def test_cancelled_batch_keeps_what_it_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with desk(tmp_path, tokenizer, gate=gate, busy_at=4) as one:
        batch_id = await one.start_batch(rows(*(chat(f"text {number}") for number in range(12))))
        async with asyncio.timeout(PATIENT_S):
            await one.fake.is_busy.wait()
        cancelling = await one.ask(f"/v1/batches/{batch_id}/cancel", {})
        assert cancelling.json["status"] == "cancelling"
        batch = await one.until(batch_id, "cancelled")
        assert (batch["request_counts"]["completed"], batch["output_file_id"]) == (0, None)
        assert one.fake.num_live == 0
        again = await one.ask(f"/v1/batches/{batch_id}/cancel", {})
        assert again.error == (400, "invalid_value", "batch_id")


async def test_batches_that_have_ended_make_room_for_others(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer) as one:
        ids = [await one.start_batch(rows(chat(f"text {number}"))) for number in range(9)]
        for batch_id in ids:
            assert (await one.until(batch_id, "completed"))["request_counts"]["completed"] == 1


async def test_batch_has_ended_on_disk_before_its_results_are_taken_away(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, bool]] = []
    write = BatchBook.write

    def noted(book: BatchBook, record: BatchRecord) -> None:
        written.append((record.status, book.results(record.id).exists()))
        write(book, record)

    monkeypatch.setattr(BatchBook, "write", noted)
    async with desk(tmp_path, tokenizer) as one:
        batch_id = await one.start_batch(rows(chat("a")))
        await one.until(batch_id, "completed")
        assert written[-1] == ("completed", True)
        async with asyncio.timeout(PATIENT_S):
            while BatchBook(tmp_path / "batches").results(batch_id).exists():
                await asyncio.sleep(0.01)


async def test_results_are_taken_away_where_the_end_is_known_and_only_there(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        ended = await one.start_batch(rows(chat("a")))
        await one.until(ended, "completed")
    book = BatchBook(tmp_path / "batches")
    unreadable = "batch_" + 24 * "0"
    (book.folder / f"{unreadable}.json").write_text("{")
    for batch_id in (ended, unreadable):
        book.results(batch_id).touch()
    async with desk(tmp_path, tokenizer) as two:
        # Those that were there before are looked at first.
        await two.until(await two.start_batch(rows(chat("b"))), "completed")
        async with asyncio.timeout(PATIENT_S):
            while book.results(ended).exists():
                await asyncio.sleep(0.01)
        assert book.results(unreadable).exists()


async def test_batch_that_is_cancelled_while_its_input_is_checked_is_cancelled(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_checking, is_seen, gate = threading.Event(), threading.Event(), asyncio.Event()

    def slow(*arguments: Any, **options: Any) -> PreparedBatch:
        is_checking.set()
        assert is_seen.wait(PATIENT_S)
        return prepare_batch(*arguments, **options)

    monkeypatch.setattr(batch_service, "prepare_batch", slow)
    async with desk(tmp_path, tokenizer, gate=gate) as one:
        batch_id = await one.start_batch(rows(chat("a")))
        assert await asyncio.to_thread(is_checking.wait, PATIENT_S)
        await one.ask(f"/v1/batches/{batch_id}/cancel", {})
        # Two looks at the cancelled batch.
        read, num_reads = BatchBook.read, 0

        def counted(book: BatchBook, batch_id: str) -> BatchRecord | None:
            nonlocal num_reads
            num_reads += 1
            if num_reads == 3:
                is_seen.set()
            return read(book, batch_id)

        monkeypatch.setattr(BatchBook, "read", counted)
        async with asyncio.timeout(PATIENT_S):
            while not is_seen.is_set():
                await asyncio.sleep(0.01)
        batch = await one.until(batch_id, "cancelled", "failed", "completed")
        assert (batch["status"], batch["request_counts"]) == ("cancelled", {"total": 1, "completed": 0, "failed": 0})


@pytest.mark.parametrize(
    ("content", "endpoint", "told"),
    [
        (b"", CHAT, "has no rows"),
        (b"\xff\n", CHAT, "not UTF-8"),
        (rows(chat("a")) * 2, CHAT, "same custom_id"),
        (rows(chat("a")), "/v1/completions", "line 1: its url is /v1/chat/completions"),
        (rows({**chat("a"), "model": "other"}), CHAT, "no row asks for the model"),
    ],
)
async def test_input_that_cannot_be_run_fails_the_batch_and_says_why(
    tokenizer: Tokenizer, tmp_path: Path, content: bytes, endpoint: str, told: str
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        batch = await one.until(await one.start_batch(content, endpoint=endpoint), "failed")
        message = batch["errors"]["data"][0]["message"]
        assert (told in message, str(tmp_path) in message) == (True, False), message
        assert one.fake.requests == []


async def test_batch_of_a_tenant_that_is_gone_fails(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer, gate=asyncio.Event()) as one:
        batch_id = await one.start_batch(rows(chat("a")), key="b")
        async with asyncio.timeout(PATIENT_S):
            await one.fake.is_busy.wait()
    book = BatchBook(tmp_path / "batches")
    # What a power cut may leave.
    book.results(batch_id).write_bytes(b'{"id":"batch_')
    async with desk(tmp_path, tokenizer, tenants="a"):
        async with asyncio.timeout(PATIENT_S):
            while (record := book.get(batch_id, "b")).status != "failed":
                await asyncio.sleep(0.01)
    assert "no key of tenant 'b'" in record.errors[0]


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"purpose": None}, 400, "purpose"),
        ({"purpose": "fine-tune"}, 400, "purpose"),
        ({"name": "data"}, 400, "file"),
        ({"purpose": "x" * 100_000}, 413, None),
    ],
)
async def test_wrong_upload_is_refused_by_name(
    tokenizer: Tokenizer, tmp_path: Path, options: dict[str, Any], status: int, param: str | None
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        refused = await one.upload(b"{}", **options)
        assert (refused.error[0], refused.error[2]) == (status, param)
        assert list((tmp_path / "files").iterdir()) == []


async def test_broken_and_oversized_uploads_leave_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer, max_file_bytes=1000) as one:
        body, headers = upload(b"x" * 100_000)
        assert (await one.ask("/v1/files", body, headers=headers)).error == (413, "request_too_large", None)
        for raw in (b"", b"nonsense", upload(b"{}")[0][:-20]):
            assert (await one.ask("/v1/files", raw, method="POST", headers=headers)).error[0] == 400
        assert (await one.ask("/v1/files", body, headers={"content-type": "multipart/form-data"})).error[0] == 400
        assert (await one.ask("/v1/files", {})).error == (400, "invalid_value", "content-type")
        assert list((tmp_path / "files").iterdir()) == []


@dataclass
class Disk:
    """Where small files find room, or none after their first bytes."""

    is_full: bool = False
    num_refused: int = 0

    def write_text(self, path: Path, text: str) -> int:
        with path.open("w") as file:
            if not self.is_full:
                return file.write(text)
            self.num_refused += 1
            file.write(text[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    one = Disk()
    monkeypatch.setattr(Path, "write_text", lambda path, text: one.write_text(path, text))
    monkeypatch.setattr(batch_service, "_AGAIN_S", 0.01)
    return one


async def test_full_disk_is_told_by_name_and_nothing_stays_of_what_it_did_not_take(
    tokenizer: Tokenizer, tmp_path: Path, disk: Disk
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        file_id = (await one.upload(b"{}")).json["id"]
        disk.is_full = True
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        refused = [await one.upload(b"{}"), await one.ask("/v1/batches", batch)]
        assert [answer.error[:2] for answer in refused] == [(500, "output_failed")] * 2
        assert [answer.json["error"]["message"] for answer in refused] == [
            "the file cannot be stored: No space left on device",
            "the batch cannot be stored: No space left on device",
        ]
        assert [path.name for path in (tmp_path / "files").iterdir()] == [file_id]
        assert [path.name for path in (tmp_path / "batches").iterdir() if path.name != "lock"] == []


async def test_batch_that_ends_on_a_full_disk_is_told_to_have_ended_once_there_is_room(
    tokenizer: Tokenizer, tmp_path: Path, disk: Disk
) -> None:
    gate = asyncio.Event()
    async with desk(tmp_path, tokenizer, gate=gate, busy_at=1) as one:
        batch_id = await one.start_batch(rows(chat("a"), chat("b", temperature=9)))
        async with asyncio.timeout(PATIENT_S):
            await one.fake.is_busy.wait()
            disk.is_full = True
            gate.set()
            while disk.num_refused < 5:
                await asyncio.sleep(0.01)
        disk.is_full = False
        batch = await one.until(batch_id, "completed")
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        kept = {batch[kind] for kind in ("input_file_id", "output_file_id", "error_file_id")}
        assert {path.name for path in (tmp_path / "files").iterdir()} == kept
        assert len(one.fake.requests) == 1
    # Results under way are taken away after the end is told.
    left = {path.name for path in (tmp_path / "batches").iterdir()} - {f"{batch_id}.jsonl"}
    assert left == {"lock", f"{batch_id}.json"}


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
async def test_upload_that_a_page_of_another_site_has_a_browser_send_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, site: str, status: int
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        body, headers = upload(b"{}")
        answered = await one.ask("/v1/files", body, headers={**headers, "sec-fetch-site": site})
        assert answered.status == status
        assert len((await one.ask("/v1/files")).json["data"]) == (status == 200)


async def test_upload_that_trickles_is_given_up_however_steady(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_files, "_PART_TIMEOUT_S", 0.1)
    body, headers = upload(b"")
    parts = iter([body.removesuffix(b"\r\n--b--\r\n")])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": next(parts, b"x"), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with desk(tmp_path, tokenizer) as one:
        given = {**headers, "authorization": f"Bearer {KEYS['a']}"}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/files",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        async with asyncio.timeout(PATIENT_S):
            await one.front(scope, receive, send)
        assert [sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]] == [408, "request_timeout"]
        assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-missing"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "x")}, "metadata"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_wrong_batch_is_refused_by_name(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    async with desk(tmp_path, tokenizer) as one:
        file_id = (await one.upload(b"{}")).json["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **change}
        assert (await one.ask("/v1/batches", body)).error == (400, "invalid_value", param)
        assert (await one.ask("/v1/batches")).json["data"] == []


async def test_addresses_with_foreign_names_are_not_found(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with desk(tmp_path, tokenizer) as one:
        for path in ("/v1/files/..", "/v1/files/../content", "/v1/batches/batch_..", "/v1/files/a/b/c", "/v1/files/"):
            assert (await one.ask(path)).status == 404
