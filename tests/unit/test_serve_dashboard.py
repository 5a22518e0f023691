"""Batches as the dashboard shows them."""

from __future__ import annotations

import os
from pathlib import Path

from router.batch_book import BatchBook
from router.openai import Endpoint
from router.overview import BatchJob
from router.serve_dashboard import newest_jobs


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
