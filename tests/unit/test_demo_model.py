from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from shared.errors import ConfigError
from worker.engines.demo_model import prepare_model


def test_tiny_is_written_once_and_is_the_same_each_time(tmp_path: Path):
    first = prepare_model("tiny", tmp_path / "a")
    second = prepare_model("tiny", tmp_path / "b")
    assert {path.name for path in first.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    written_at = first.stat().st_mtime_ns
    assert prepare_model("tiny", tmp_path / "a") == first
    assert first.stat().st_mtime_ns == written_at


def test_tokenizer_of_tiny_renders_chats_and_loses_nothing(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_model("tiny", tmp_path))
    text = "Hello, 1234  é\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(chat)[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == 2


def test_what_a_killed_process_left_half_written_is_done_again(tmp_path: Path):
    partial = tmp_path / ".tiny-1.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    folder = prepare_model("tiny", tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 100_000
    assert not partial.exists()


def test_processes_that_start_together_get_one_whole_model(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=prepare_model, args=("tiny", tmp_path)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny-1.lock", "tiny-1"]


def test_a_folder_is_taken_as_it_is(tmp_path: Path):
    assert prepare_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_an_unobtainable_name_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="--model: 'nobody/nothing' is no folder and none of smollm2, tiny"):
        prepare_model("nobody/nothing", tmp_path)
    with pytest.raises(ConfigError, match="'/no/such/folder'"):
        prepare_model("/no/such/folder", tmp_path)
