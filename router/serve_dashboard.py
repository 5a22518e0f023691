"""The dashboard of one server process: its router's picture, its batches, and prompts explained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.batch_book import BatchBook
from router.dashboard import dashboard_app
from router.explain import explain_prompt, read_body
from router.http_call import App
from router.overview import BatchJob, Overview, Viewpoint
from router.serving import Serving

_SHOWN_JOBS = 10


def dashboard_of(serving: Serving, book: BatchBook | None, is_ending: Callable[[], bool]) -> App:
    """What is to be mounted as `/dashboard`; `book` has the batches, where there are any."""

    async def jobs() -> Sequence[BatchJob]:
        return [] if book is None else await asyncio.to_thread(newest_jobs, book)

    viewpoint = Viewpoint(serving.router, jobs)

    async def take(with_history: bool) -> Overview:
        return await viewpoint.take(with_history=with_history)

    async def explained(raw: bytes) -> Mapping[str, Any]:
        return await explain_prompt(serving.router, read_body(raw), serving.tokenizer, serving.settings)

    return dashboard_app(take, explained, is_ending=is_ending)


def newest_jobs(book: BatchBook) -> list[BatchJob]:
    """The batches that were written last, newest first. Blocks."""
    return [
        BatchJob(
            id=record.id,
            state=record.status,
            num_rows=record.num_total,
            num_done=record.num_completed + record.num_failed,
            num_failed=record.num_failed,
            began_at=record.created_at,
        )
        for record in book.newest(_SHOWN_JOBS)
    ]
