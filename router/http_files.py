"""OpenAI's Files and Batches over HTTP: uploads, downloads, and what is asked of the batch book."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import parse_qs

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from router import fields
from router.batch_book import BatchBook
from router.http_call import Call, Counted, Limits
from router.keys import Allowance, Caller
from router.openai import Endpoint
from router.stored_files import FileStore
from shared.errors import BodyTooLarge, InvalidRequest, NotFound, OutputError, RequestTimeout

MAX_FILE_BYTES = 512 << 20
_MAX_OTHER_BYTES = 1 << 16
"""Of an upload's parts that are not the file."""
_CHUNK_BYTES = 1 << 20
_MAX_PAGE, _PAGE = 10_000, 100
_MAX_METADATA = 16
_PART_TIMEOUT_S = 30.0
"""How long an upload may stand still, and how much longer it may take than at the least rate."""
_LEAST_BYTES_PER_S = 8 << 10
"""How fast an upload must come in all in all, so that nobody keeps one open by a byte now and then."""

Handler = Callable[[Call, Caller, Allowance], Awaitable[None]]
_Result = TypeVar("_Result")


class FilesApi:
    """Handlers of everything below `/v1/files` and `/v1/batches`."""

    def __init__(
        self, files: FileStore, book: BatchBook, limits: Limits, *, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        # What is wrong with an upload is told to its sender.
        logging.getLogger("python_multipart").setLevel(logging.ERROR)
        self._files = files
        self._book = book
        self._limits = limits
        self._max_file_bytes = max_file_bytes

    def methods_of(self, path: str) -> dict[str, Handler] | None:
        """The handlers of an address below `/v1/`, by method; `None` for one that is not known."""
        match path.split("/"):
            case ["files"]:
                return {"GET": self._list_files, "POST": self._upload}
            case ["files", file_id]:
                return {"GET": _with(self._get_file, file_id), "DELETE": _with(self._delete_file, file_id)}
            case ["files", file_id, "content"]:
                return {"GET": _with(self._download, file_id)}
            case ["batches"]:
                return {"GET": self._list_batches, "POST": self._create_batch}
            case ["batches", batch_id]:
                return {"GET": _with(self._get_batch, batch_id)}
            case ["batches", batch_id, "cancel"]:
                return {"POST": _with(self._cancel_batch, batch_id)}
        return None

    async def _upload(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        """Take a file. It counts as a request of its key, since it takes as much of the server as any."""
        call.check_own_page()
        with Counted(call, allowance):
            await self._keep_upload(call, caller)

    async def _keep_upload(self, call: Call, caller: Caller) -> None:
        await asyncio.to_thread(self._files.check_room, caller.tenant)
        path = self._files.new_path()
        try:
            with _storing("the file"):
                upload = await self._receive(call, path)
                if upload.purpose != "batch":
                    raise InvalidRequest(
                        f"Invalid 'purpose': {fields.brief(upload.purpose)} is not supported; only 'batch' is.",
                        param="purpose",
                    )
                stored = await asyncio.to_thread(
                    self._files.keep, path, tenant=caller.tenant, filename=upload.filename, purpose="batch"
                )
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)
        await call.respond_json(stored.as_body())

    async def _receive(self, call: Call, path: Path) -> _Upload:
        """Write an upload's file to `path` as it comes in."""
        kind, options = parse_options_header(call.headers.get(b"content-type", b""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 256:
            raise InvalidRequest("the header 'Content-Type' must be 'multipart/form-data'", param="content-type")
        upload = _Upload()
        parser = MultipartParser(boundary, upload.callbacks())
        num_bytes, has_more = 0, True
        clock = asyncio.get_running_loop().time
        began_at_s = clock()
        with path.open("wb") as file:
            while has_more:
                late_at_s = _PART_TIMEOUT_S + min(clock(), began_at_s + num_bytes / _LEAST_BYTES_PER_S)
                try:
                    async with asyncio.timeout_at(late_at_s):
                        part, has_more = await call.next_part()
                except TimeoutError:
                    raise RequestTimeout(
                        f"the upload stood still for {_PART_TIMEOUT_S:g} s, or brought less than "
                        f"{_LEAST_BYTES_PER_S} bytes a second"
                    ) from None
                num_bytes += len(part)
                if num_bytes > self._max_file_bytes + _MAX_OTHER_BYTES:
                    raise BodyTooLarge(f"the file is over the limit of {self._max_file_bytes} bytes")
                try:
                    parser.write(part)
                except MultipartParseError:
                    raise InvalidRequest("the request body is not multipart/form-data", param="file") from None
                if len(upload.pending) >= _CHUNK_BYTES:
                    await asyncio.to_thread(_write_pending, file, upload)
            await asyncio.to_thread(_write_pending, file, upload)
        if not upload.is_whole or not upload.has_file:
            raise InvalidRequest("Missing required parameter: 'file'.", param="file")
        return upload

    async def _list_files(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        def found() -> list[dict[str, Any]]:
            stored = sorted(self._files.all_of(caller.tenant), key=lambda one: (one.created_at, one.id), reverse=True)
            return [one.as_body() for one in stored]

        await call.respond_json(_page(await asyncio.to_thread(found), call))

    async def _get_file(self, call: Call, caller: Caller, file_id: str) -> None:
        await call.respond_json((await asyncio.to_thread(self._files.get, file_id, caller.tenant)).as_body())

    async def _delete_file(self, call: Call, caller: Caller, file_id: str) -> None:
        await asyncio.to_thread(self._files.delete, file_id, caller.tenant)
        await call.respond_json({"id": file_id, "object": "file", "deleted": True})

    async def _download(self, call: Call, caller: Caller, file_id: str) -> None:
        path = await asyncio.to_thread(self._files.content, file_id, caller.tenant)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise NotFound(f"No such File object: {file_id}", param="id") from None
        with file:
            await call.start(200, [(b"content-type", b"application/octet-stream")])
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                await call.write(chunk)
            await call.write(b"", is_last=True)

    async def _create_batch(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        body = fields.mapping(await call.json(self._limits), "body")
        given = {name: value for name, value in body.items() if value is not None}
        for name in given:
            if name not in ("input_file_id", "endpoint", "completion_window", "metadata"):
                unknown = fields.brief_name(name)
                raise InvalidRequest(f"Unrecognized request argument supplied: {unknown}", param=unknown)
        file_id = fields.label(fields.required(given, "input_file_id"), "input_file_id")
        endpoint = fields.text(fields.required(given, "endpoint"), "endpoint")
        if endpoint not in set(Endpoint):
            choices = " or ".join(repr(one.value) for one in Endpoint)
            raise InvalidRequest(f"Invalid 'endpoint': must be {choices}.", param="endpoint")
        if fields.required(given, "completion_window") != "24h":
            raise InvalidRequest("Invalid 'completion_window': must be '24h'.", param="completion_window")
        metadata = _metadata(given["metadata"]) if "metadata" in given else None
        try:
            await asyncio.to_thread(self._files.get, file_id, caller.tenant)
        except NotFound as error:
            raise InvalidRequest(str(error), param="input_file_id") from None
        with _storing("the batch"):
            record = await asyncio.to_thread(self._book.create, caller.tenant, Endpoint(endpoint), file_id, metadata)
        await call.respond_json(record.as_body())

    async def _list_batches(self, call: Call, caller: Caller, allowance: Allowance) -> None:
        records = await asyncio.to_thread(self._book.all_of, caller.tenant)
        await call.respond_json(_page([record.as_body() for record in records], call))

    async def _get_batch(self, call: Call, caller: Caller, batch_id: str) -> None:
        await call.respond_json((await asyncio.to_thread(self._book.get, batch_id, caller.tenant)).as_body())

    async def _cancel_batch(self, call: Call, caller: Caller, batch_id: str) -> None:
        with _storing("the cancellation"):
            record = await asyncio.to_thread(self._book.cancel, batch_id, caller.tenant)
        await call.respond_json(record.as_body())


@dataclass(slots=True)
class _Upload:
    """What has come of an upload so far."""

    filename: str = "upload"
    has_file: bool = False
    is_whole: bool = False
    pending: bytearray = field(default_factory=bytearray)
    """Content that is not written yet."""
    _name: str = ""
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _values: dict[str, bytearray] = field(default_factory=dict)
    _num_other_bytes: int = 0

    @property
    def purpose(self) -> str:
        return self._values.get("purpose", bytearray()).decode(errors="replace")

    def callbacks(self) -> Any:
        """What the parser is to call."""
        return {
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_part_data": self._take_data,
            "on_end": self._end,
        }

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += self._counted(data[start:end])

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode(errors="replace")
            if self._name == "file":
                self.has_file = True
                given = options.get(b"filename", b"").decode(errors="replace")
                self.filename = re.sub(r"[^\w. -]", "_", given.replace("\\", "/").rpartition("/")[2])[:255] or "upload"
        self._header.clear()
        self._value.clear()

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.pending += data[start:end]
        else:
            self._values.setdefault(self._name, bytearray()).extend(self._counted(data[start:end]))

    def _end(self) -> None:
        self.is_whole = True

    def _counted(self, data: bytes) -> bytes:
        self._num_other_bytes += len(data)
        if self._num_other_bytes > _MAX_OTHER_BYTES:
            raise BodyTooLarge(f"what stands beside the file is over the limit of {_MAX_OTHER_BYTES} bytes")
        return data


@contextlib.contextmanager
def _storing(what: str) -> Iterator[None]:
    """Tell by name of a disk that takes no more, which is no fault of ours."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what} cannot be stored: {error.strerror or error}") from error


def _write_pending(file: IO[bytes], upload: _Upload) -> None:
    file.write(upload.pending)
    upload.pending.clear()


def _with(handle: Callable[[Call, Caller, str], Awaitable[None]], name: str) -> Handler:
    return lambda call, caller, allowance: handle(call, caller, name)


def _metadata(value: Any) -> dict[str, str]:
    found = fields.mapping(value, "metadata")
    if len(found) > _MAX_METADATA:
        raise InvalidRequest(f"Invalid 'metadata': at most {_MAX_METADATA} entries are allowed.", param="metadata")
    return {
        fields.brief_name(name): fields.label(text, f"metadata.{fields.brief_name(name)}")
        for name, text in found.items()
    }


def _page(bodies: Sequence[Mapping[str, Any]], call: Call) -> dict[str, Any]:
    """A part of a list, as `limit` and `after` ask for."""
    query = parse_qs(call.scope.get("query_string", b"").decode("latin-1"))
    limit = query.get("limit", [str(_PAGE)])[0]
    # Longer ones are not looked at: of thousands of digits Python makes no number.
    if not limit.isascii() or not limit.isdecimal() or len(limit) > 10 or not 1 <= int(limit) <= _MAX_PAGE:
        raise InvalidRequest(f"Invalid 'limit': must be an integer of 1 to {_MAX_PAGE}.", param="limit")
    after = query.get("after", [""])[0]
    first = next((place + 1 for place, body in enumerate(bodies) if body["id"] == after), 0) if after else 0
    data = bodies[first : first + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + len(data) < len(bodies),
    }
