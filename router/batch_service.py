"""Runs the batches of the book, one process at a time, and goes on with them after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from router.answers import Generate
from router.batch import BatchLimits, PreparedBatch, prepare_batch, run_prepared
from router.batch_book import RUNNING, BatchBook, BatchRecord
from router.batch_file import Row, read_rows
from router.keys import Caller
from router.planned_run import FleetView, no_fleet
from router.requests import RequestTrace, ServiceClass
from router.stored_files import FileStore
from router.tokenizer import Tokenizer
from shared.errors import ConfigError, KvrouteError, NotFound, NoWorker
from shared.types import CacheScheme

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Time between two looks for new batches and for cancelled ones."""
_AGAIN_S = 5.0
"""Time after which a batch's end is written once more, where there was no room for it."""
_MAX_RUNNING = 4
_COUNT_S = 1.0
"""How far behind its rows the count of a batch may be, so that it is not written for each."""


@dataclass(frozen=True, slots=True)
class BatchRuns:
    """What runs of batches need of the router."""

    generate: Generate
    tokenizer: Tokenizer
    scheme: CacheScheme
    model: str
    max_model_len_tokens: int
    limits: BatchLimits
    caller_of: Callable[[str], Caller | None]
    """Whom a tenant's requests come from; `None` for a tenant that is gone."""
    has_reasoning: bool = False
    """Whether workers tell a chat's reasoning from its content."""
    fleet: FleetView | None = no_fleet


class BatchService:
    """Owns the runs. Use as `async with`; batches under way at its end are gone on with by the next one."""

    def __init__(self, runs: BatchRuns, files: FileStore, book: BatchBook, rng: random.Random) -> None:
        self._runs = runs
        self._files = files
        self._book = book
        self._rng = rng
        self._id_to_task: dict[str, asyncio.Task[None]] = {}
        self._id_to_end: dict[str, str] = {}
        """How batches that were told to end early are to end."""
        self._under_way: set[str] = set()
        """Batches whose rows run: before and after that, work on files is not to be cut short."""
        self._ended: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> BatchService:
        self._task = asyncio.create_task(self._run(), name="batch-service")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with _only_one(self._book.folder / "lock"):
            try:
                while True:
                    try:
                        await self._look()
                    except OSError as error:
                        logger.error("batches cannot be looked after: %s", error)
                    await asyncio.sleep(_LOOK_S)
            finally:
                for task in self._id_to_task.values():
                    task.cancel()
                await asyncio.gather(*self._id_to_task.values(), return_exceptions=True)

    async def _look(self) -> None:
        """Start what is to run, and tell those to end that are cancelled or late."""
        known = await asyncio.to_thread(lambda: sorted(self._book.ids()))
        for batch_id in known:
            task = self._id_to_task.get(batch_id)
            if task is not None and task.done():
                del self._id_to_task[batch_id]
                task = None
            if batch_id in self._ended:
                continue
            record = await asyncio.to_thread(self._book.read, batch_id)
            if record is None or record.status not in RUNNING:
                self._ended.add(batch_id)
                if record is not None:
                    # Whatever ended the process may have come before they were taken away.
                    await asyncio.to_thread(self._book.results(batch_id).unlink, missing_ok=True)
            elif task is None and len(self._id_to_task) < _MAX_RUNNING:
                self._id_to_end.pop(batch_id, None)
                self._id_to_task[batch_id] = asyncio.create_task(self._take(record), name=batch_id)
            elif task is not None and batch_id in self._under_way and batch_id not in self._id_to_end:
                end = "cancelled" if record.status == "cancelling" else None
                end = "expired" if time.time() >= record.expires_at else end
                if end is not None:
                    self._id_to_end[batch_id] = end
                    task.cancel()

    async def _take(self, record: BatchRecord) -> None:
        """Bring one batch to its end, or as far as it goes now."""
        try:
            await self._work_on(record)
        except NoWorker as error:
            logger.warning("%s waits: %s", record.id, error)
        except (KvrouteError, OSError) as error:
            logger.warning("%s failed: %s", record.id, error)
            await self._fail(record, self._without_paths(record, str(error)))
        except Exception:
            logger.exception("%s: internal error", record.id)
            await self._fail(record, "internal error")

    async def _fail(self, record: BatchRecord, reason: str) -> None:
        record.errors.append(reason)
        await self._finish(record, "failed")

    def _without_paths(self, record: BatchRecord, text: str) -> str:
        """`text` with names that its reader knows: where files lie on this machine is nobody's business."""
        text = text.replace(str(self._files.place_of(record.input_file_id)), record.input_file_id)
        return text.replace(str(self._book.results(record.id)), record.id)

    async def _work_on(self, record: BatchRecord) -> None:
        caller = self._runs.caller_of(record.tenant)
        if caller is None:
            raise ConfigError(f"there is no key of tenant {record.tenant!r} any more")
        if record.status == "cancelling" and not record.num_total:
            await self._finish(record, "cancelled")
            return
        prepared = await asyncio.to_thread(self._prepare, record)
        telling: asyncio.TimerHandle | None = None

        def tell() -> None:
            nonlocal telling
            telling = None
            # Results are what counts: if there is no room for them, their own file says so.
            with contextlib.suppress(OSError):
                self._book.write(record)

        def count(row: Row, text: str | None, trace: RequestTrace) -> None:
            nonlocal telling
            record.num_completed += text is not None
            record.num_failed += text is None
            # Later, so that the last of many at once is told of even where no other follows.
            telling = telling or asyncio.get_running_loop().call_later(_COUNT_S, tell)

        with prepared:
            record.num_total = prepared.num_rows
            record.num_completed, record.num_failed = await asyncio.to_thread(_counts, self._book.results(record.id))
            record.become("in_progress")
            await asyncio.to_thread(self._book.write, record)
            self._under_way.add(record.id)
            try:
                report = await run_prepared(
                    prepared,
                    generate=self._runs.generate,
                    tokenizer=self._runs.tokenizer,
                    scheme=self._runs.scheme,
                    max_model_len_tokens=self._runs.max_model_len_tokens,
                    rng=self._rng,
                    limits=self._runs.limits,
                    on_row=count,
                    progress=False,
                    caller=caller,
                    service_class=ServiceClass.BATCH,
                    has_reasoning=self._runs.has_reasoning,
                    fleet=self._runs.fleet,
                )
            finally:
                self._under_way.discard(record.id)
                if telling is not None:
                    telling.cancel()
        if not report.is_interrupted:
            await self._finish(record, "completed")
        elif record.id in self._id_to_end:
            await self._finish(record, self._id_to_end[record.id])

    def _prepare(self, record: BatchRecord) -> PreparedBatch:
        try:
            path = self._files.content(record.input_file_id, record.tenant)
        except NotFound:
            raise ConfigError(f"the input file {record.input_file_id} is not there any more") from None
        for row in read_rows(path):
            if row.endpoint is not None and row.endpoint.value != record.endpoint:
                raise ConfigError(f"line {row.line}: its url is {row.endpoint.value}, the batch's {record.endpoint}")
        return prepare_batch(path, self._book.results(record.id), served_model=self._runs.model, resume=True)

    async def _finish(self, record: BatchRecord, status: str) -> None:
        """Make files of the results, and tell of the end, as soon as the disk takes that."""
        record.become("finalizing")
        is_told = False
        while record.id not in self._ended:
            try:
                await asyncio.to_thread(self._write_results, record, status)
                self._ended.add(record.id)
            except OSError as error:
                if not is_told:
                    logger.error("the end of %s cannot be written, and is tried again: %s", record.id, error)
                is_told = True
                await asyncio.sleep(_AGAIN_S)

    def _write_results(self, record: BatchRecord, status: str) -> None:
        results = self._book.results(record.id)
        output, errors = self._files.new_path(), self._files.new_path()
        try:
            if results.exists():
                with output.open("wb") as answered, errors.open("wb") as failed:
                    for line in _whole_lines(results):
                        (answered if json.loads(line)["error"] is None else failed).write(line)
                record.num_completed, record.num_failed = _counts(results)
                record.output_file_id = self._keep(output, record, "output")
                record.error_file_id = self._keep(errors, record, "errors")
            record.become(status)
            # The end is known before the results are taken away: a batch that has lost them would run once more.
            self._book.write(record)
        except OSError:
            for file_id in filter(None, (record.output_file_id, record.error_file_id)):
                self._files.delete(file_id, record.tenant)
            record.output_file_id = record.error_file_id = None
            raise
        finally:
            output.unlink(missing_ok=True)
            errors.unlink(missing_ok=True)
        results.unlink(missing_ok=True)
        self._book.cancel_mark(record.id).unlink(missing_ok=True)

    def _keep(self, path: Path, record: BatchRecord, kind: str) -> str | None:
        if not path.stat().st_size:
            return None
        name = f"{record.id}_{kind}.jsonl"
        return self._files.keep(path, tenant=record.tenant, filename=name, purpose="batch_output").id


def _counts(results: Path) -> tuple[int, int]:
    """Rows that have an answer and rows that have an error."""
    num_rows = num_failed = 0
    for line in _whole_lines(results):
        num_rows += 1
        num_failed += json.loads(line)["error"] is not None
    return num_rows - num_failed, num_failed


def _whole_lines(results: Path) -> Iterator[bytes]:
    """Lines without a torn last one, which a power cut may leave; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), results.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line


@contextlib.asynccontextmanager
async def _only_one(path: Path) -> AsyncIterator[None]:
    """Wait until no other process holds the lock, and hold it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)
