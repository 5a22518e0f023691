"""What `kvroute batch` does with its arguments, and what it says at the end."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.batch import BatchReport
from router.batch_file import BatchInput, Shard
from router.batch_job import BatchJob, run_job
from router.cli import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, EXIT_OK, EXIT_TOO_MANY_ERRORS
from router.input_files import find_files
from router.serving import Say
from shared.config import Settings
from shared.errors import ConfigError, KvrouteError, OutputError


async def run_batch_command(
    settings: Settings, own: Mapping[str, Any], max_errors: int | None, run_dir: Path, say: Say
) -> int:
    """Answer the batch that the arguments name; its exit code."""
    job, summary_path = _job(own, max_errors), own["summary"]
    hint = f"the same command with --resume goes on with {job.output}"
    try:
        report = await run_job(job, settings, run_dir=run_dir, say=say, progress=own["progress"] or None)
    except ConfigError:
        raise
    except KvrouteError as error:
        if summary_path is not None:
            # What ended the run may keep this from being written as well; the exit code tells of it all the same.
            _try_write(summary_path, {"status": "failed", "error": {"code": error.code, "message": str(error)}}, say)
        raise KvrouteError(f"{error}; {hint}") from error
    if summary_path is not None:
        _write_summary(summary_path, report.as_summary())
    say(summary_line(report, job.output))
    if report.is_interrupted:
        say(f"interrupted: {hint}")
        return EXIT_INTERRUPTED
    if report.is_stopped_by_errors:
        say(f"stopped after {report.num_failed} failed rows (--max-errors): {hint}")
        return EXIT_TOO_MANY_ERRORS
    return EXIT_FAILED_ROWS if report.num_failed and own["strict"] else EXIT_OK


def summary_line(report: BatchReport, output: Path) -> str:
    """One line on how a batch went."""
    return (
        f"{report.num_ok} rows answered, {report.num_failed} failed, {report.num_skipped} done before; "
        f"{report.cached_share:.0%} of {report.prompt_tokens} prompt tokens from cache; "
        f"{report.tokens_per_s:.0f} tokens/s in {report.wall_s:.1f} s; results in {output}"
    )


def _job(own: Mapping[str, Any], max_errors: int | None) -> BatchJob:
    """Raises `ConfigError` for files that cannot be what they are named for."""
    outputs = {name: own[name] for name in ("output", "error_file", "summary") if own[name] is not None}
    for name, path in (*(("input", path) for path in own["input"]), *outputs.items()):
        if path == Path("-"):
            raise ConfigError(f"{name} -: a batch goes back in its files when it is resumed; name a file")
    real_paths = [os.path.realpath(path) for path in outputs.values()]
    if len(set(real_paths)) < len(real_paths):
        raise ConfigError(f"{', '.join('--' + name.replace('_', '-') for name in outputs)}: must not be one file")
    summary_path = own["summary"]
    if summary_path is not None and not summary_path.absolute().parent.is_dir():
        raise ConfigError(f"--summary {summary_path}: there is no such folder")
    shard = Shard() if own["shard"] is None else Shard.parse(own["shard"])
    source = BatchInput(find_files(own["input"]), shard)
    if summary_path is not None and os.path.realpath(summary_path) in map(os.path.realpath, source.paths):
        raise ConfigError(f"--summary {summary_path}: is an input file, which it would take the place of")
    return BatchJob(source, own["output"], own["error_file"], own["resume"], max_errors)


def _write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Put the summary in place of an earlier one, whole or not at all. Raises `OutputError`."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(json.dumps(summary, indent=2) + "\n")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OutputError(f"summary file {path}: cannot write: {error.strerror}; results are whole") from None


def _try_write(path: Path, summary: Mapping[str, Any], say: Say) -> None:
    try:
        _write_summary(path, summary)
    except OutputError as error:
        say(str(error))
