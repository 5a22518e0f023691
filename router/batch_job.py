"""A whole batch on whatever workers there are, from its files to its report: what the command and the library share."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.batch import BatchLimits, BatchReport, Inputs, OnRow, PreparedBatch, prepare_batch, run_prepared
from router.batch_file import BatchInput, Shard
from router.input_files import find_files
from router.planned_run import view_of
from router.requests import ServiceClass
from router.serving import Say, Serving
from router.workers import find_workers, serving_of
from shared.config import Settings
from shared.errors import ConfigError

_IN_FLIGHT_PER_SEQ = 4
"""Batch rows under way for each sequence that the workers can run: enough to choose from, few enough to stay fresh."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What is to be answered, and where the answers go."""

    source: BatchInput
    output: Path
    error_path: Path | None = None
    """Where errors go; `None`: into the output."""
    resume: bool = False
    max_errors: int | None = None
    """Failed rows after which the run stops; `None`: however many there are."""


async def run_job(
    job: BatchJob,
    settings: Settings,
    *,
    run_dir: Path,
    say: Say,
    on_row: OnRow | None = None,
    progress: bool | None = None,
) -> BatchReport:
    """Answer a batch: with the attached servers of `settings`, with the workers of `kvroute up`, or with own ones.

    Nothing is started for a batch that cannot be run. Raises as `prepare_batch` and `run_prepared` do.
    """
    workers = await find_workers(settings, run_dir, say)
    prepared = await asyncio.to_thread(
        prepare_batch,
        job.source,
        job.output,
        served_model=workers.settings.model_name,
        resume=job.resume,
        error_path=job.error_path,
    )
    with prepared:
        async with serving_of(workers, say) as serving:
            return await run_rows(serving, prepared, max_errors=job.max_errors, on_row=on_row, progress=progress)


async def run_rows(
    serving: Serving,
    prepared: PreparedBatch,
    *,
    max_in_flight: int | None = None,
    max_errors: int | None = None,
    on_row: OnRow | None = None,
    progress: bool | None = None,
) -> BatchReport:
    """Run a batch on the workers that serve, with as many rows under way as suits them where no number is given."""
    settings = serving.settings
    return await run_prepared(
        prepared,
        generate=serving.router.generate,
        tokenizer=serving.tokenizer,
        scheme=serving.scheme,
        max_model_len_tokens=serving.max_model_len_tokens,
        rng=random.Random(settings.seed),
        limits=BatchLimits(serving.num_in_flight(_IN_FLIGHT_PER_SEQ, max_in_flight), max_errors=max_errors),
        # Others may use workers that were there before.
        service_class=ServiceClass.INTERACTIVE if serving.actors else ServiceClass.BATCH,
        on_row=on_row,
        progress=progress,
        has_reasoning=bool(settings.reasoning_parser),
        fleet=view_of(serving.router),
    )


def input_of(inputs: Inputs, folder: Path, shard: str | None = None) -> BatchInput:
    """The input that is meant: files, or rows, which are put into a file in `folder`. Blocks. Raises `ConfigError`."""
    if isinstance(inputs, str | Path):
        paths = [Path(inputs)]
    elif isinstance(inputs, Sequence) and all(isinstance(name, str | Path) for name in inputs):
        paths = [Path(str(name)) for name in inputs]
    else:
        paths = [_written(inputs, folder / "rows.jsonl")]
    if not paths:
        raise ConfigError("a batch needs an input; none is named")
    return BatchInput(find_files(paths), Shard() if shard is None else Shard.parse(shard))


def _written(rows: Iterable[Any], path: Path) -> Path:
    with path.open("w") as file:
        for number, row in enumerate(rows, start=1):
            try:
                file.write(json.dumps(row) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(f"row {number} of the batch has no form in JSON: {error}") from None
    return path
