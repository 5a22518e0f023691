"""A batch process that is killed without warning, or has no room to write, loses nothing and does nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.support.batches import chat_row, read_records, write_rows

PROJECT = Path(__file__).parents[2]
NUM_ROWS = 300
NUM_KILLS = 8


async def run_until(input_path: Path, output_path: Path, seed: int, num_done: int | None) -> list[tuple[str, int]]:
    """Run the child, kill -9 it after it has told of `num_done` rows, and give all that it told."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.batch_child", input_path, output_path, str(seed)),
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    told: list[tuple[str, int]] = []
    assert await process.stdout.readline() == b"ready \n"
    while raw := await process.stdout.readline():
        if raw.endswith(b"\n"):
            word, line = raw.decode().split()
            told.append((word, int(line)))
        if num_done is not None and sum(word == "done" for word, _ in told) >= num_done:
            process.kill()
            num_done = None
    assert await process.wait() in (0, -9)
    return told


def is_final(record: dict[str, Any]) -> bool:
    return record["error"] is None or record["error"]["code"] != "worker_lost"


async def test_killed_runs_give_one_row_for_each_input_row_and_compute_no_finished_row_again(tmp_path: Path) -> None:
    rng = random.Random(11)
    rows: list[Any] = [chat_row(f"r{number}", f"text {number}") for number in range(NUM_ROWS)]
    rows += ["{", chat_row("bad", n=2)]
    rng.shuffle(rows)
    ids = [row["custom_id"] if isinstance(row, dict) else None for row in rows]
    line_of = {custom_id: line for line, custom_id in enumerate(ids, start=1)}
    input_path, output_path = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    finished: set[int] = set()
    is_complete = False
    run = 0
    while not is_complete:
        run += 1
        num_done = rng.randint(1, 2 * NUM_ROWS // NUM_KILLS) if run <= NUM_KILLS else None
        told = await run_until(input_path, output_path, run, num_done)
        started = {line for word, line in told if word == "start"}
        assert not started & finished, "a finished row was computed again"
        whole = output_path.read_bytes().rpartition(b"\n")[0].splitlines()
        records = [json.loads(line) for line in whole]
        now_finished = {line_of[record["custom_id"]] for record in records if is_final(record)}
        assert now_finished >= finished, "a finished row was lost"
        assert now_finished >= {line for word, line in told if word == "done"} - {
            line_of[record["custom_id"]] for record in records if not is_final(record)
        }, "a row was reported before it was written"
        finished = now_finished
        is_complete = num_done is None and all(map(is_final, records))
        if not is_complete and run % 2:
            with output_path.open("ab") as file:
                file.write(b'{"id":"batch_req_torn","custom')  # what a kill in the middle of a write leaves

    records = read_records(output_path)
    assert run > NUM_KILLS
    assert sorted(map(str, (record["custom_id"] for record in records))) == sorted(map(str, ids))
    assert sorted(str(record["custom_id"]) for record in records if record["error"] is not None) == ["None", "bad"]


async def run_with_room(input_path: Path, output_path: Path, num_kib: int | None) -> tuple[int | None, str]:
    """Run the child where no file may grow over a size, which fails as a full disk does; its end and what it says."""
    limit = "" if num_kib is None else f"ulimit -f {num_kib};"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f'{limit} exec "$@"', "bash"),
        *(sys.executable, "-m", "tests.support.batch_child", input_path, output_path, "0"),
        cwd=PROJECT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    return process.returncode, told.decode()


async def test_run_that_finds_the_disk_full_stops_with_whole_lines_and_goes_on_once_there_is_room(
    tmp_path: Path,
) -> None:
    rows: list[Any] = [chat_row(f"r{number}", f"text {number}") for number in range(NUM_ROWS)]
    input_path, output_path = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    for num_kib in (8, 32):
        code, told = await run_with_room(input_path, output_path, num_kib)
        assert code == 1
        assert f"OutputError: output file {output_path}: cannot write: File too large." in told
        assert "make room and resume the run" in told
        records = read_records(output_path)
        assert 0 < len(records) < NUM_ROWS
        assert (num_kib - 1) << 10 < output_path.stat().st_size <= num_kib << 10
    before = {record["custom_id"] for record in records if is_final(record)}
    is_complete = False
    while not is_complete:
        assert (await run_with_room(input_path, output_path, None))[0] == 0
        records = read_records(output_path)
        assert sorted(record["custom_id"] for record in records) == sorted(f"r{number}" for number in range(NUM_ROWS))
        assert before <= {record["custom_id"] for record in records if is_final(record)}
        is_complete = all(map(is_final, records))
