"""Which class reads a tokenizer: the one that the library itself would choose, and no more imports than it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from router.tokenizer_files import load_tokenizer
from shared.config import Settings
from tests.support.tokenizers import write_model_folder
from worker.engines.demo_model import prepare_model

TEXT = "plain words, 123 é你好🎉 mixed <|im_start|> and more"


@pytest.fixture(params=["tiny", "smollm2", "no config", "another type"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param in ("tiny", "smollm2"):
        return prepare_model(request.param, Settings().model_cache_dir)
    written = write_model_folder(tmp_path / "model")
    if request.param == "another type":
        (written / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return written


def test_tokenizer_is_the_one_that_the_library_chooses(folder: Path) -> None:
    chosen, loaded = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    assert type(loaded) is type(chosen)
    assert loaded.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert (loaded.chat_template, loaded.eos_token_id) == (chosen.chat_template, chosen.eos_token_id)
    assert loaded(TEXT) == chosen(TEXT)


def test_generic_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from router.tokenizer import Tokenizer; "
    program += "Tokenizer(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    folder = write_model_folder(tmp_path / "model")
    ran = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("raw", ["", "[]", '{"tokenizer_class": 3}', '{"tokenizer_class": ["a"]}'])
def test_file_that_is_no_configuration_is_left_to_the_library(tmp_path: Path, raw: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(raw)
    with pytest.raises(Exception) as by_library:  # noqa: PT011 (whatever it raises)
        AutoTokenizer.from_pretrained(str(folder))
    with pytest.raises(type(by_library.value)):
        load_tokenizer(folder)
