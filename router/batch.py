"""A batch run: rows of a file through a router, each to exactly one line of the output.

Rows are taken from the input in order as places become free, so that nothing is read ahead; results are written as
they come. What is finished is known by the output file alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from router.answers import Answer, Generate, answers_to, usage_of
from router.batch_file import BatchInput, Row, check_input, read_rows
from router.batch_journal import Journal, error_record, result_record
from router.batch_report import BatchReport, Tally
from router.keys import ANYBODY, Caller
from router.known_keys import KnownKeys
from router.openai import Endpoint, Usage, completion_body, parse_request
from router.progress import Progress
from router.requests import RequestTrace, ServiceClass
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import AttemptsExhausted, EngineError, KvrouteError, NoWorker, QueueFull, TransientError
from shared.hashing import num_usable_blocks
from shared.types import CacheScheme, FinishReason, RequestId

__all__ = [
    "BatchLimits",
    "BatchReport",
    "Generate",
    "OnRow",
    "PreparedBatch",
    "Row",
    "prepare_batch",
    "run_batch",
    "run_prepared",
]

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 1.0
"""Most work that a power cut can cost, in time; a killed process loses nothing that is written."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How hard a batch pushes and how long it insists."""

    max_in_flight: int = 64
    """Rows under way at once."""
    max_attempts: int = 4
    """Times that a row is tried before a transient error becomes its result. To find the router's queue full, or to
    give way to more urgent requests there, is no try: a row waits for as long as others come first."""
    backoff_s: float = 0.5
    """Wait after a row's first failed attempt; doubles with each further one."""
    max_backoff_s: float = 30.0
    max_errors: int | None = None
    """Failed rows of this run after which it stops; `None`: however many there are."""


OnRow = Callable[[Row, str | None, RequestTrace], None]
"""Called after a row's line is written, with text and trace of its answer: `None` and an empty one if it failed."""


Inputs = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""Files by name or pattern, or rows as they stand on the lines of a file."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A checked input and the locked output that belongs to it. Use as `with`, which gives the output free."""

    source: BatchInput
    served_model: str
    num_rows: int
    """Rows that are to be answered, those included that are finished."""
    journal: Journal

    def read_rows(self) -> Iterator[Row]:
        """The rows, finished or not, in the input's order, one in memory at a time. Raises `ConfigError`."""
        return read_rows(self.source)

    def __enter__(self) -> PreparedBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.journal.close()


def prepare_batch(
    source: Path | BatchInput, output_path: Path, *, served_model: str, resume: bool, error_path: Path | None = None
) -> PreparedBatch:
    """Check the input and open the output, so that nothing need be started for a batch that cannot run.

    Errors go to `error_path` where one is given. Reads the whole input; belongs into a thread.

    Raises:
        ConfigError: input or output cannot be used; says where and why. The output is then as it was.
    """
    source = BatchInput.of(source)
    summary = check_input(source, served_model=served_model)
    journal = Journal.open(output_path, summary, resume=resume, error_path=error_path)
    return PreparedBatch(source, served_model, summary.num_rows, journal)


async def run_batch(
    inputs: Inputs,
    output: str | Path,
    settings: Settings,
    *,
    resume: bool = False,
    error_file: str | Path | None = None,
    max_errors: int | None = None,
    shard: str | None = None,
    on_row: OnRow | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = logger.info,
) -> BatchReport:
    """Answer a batch from Python as `kvroute batch` does, and by its rules: one line of output for each row.

        report = await run_batch("in/*.jsonl.zst", "out.jsonl", Settings(model="smollm2", workers=2), resume=True)

    It uses the attached servers of `settings`, or the workers of `kvroute up`, or starts its own and ends them. Rows
    that are handed in are read once, and kept in a temporary file for as long as this runs; the same rows again are the
    same input to `resume`. Cancelling ends it early with a report. `say` is told what is going on.

    Raises:
        ConfigError: settings, input or output cannot be used; the output is then as it was.
        OutputError, NoWorker: as `run_prepared` does.
    """
    # Brings Ray along, which a router over servers of somebody else does without.
    from router import batch_job, runfile

    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder:
        source = await asyncio.to_thread(batch_job.input_of, inputs, Path(folder), shard)
        errors = None if error_file is None else Path(error_file)
        job = batch_job.BatchJob(source, Path(output), errors, resume, max_errors)
        run_dir = settings.run_dir or runfile.default_run_dir()
        return await batch_job.run_job(job, settings, run_dir=run_dir, say=say, on_row=on_row, progress=progress)


async def run_prepared(
    prepared: PreparedBatch,
    *,
    generate: Generate,
    tokenizer: Tokenizer,
    scheme: CacheScheme,
    max_model_len_tokens: int,
    rng: random.Random,
    limits: BatchLimits | None = None,
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    on_row: OnRow | None = None,
    progress: bool | None = None,
    progress_stream: TextIO | None = None,
    caller: Caller = ANYBODY,
) -> BatchReport:
    """Run all rows that the output does not hold yet.

    A row's fault, or an error that outlasts its attempts, becomes the row's line and ends nothing. Cancelling the
    calling task stops the run: rows under way are cancelled, the output is closed, and the report says so; that uses
    the cancellation up. Too many failed rows stop it in the same way. `progress` asks for lines where the stream is no
    terminal, or, if false, for none at all.

    Raises:
        OutputError: results cannot be written; the output is whole and can be resumed.
        NoWorker: no worker is left and none came back; the same holds.
    """
    clock = asyncio.get_running_loop().time
    num_skipped = len(prepared.journal.finished)
    run = _Run(
        journal=prepared.journal,
        generate=generate,
        tokenizer=tokenizer,
        scheme=scheme,
        known_keys=KnownKeys(scheme),
        caller=caller,
        served_model=prepared.served_model,
        max_model_len_tokens=max_model_len_tokens,
        rng=rng,
        limits=limits or BatchLimits(),
        service_class=service_class,
        on_row=on_row,
        tally=Tally(scheme.block_size_tokens),
        progress=Progress(
            progress_stream or sys.stderr,
            num_rows=prepared.num_rows,
            num_done=num_skipped,
            clock=clock,
            wanted=progress,
        ),
        # Keeps the requests of this run apart from those of others on the same engines.
        name=f"{rng.getrandbits(64):016x}",
        num_rows=prepared.num_rows,
    )
    started_at_s = clock()
    is_interrupted = is_stopped_by_errors = False
    try:
        await run.take_all(prepared.read_rows())
    except asyncio.CancelledError:
        is_interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except _TooManyErrors:
        is_stopped_by_errors = True
    finally:
        run.progress.close()
        await asyncio.to_thread(prepared.journal.close)
    return run.tally.report(
        num_rows=prepared.num_rows,
        num_skipped=num_skipped,
        wall_s=clock() - started_at_s,
        is_interrupted=is_interrupted,
        is_stopped_by_errors=is_stopped_by_errors,
    )


class _TooManyErrors(Exception):
    """As many rows have failed as may."""


@dataclass(frozen=True, slots=True)
class _Result:
    """An answer, what it answers, and how it is told."""

    answer: Answer
    text: str
    usage: Usage
    body: Mapping[str, Any]


@dataclass(slots=True)
class _Run:
    """One run's way with rows. All that it adds up is in `tally`, all that is done is in `journal`."""

    journal: Journal
    generate: Generate
    tokenizer: Tokenizer
    scheme: CacheScheme
    known_keys: KnownKeys
    caller: Caller
    """Whose rows they are."""
    served_model: str
    max_model_len_tokens: int
    rng: random.Random
    limits: BatchLimits
    service_class: ServiceClass
    on_row: OnRow | None
    tally: Tally
    progress: Progress
    name: str
    num_rows: int
    _has_logged_traceback: bool = field(default=False, init=False)

    async def take_all(self, rows: Iterator[Row]) -> None:
        """Bring every unfinished row to its line, with a bounded number under way."""
        try:
            async with asyncio.TaskGroup() as upkeep:
                keeper = upkeep.create_task(self._keep_synced())
                async with asyncio.TaskGroup() as places:
                    for _ in range(min(self.limits.max_in_flight, self.num_rows)):
                        places.create_task(self._take(rows))
                keeper.cancel()
        except ExceptionGroup as group:
            # Whatever ends the run hits all places at once: the first account of it is enough.
            raise _first_leaf(group) from None

    async def _take(self, rows: Iterator[Row]) -> None:
        """Work on one row after the other; all places share one iterator."""
        for row in rows:
            if row.key not in self.journal.finished:
                await self._run_row(row)
            # Long stretches of finished or faulty rows must not hold the loop.
            await asyncio.sleep(0)

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            self.progress.tick()
            await asyncio.to_thread(self.journal.sync)

    async def _run_row(self, row: Row) -> None:
        record_id = self.journal.record_id(row)
        result: _Result | None = None
        try:
            result = await self._compute(row)
            record = result_record(row, record_id=record_id, request_id=result.answer.request.request, body=result.body)
        except NoWorker:
            # Every other row would wait as long and in vain: they are left to a resumed run.
            raise
        except Exception as error:
            if not isinstance(error, KvrouteError):
                self._log_internal_error(row, error)
            record = error_record(row, error, record_id=record_id)
        # Outside of the above: nothing that fails from here on may give the row a second line.
        self.journal.append(record)
        if result is None:
            self.tally.failed()
            self.progress.failed()
        else:
            self._count(result)
        if self.on_row is not None:
            text, trace = (None, RequestTrace()) if result is None else (result.text, result.answer.trace)
            self.on_row(row, text, trace)
        if result is None and self.limits.max_errors is not None and self.tally.num_failed >= self.limits.max_errors:
            raise _TooManyErrors

    async def _compute(self, row: Row) -> _Result:
        """Compute a row. Raises what is wrong with the row or the fleet."""
        if row.error is not None:
            raise row.error
        endpoint = cast(Endpoint, row.endpoint)
        parsed = parse_request(endpoint, row.body, served_model=self.served_model)
        (answer,) = await answers_to(
            parsed,
            self.tokenizer,
            name=f"batch-{self.name}-{row.key}",
            max_model_len_tokens=self.max_model_len_tokens,
            salt=self.caller.salted(parsed.cache_salt),
            tenant=self.caller.tenant,
            service_class=self.service_class,
        )
        answer, text, finish = await self._generate_insisting(answer)
        usage = usage_of([answer], num_choices=1)
        prefix = "chatcmpl" if endpoint is Endpoint.CHAT else "cmpl"
        body = completion_body(
            endpoint,
            response_id=f"{prefix}-{self.name}-{row.key}",
            model=parsed.model,
            created=int(time.time()),
            answers=[(text, finish)],
            usage=usage,
        )
        return _Result(answer, text, usage, body)

    async def _generate_insisting(self, answer: Answer) -> tuple[Answer, str, FinishReason]:
        """Generate, and again from the start after a transient error, as often as the limits allow."""
        base = answer.request.request
        num_failed = 0
        for number in itertools.count(1):
            try:
                return await self._generate_once(answer)
            except (NoWorker, AttemptsExhausted):
                # A request that kills its workers must not be given more of them; a resumed run may try it again.
                raise
            except TransientError as error:
                num_failed += not isinstance(error, QueueFull)
                if num_failed >= self.limits.max_attempts:
                    raise
                logger.info("%s: attempt %d failed: %s", answer.request.request, number, error)
                await asyncio.sleep(self._wait_s(num_failed, error))
                # The attempt before may not be forgotten everywhere yet.
                answer = answer.again(RequestId(f"{base}.{number}"))
        raise AssertionError("counting has no end")

    def _wait_s(self, attempt: int, error: TransientError) -> float:
        # Rows that failed together do not come back together.
        if error.retry_after_s is not None:
            return error.retry_after_s * self.rng.uniform(1.0, 1.5)
        wait_s = min(self.limits.backoff_s * 2.0 ** (attempt - 1), self.limits.max_backoff_s)
        return wait_s * self.rng.uniform(0.5, 1.0)

    async def _generate_once(self, answer: Answer) -> tuple[Answer, str, FinishReason]:
        answer.trace.received_at_s = asyncio.get_running_loop().time()
        try:
            return answer, *await answer.whole(self.generate)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Nobody cancelled this run: a cancellation that leaks out of the router must not end a place unseen.
            raise EngineError("the request was cancelled within the router") from None

    def _count(self, result: _Result) -> None:
        request, usage = result.answer.request, result.usage
        keys = self.known_keys.of(request.token_ids, salt=request.salt, adapter=request.adapter)
        num_usable = num_usable_blocks(usage.prompt_tokens, self.scheme.block_size_tokens)
        self.tally.answered(usage, result.answer.trace, keys, num_usable)
        self.progress.answered(usage)

    def _log_internal_error(self, row: Row, error: Exception) -> None:
        """Loud with its traceback once; further ones of a run are likely the same."""
        if self._has_logged_traceback:
            logger.error("%s: internal error: %r", row.place, error)
        else:
            logger.error("%s: internal error", row.place, exc_info=error)
            self._has_logged_traceback = True


def _first_leaf(group: ExceptionGroup) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
