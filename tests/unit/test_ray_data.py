"""What an actor of Ray Data does with its windows of rows, on a server that runs already and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.config import Settings
from shared.errors import ConfigError, InvalidRequest
from tests.support.fake_vllm import FakeOptions, FakeVllm
from tests.support.tokenizers import write_model_folder

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pandas")
ray_data = pytest.importorskip("router.ray_data")


def to_body(row: dict[str, Any]) -> dict[str, Any]:
    return {row["field"]: row["value"], "max_tokens": 4, **row["more"]}


@pytest.fixture
async def prompts(tmp_path: Path) -> AsyncIterator[Any]:
    server = await FakeVllm(FakeOptions()).start()
    settings = Settings(attach=(server.attach,), tokenizer=str(write_model_folder(tmp_path)))
    actor = await asyncio.to_thread(ray_data._Prompts, ray_data._order(settings, None), to_body)
    yield actor
    await asyncio.to_thread(actor.close)
    await server.stop()


async def test_rows_of_a_window_get_columns_in_their_order(prompts: Any) -> None:
    lengths = [3, 1, 2]
    more = [{"max_tokens": length} for length in lengths]
    window = pa.table({"field": ["prompt"] * 3, "value": ["a", "b", "c"], "more": more})
    whole = await asyncio.to_thread(prompts, window)
    assert whole.column_names == ["field", "value", "more", *ray_data.ANSWER_COLUMNS]
    assert whole["value"].to_pylist() == ["a", "b", "c"]
    assert whole["completion_tokens"].to_pylist() == lengths
    assert whole["error"].to_pylist() == [None] * 3
    assert all(isinstance(answer, str) for answer in whole["answer"].to_pylist())
    with pytest.raises(ConfigError, match="columns named answer, cached_tokens, completion_tokens"):
        await asyncio.to_thread(prompts, whole)


async def test_row_that_fails_says_why_and_the_others_are_answered(prompts: Any) -> None:
    window = pa.table(
        {
            "field": ["prompt", "prompt", "messages"],
            "value": ["a", "b", "c"],
            "more": [{"max_tokens": 2}, {"max_tokens": 1 << 20}, {"max_tokens": 2}],
        }
    )
    found = (await asyncio.to_thread(prompts, window)).to_pylist()
    assert [row["completion_tokens"] for row in found] == [2, None, None]
    assert found[0]["error"] is None
    assert found[1]["error"].startswith("context_length_exceeded: ")
    assert found[2]["error"].startswith("invalid_value: ")


async def test_window_without_rows_gets_the_columns(prompts: Any) -> None:
    window = pa.table({"field": pa.array([], pa.string())})
    whole = await asyncio.to_thread(prompts, window)
    assert (whole.num_rows, whole.column_names) == (0, ["field", *ray_data.ANSWER_COLUMNS])


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, None])
def test_body_without_a_prompt_is_refused(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="either 'messages' or a 'prompt'"):
        ray_data._row(0, body)
