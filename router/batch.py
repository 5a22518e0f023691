"""A batch run: rows of a file through a router, each to exactly one line of the output.

Rows run in the order of a plan, which is made as far ahead as memory is meant for it; results are written as they come.
What is finished is known by the output file alone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from router.answers import Generate
from router.batch_file import BatchInput, InputSummary, Row, check_input, check_unchanged, read_rows
from router.batch_journal import Journal, error_record, result_record
from router.batch_report import BatchReport, Tally
from router.batch_rows import BatchLimits, RowComputer, RowResult
from router.keys import ANYBODY, Caller
from router.known_keys import KnownKeys
from router.planned_run import FleetView, Outline, PlannedRun, no_fleet
from router.progress import Progress
from router.requests import RequestTrace, ServiceClass
from router.tokenizer import Tokenizer
from shared.config import Settings
from shared.errors import KvrouteError, NoWorker, OutputError
from shared.hashing import num_usable_blocks
from shared.types import CacheScheme, WorkerId

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


OnRow = Callable[[Row, str | None, RequestTrace], None]
"""Called after a row's line is written, with text and trace of its answer: `None` and an empty one if it failed."""


Inputs = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]]
"""Files by name or pattern, or rows as they stand on the lines of a file."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A checked input and the locked output that belongs to it. Use as `with`, which gives the output free."""

    source: BatchInput
    summary: InputSummary
    served_model: str
    journal: Journal

    @property
    def num_rows(self) -> int:
        """Rows that are to be answered, those included that are finished."""
        return self.summary.num_rows

    def read_rows(self) -> Iterator[Row]:
        """The rows, finished or not, in the input's order, one in memory at a time.

        Raises:
            ConfigError: a file cannot be read, or has changed since it was checked: its rows would go under the names
                of others.
        """
        check_unchanged(self.source, self.summary)
        return read_rows(self.source, self.summary.versions)

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
    return PreparedBatch(source, summary, served_model, journal)


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
    has_reasoning: bool = False,
    fleet: FleetView | None = no_fleet,
) -> BatchReport:
    """Run all rows that the output does not hold yet.

    A row's fault, or an error that outlasts its attempts, becomes the row's line and ends nothing. Cancelling the
    calling task stops the run: rows under way are cancelled, the output is closed, and the report says so; that uses
    the cancellation up. Too many failed rows stop it in the same way. `progress` asks for lines where the stream is no
    terminal, or, if false, for none at all. `fleet` tells which workers there are, so that each is given rows of one
    beginning after another; with `None` rows run in the order of the input, on whatever worker the policy says.

    Raises:
        OutputError: results cannot be written; the output is whole and can be resumed.
        NoWorker: no worker is left and none came back; the same holds.
    """
    clock = asyncio.get_running_loop().time
    num_skipped = len(prepared.journal.finished)
    started_at_s = clock()
    limits = limits or BatchLimits()
    run = _Run(
        journal=prepared.journal,
        rows=RowComputer(
            generate=generate,
            tokenizer=tokenizer,
            known_keys=KnownKeys(scheme),
            caller=caller,
            served_model=prepared.served_model,
            max_model_len_tokens=max_model_len_tokens,
            rng=rng,
            limits=limits,
            service_class=service_class,
            # Keeps the requests of this run apart from those of others on the same engines.
            name=f"{rng.getrandbits(64):016x}",
            has_reasoning=has_reasoning,
            began_at_s=started_at_s,
        ),
        fleet=fleet,
        block_size_tokens=scheme.block_size_tokens,
        on_row=on_row,
        tally=Tally(scheme.block_size_tokens),
        progress=Progress(
            progress_stream or sys.stderr,
            num_rows=prepared.num_rows,
            num_done=num_skipped,
            clock=clock,
            wanted=progress,
        ),
    )
    is_interrupted = is_stopped_by_errors = False
    try:
        await run.take_all(prepared.read_rows())
    except asyncio.CancelledError:
        is_interrupted = True
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except _TooManyErrors:
        is_stopped_by_errors = True
    except OSError as error:
        # Rows that are read ahead lie in files, too.
        raise OutputError(
            f"temporary files: {error.strerror}. All results up to here are in the output; make room and resume the run"
        ) from None
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


@dataclass(slots=True)
class _Run:
    """One run's way with rows. All that it adds up is in `tally`, all that is done is in `journal`."""

    journal: Journal
    rows: RowComputer
    fleet: FleetView | None
    block_size_tokens: int
    on_row: OnRow | None
    tally: Tally
    progress: Progress
    _has_logged_traceback: bool = field(default=False, init=False)

    async def take_all(self, rows: Iterator[Row]) -> None:
        """Bring every unfinished row to its line, by a plan if one is asked for, with a bounded number under way."""
        try:
            async with asyncio.TaskGroup() as upkeep:
                keeper = upkeep.create_task(self._keep_synced())
                if self.fleet is None:
                    await self._take_in_order(rows)
                else:
                    await PlannedRun(
                        self._outline,
                        self._run_row,
                        block_size_tokens=self.block_size_tokens,
                        max_under_way=self.rows.limits.max_in_flight,
                        fleet=self.fleet,
                    ).run(rows)
                keeper.cancel()
        except ExceptionGroup as group:
            # Whatever ends the run hits all places at once: the first account of it is enough.
            raise _first_leaf(group) from None

    async def _take_in_order(self, rows: Iterator[Row]) -> None:
        """Run rows as they come, a bounded number of them at a time, each where the policy says."""

        async def take() -> None:
            for row in rows:
                if row.key not in self.journal.finished:
                    await self._run_row(row, row.body, None, None)
                # Long stretches of finished or faulty rows must not hold the loop.
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as places:
            for _ in range(self.rows.limits.max_in_flight):
                places.create_task(take())

    async def _outline(self, row: Row) -> Outline[Row] | None:
        return None if row.key in self.journal.finished else await self.rows.outline(row)

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            self.progress.tick()
            await asyncio.to_thread(self.journal.sync)

    async def _run_row(self, row: Row, body: Any, packed_prompt: bytes | None, worker: WorkerId | None) -> None:
        record_id = self.journal.record_id(row)
        result: RowResult | None = None
        try:
            result = await self.rows.compute(replace(row, body=body), packed_prompt, worker)
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
        if result is None and (most := self.rows.limits.max_errors) is not None and self.tally.num_failed >= most:
            raise _TooManyErrors

    def _count(self, result: RowResult) -> None:
        request, usage = result.answer.request, result.usage
        keys = self.rows.known_keys.of(request.token_ids, salt=request.salt, adapter=request.adapter)
        num_usable = num_usable_blocks(usage.prompt_tokens, self.block_size_tokens)
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
