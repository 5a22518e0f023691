"""What one server process tells: by its dashboard the picture of all routers, batches and prompts explained; by words
its own share to the other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.batch_book import BatchBook
from router.borrowed_tokenizer import tokenizer_flags
from router.dashboard import dashboard_app
from router.explain import explain_prompt, read_body
from router.http_call import App
from router.joined_view import SHARE, SHARE_WITH_HISTORY, encoded, own_share, take_joined
from router.keys import Caller, KeyRing
from router.overview import BatchJob, Overview, Viewpoint
from router.serving import Serving
from router.sibling_metrics import METRICS
from router.sibling_words import Place

_SHOWN_JOBS = 10


def dashboard_of(
    serving: Serving, keys: KeyRing, book: BatchBook | None, is_ending: Callable[[], bool], place: Place | None = None
) -> App:
    """What is to be mounted as `/dashboard`; `book` has the batches, where there are any, and `place` leads to the
    other processes, where there are some.
    """

    async def jobs() -> Sequence[BatchJob]:
        return [] if book is None else await asyncio.to_thread(newest_jobs, book)

    viewpoint = Viewpoint(serving.router, jobs, [lambda: tokenizer_flags(serving.tokenizer)])

    async def take(with_history: bool) -> Overview:
        if place is None:
            return await viewpoint.take(with_history=with_history)
        return await take_joined(viewpoint, place, with_history=with_history)

    async def explained(raw: bytes, caller: Caller) -> Mapping[str, Any]:
        prompt = read_body(raw)
        salted = replace(prompt, salt=keys.salt_of(caller, prompt.salt, prompt.tenant))
        return await explain_prompt(serving.router, salted, serving.tokenizer, serving.settings)

    return dashboard_app(take, explained, is_ending=is_ending)


def words_of(serving: Serving) -> Mapping[str, Callable[[], Awaitable[bytes]]]:
    """What a process tells its siblings, by name."""
    viewpoint = Viewpoint(serving.router, flags=[lambda: tokenizer_flags(serving.tokenizer)])

    async def metrics() -> bytes:
        return serving.router.render_metrics()

    async def share() -> bytes:
        return encoded(await own_share(viewpoint, with_history=False))

    async def share_with_history() -> bytes:
        return encoded(await own_share(viewpoint, with_history=True))

    return {METRICS: metrics, SHARE: share, SHARE_WITH_HISTORY: share_with_history}


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
