"""A router without a tokenizer that it can use, and the worker that lends it one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from router.borrowed_tokenizer import Fetch, tokenizer_flags, usable_tokenizer
from router.tokenizer import Tokenizer
from shared.errors import ConfigError, EngineError, ProtocolError, WorkerLost
from shared.hashing import parity_key
from shared.messages import AskTokenizer, TokenizerFile, decode, encode
from shared.telemetry import Readings
from shared.transport.channel import local_pair
from shared.transport.handshake import receive_hello, send_welcome
from shared.transport.tokenizer_files import fetch_tokenizer, read_tokenizer
from shared.types import CacheScheme, Instance, RouterId, WorkerId, WorkerInfo
from tests.support.rack import rack
from tests.support.tokenizers import write_model_folder

SCHEME = CacheScheme("m", 16)
ROUTER = RouterId("router-0")
TALK = [{"role": "user", "content": "What goes where?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


def info_of(worker: str, folder: Path) -> WorkerInfo:
    return WorkerInfo(
        WorkerId(worker),
        Instance("i" * 32),
        "unix:/nowhere",
        SCHEME,
        parity_key(SCHEME, Tokenizer(folder).fingerprint),
        num_blocks=64,
        max_num_seqs=8,
        max_model_len_tokens=512,
        engine="fake",
        eviction="none",
    )


def lending(folder: Path, *, broken: int = 0) -> tuple[Fetch, list[str]]:
    """Workers that give the files in `folder`, but for the first ones; and whom of them was asked."""
    asked: list[str] = []

    async def fetch(info: WorkerInfo) -> Mapping[str, bytes]:
        asked.append(info.worker)
        if len(asked) <= broken:
            raise EngineError("no files here")
        return read_tokenizer(folder)

    return fetch, asked


async def test_own_tokenizer_is_used_where_it_is_the_workers(folder: Path) -> None:
    fetch, asked = lending(folder)
    tokenizer = await usable_tokenizer(folder, [info_of("w0", folder)], fetch, random.Random(0))
    assert (asked, tokenizer.why_borrowed, tokenizer_flags(tokenizer)) == ([], "", [])


async def test_missing_tokenizer_is_borrowed_from_the_first_worker_that_gives_its_own(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch, asked = lending(folder, broken=1)
    infos = [info_of("w0", folder), info_of("w1", folder)]
    with caplog.at_level(logging.WARNING):
        tokenizer = await usable_tokenizer(tmp_path, infos, fetch, random.Random(0))
    own, readings = Tokenizer(folder), Readings()
    tokenizer.expose(readings)
    assert asked == ["w0", "w1"]
    assert tokenizer.fingerprint == own.fingerprint
    assert await tokenizer.tokens_of(messages=TALK) == await own.tokens_of(messages=TALK)
    assert await tokenizer.tokens_of(prompt="a b") == await own.tokens_of(prompt="a b")
    assert (tokenizer.decode(own.encode("a b")), tokenizer.eos_token_ids) == ("a b", own.eos_token_ids)
    assert readings.value("kvroute_tokenizer_borrowed") == 1.0
    (flag,) = tokenizer_flags(tokenizer)
    assert flag.name == "tokenizer"
    assert f"cannot load a tokenizer from {tmp_path}" in flag.text
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].endswith("prompts are tokenised with a copy of that of worker w1")


def test_failed_comparison_of_a_prompt_is_shown(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokenizer.segments.compare("a b", b"\0\0\0\0")
    (flag,) = tokenizer_flags(tokenizer)
    assert flag.text == "Prompts are tokenised as a whole: a prompt had other token ids in pieces than as a whole."


async def test_tokenizer_that_is_not_the_workers_gives_way_to_theirs(folder: Path, tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    fetch, asked = lending(folder)
    tokenizer = await usable_tokenizer(other, [info_of("w0", folder)], fetch, random.Random(0))
    assert asked == ["w0"]
    assert tokenizer.fingerprint == Tokenizer(folder).fingerprint
    assert tokenizer.why_borrowed == "the router's tokenizer is not the workers'"


async def test_where_no_worker_lends_one_the_own_is_used_and_without_one_the_start_fails(
    folder: Path, tmp_path: Path
) -> None:
    infos = [replace(info_of("w0", folder), parity_key=b"another")]
    fetch, _ = lending(folder, broken=9)
    assert (await usable_tokenizer(folder, infos, fetch, random.Random(0))).why_borrowed == ""
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        await usable_tokenizer(tmp_path, infos, fetch, random.Random(0))


async def test_worker_sends_its_files_while_it_serves(folder: Path) -> None:
    async with rack(1) as workers, asyncio.timeout(30.0):
        (slot,) = workers.worker_to_slot.values()
        slot.host._model_folder = folder
        info = (await workers.directory.workers())[0].info
        found = await fetch_tokenizer(slot.host.open_local, info.worker, info.instance, ROUTER, slot.host._secret)
        assert found == read_tokenizer(folder)
        slot.host._model_folder = None
        with pytest.raises(EngineError, match="this worker has no files of a tokenizer"):
            await fetch_tokenizer(slot.host.open_local, info.worker, info.instance, ROUTER, slot.host._secret)
        with pytest.raises(WorkerLost, match="answers in place of"):
            await fetch_tokenizer(slot.host.open_local, WorkerId("w9"), info.instance, ROUTER, slot.host._secret)


@pytest.mark.parametrize(
    "answers",
    [
        [TokenizerFile(1, "../../etc/passwd", b"x", 0)],
        [TokenizerFile(1, "config.json", b"x", 1), TokenizerFile(1, "config.json", b"x", 0)],
        [TokenizerFile(2, "config.json", b"x", 0)],
        [AskTokenizer(1)],
    ],
    ids=["another-name", "twice", "another-question", "no-file"],
)
async def test_worker_that_sends_something_else_is_not_believed(answers: list[object]) -> None:
    ours, theirs = local_pair()

    async def worker() -> None:
        greeting = await receive_hello(ours, b"secret")
        name, instance = WorkerId("w0"), Instance("i")
        await send_welcome(ours, b"secret", greeting, name, instance, is_resumed=False, last_submit=0)
        assert decode(await ours.receive()) == AskTokenizer(1)
        for answer in answers:
            await ours.send(encode(answer))

    async def connect() -> object:
        return theirs

    answering = asyncio.create_task(worker())
    async with asyncio.timeout(30.0):
        with pytest.raises(ProtocolError):
            await fetch_tokenizer(connect, WorkerId("w0"), Instance("i"), ROUTER, b"secret")  # type: ignore[arg-type]
        await answering
