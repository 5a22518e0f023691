"""What the serve command makes of its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from router.attach import attached_router, find_servers
from router.serve import make_front
from shared.config import Settings
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.http_front import ask
from tests.support.tokenizers import write_model_folder

KEY = "k" * 32


def nobody(line: str) -> None:
    """Nobody is told."""


async def test_requests_for_other_hosts_are_refused_where_loopback_is_all_that_guards(tmp_path: Path) -> None:
    server = await FakeVllm(FakeOptions()).start()
    try:
        settings = Settings(attach=(server.attach,), tokenizer=str(write_model_folder(tmp_path)))
        async with attached_router(await find_servers(settings, nobody), nobody) as serving:

            async def status(shown_host: str, **changed: Any) -> int:
                front = make_front(replace(serving, settings=settings.model_copy(update=changed)), [])
                shown = {"host": shown_host, "authorization": f"Bearer {KEY}"}
                return (await ask(front, "/dashboard/snapshot.json", headers=shown)).status

            with_key = {"api_key": Settings(api_key=KEY).api_key}
            assert [await status("localhost:8000"), await status("evil.example:8000")] == [200, 403]
            assert await status("evil.example", host="localhost") == 403
            assert await status("llm.example", **with_key) == 200
            # Whoever opens it to the network has been warned, and may be asked for by any name.
            assert await status("llm.example", host="0.0.0.0") == 200
    finally:
        await server.stop()
