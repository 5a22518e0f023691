"""`kvroute demo`: the shipped batch on two real workers, under `cost` and, cold again, under `round_robin`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from router import launch
from router.batch import BatchReport, Row, prepare_batch
from router.batch_job import run_rows
from router.cli import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from router.demo_input import WORKER_SETTINGS, demo_rows
from router.requests import RequestTrace
from router.serving import Say
from shared.config import Settings
from shared.errors import ConfigError

_POLICIES = ("cost", "round_robin")
_SEED = 20
_MAX_IN_FLIGHT = 4
"""As many as the workers run at once, so that what is measured is routing and not a queue."""


async def run_demo(
    settings: Settings, output_dir: Path, *, is_json: bool, say: Say, show: Callable[[str], None]
) -> int:
    """Run the batch under both policies and show the comparison."""
    input_path = output_dir / "input.jsonl"
    num_rows = await asyncio.to_thread(_write_input, input_path)
    say(f"{num_rows} chat requests in {input_path}: 11 system prompts, chats of several turns, one-off prompts")
    say(
        f"2 workers with {WORKER_SETTINGS['kv_cache_blocks']} KV blocks of {settings.block_size} tokens each: "
        "one pool cannot hold all the prompts' beginnings, two together can"
    )
    policy_to_report: dict[str, BatchReport] = {}
    for policy in _POLICIES:
        say(f"policy {policy}, with new workers and empty caches")
        policy_settings = settings.model_copy(update={**WORKER_SETTINGS, "policy": policy})
        output_path = output_dir / f"{policy}.jsonl"
        output_path.unlink(missing_ok=True)
        report = await _run_policy(policy_settings, input_path, output_path, say)
        if report.is_interrupted:
            return EXIT_INTERRUPTED
        policy_to_report[policy] = report
    if is_json:
        show(json.dumps({policy: _figures(report) for policy, report in policy_to_report.items()}))
    else:
        show(_table(policy_to_report))
        show(f"\nFull results: {', '.join(str(output_dir / f'{policy}.jsonl') for policy in _POLICIES)}")
    return EXIT_FAILURE if any(report.num_failed for report in policy_to_report.values()) else EXIT_OK


def _write_input(input_path: Path) -> int:
    """Write the shipped batch as a file that `kvroute batch` takes too; its number of rows."""
    rows = demo_rows(_SEED)
    try:
        input_path.parent.mkdir(parents=True, exist_ok=True)
        input_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise ConfigError(f"--output-dir: cannot write {input_path}: {error.strerror}") from None
    return len(rows)


async def _run_policy(settings: Settings, input_path: Path, output_path: Path, say: Say) -> BatchReport:
    def tell(row: Row, text: str | None, trace: RequestTrace) -> None:
        words = " ".join((text or "(failed)").split())
        say(f"  {row.custom_id:<16} {trace.worker}  cached {trace.cached_tokens or 0:>4}  {words[:60]}")

    with prepare_batch(input_path, output_path, served_model=settings.model_name, resume=False) as prepared:
        async with launch.launched(settings, say) as serving:
            return await run_rows(serving, prepared, max_in_flight=_MAX_IN_FLIGHT, on_row=tell, progress=False)


def _figures(report: BatchReport) -> dict[str, float | int | None]:
    return {
        "requests": report.num_ok,
        "failed": report.num_failed,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "possible_cached_tokens": report.possible_cached_tokens,
        "ttft_p50_s": _rounded(report.ttft_p50_s),
        "ttft_p90_s": _rounded(report.ttft_p90_s),
        "tokens_per_s": round(report.tokens_per_s, 1),
        "wall_s": round(report.wall_s, 2),
    }


def _table(policy_to_report: dict[str, BatchReport]) -> str:
    rows: list[tuple[str, Callable[[BatchReport], str]]] = [
        ("requests answered", lambda report: f"{report.num_ok}"),
        ("prompt tokens", lambda report: f"{report.prompt_tokens}"),
        ("cached tokens (engine's count)", lambda report: f"{report.cached_tokens}"),
        ("share of the possible", lambda report: f"{report.cached_tokens / max(1, report.possible_cached_tokens):.1%}"),
        ("TTFT p50", lambda report: f"{report.ttft_p50_s or 0.0:.3f} s"),
        ("TTFT p90", lambda report: f"{report.ttft_p90_s or 0.0:.3f} s"),
        ("tokens/s (prompt and answer)", lambda report: f"{report.tokens_per_s:.0f}"),
        ("wall time", lambda report: f"{report.wall_s:.1f} s"),
    ]
    lines = [f"{'':<32}" + "".join(f"{policy:>14}" for policy in policy_to_report)]
    lines += [
        f"{name:<32}" + "".join(f"{cell(report):>14}" for report in policy_to_report.values()) for name, cell in rows
    ]
    return "\n".join(lines)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
