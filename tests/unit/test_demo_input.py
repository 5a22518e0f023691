"""The demo's input is what the demo says it is: shared system prompts, growing chats, one-off prompts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from router.demo import run_demo
from router.demo_input import demo_rows
from shared.config import Settings
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return demo_rows(0)


def _roles(row: dict[str, Any]) -> list[str]:
    return [message["role"] for message in row["body"]["messages"]]


def test_rows_are_openai_batch_rows_with_unique_ids(rows: list[dict[str, Any]]) -> None:
    assert 130 <= len(rows) <= 150
    assert len({row["custom_id"] for row in rows}) == len(rows)
    for row in json.loads(json.dumps(rows)):
        assert sorted(row) == ["body", "custom_id", "method", "url"]
        assert (row["method"], row["url"]) == ("POST", "/v1/chat/completions")
        assert sorted(row["body"]) == ["max_tokens", "messages", "model", "temperature"]
        assert 8 <= row["body"]["max_tokens"] <= 16
        assert row["body"]["temperature"] == 0
        assert all(message["content"].strip() == message["content"] != "" for message in row["body"]["messages"])


def test_every_prompt_ends_with_the_user_and_alternates(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        said = [role for role in _roles(row) if role != "system"]
        assert said == ["user", "assistant"] * (len(said) // 2) + ["user"], row["custom_id"]


def test_eleven_system_prompts_share_the_rows(rows: list[dict[str, Any]]) -> None:
    systems = [row["body"]["messages"][0]["content"] for row in rows if _roles(row)[0] == "system"]
    assert len(set(systems)) == 11
    assert all(systems.count(system) >= 8 for system in set(systems))
    assert sum(_roles(row)[0] != "system" for row in rows) >= 10


def test_turns_of_a_chat_extend_each_other_in_order() -> None:
    for seed in range(20):
        turns_of_chat: dict[str, list[list[dict[str, str]]]] = {}
        for row in demo_rows(seed):
            chat, is_turn, number = row["custom_id"].partition("-turn-")
            if is_turn:
                turns_of_chat.setdefault(chat, []).append(row["body"]["messages"])
                assert int(number) == len(turns_of_chat[chat])
        assert len(turns_of_chat) >= 6
        for turns in turns_of_chat.values():
            assert 3 <= len(turns) <= 5
            for before, after in pairwise(turns):
                assert after[: len(before)] == before
                assert len(after) == len(before) + 2


def test_equal_seeds_give_equal_order_and_others_another() -> None:
    assert demo_rows(7) == demo_rows(7)
    assert demo_rows(7) != demo_rows(8)
    assert sorted(json.dumps(row) for row in demo_rows(7)) == sorted(json.dumps(row) for row in demo_rows(8))


def test_rows_name_the_model_that_is_asked_for() -> None:
    assert {row["body"]["model"] for row in demo_rows(0, model="tiny")} == {"tiny"}


async def test_folder_that_takes_no_results_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-dir: cannot write .*file/demo/input\.jsonl: Not a directory"):
        await run_demo(Settings(), tmp_path / "file" / "demo", is_json=False, say=print, show=print)
