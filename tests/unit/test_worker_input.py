"""What no worker could do is refused by the command before anything starts, with the flag and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli import main


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--block-size", "0", "greater than or equal to 16"),
        ("--block-size", "8", "greater than or equal to 16"),
        ("--block-size", "-64", "greater than or equal to 16"),
        ("--block-size", "257", "less than or equal to 256"),
        ("--block-size", "1000", "less than or equal to 256"),
        ("--block-size", "x", "valid integer"),
        ("--block-size", "64.5", "valid integer"),
        ("--kv-cache-blocks", "0", "greater than or equal to 2"),
        ("--kv-cache-blocks", "-5", "greater than or equal to 2"),
        ("--kv-cache-bytes", "0", "greater than or equal to 1"),
        ("--kv-cache-bytes", "-1", "greater than or equal to 1"),
        ("--max-model-len", "0", "greater than or equal to 1"),
        ("--max-model-len", "-2048", "greater than or equal to 1"),
        ("--max-num-seqs", "-1", "greater than or equal to 1"),
        ("--workers", "-1", "greater than or equal to 1"),
        ("--eviction", "fifo", "'lru', 'shared_first', 'adaptive' or 'stock'"),
    ],
)
@pytest.mark.parametrize("command", ["up", "batch"])
def test_worker_settings_out_of_range_are_refused_with_flag_value_and_limit(
    command: str, flag: str, value: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")] if command == "batch" else []
    assert main([command, *arguments, "--model", "tiny", "--run-dir", str(tmp_path / "run"), f"{flag}={value}"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{flag}: invalid value '{value}'" in told.err
    assert reason in told.err
    assert list(tmp_path.iterdir()) == []
