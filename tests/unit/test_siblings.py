"""Several server processes behind one port: their metrics as one text, and who is left out of it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.http import OWN_METRICS_PATH
from router.http_server import serving_http
from router.siblings import all_metrics, listen_for_siblings, merged_metrics
from router.tokenizer import Tokenizer
from shared.telemetry import Metrics
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import ask, echo, make_front
from tests.support.tokenizers import write_model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def test_metrics_of_several_processes_are_one_text() -> None:
    texts = {}
    for router in ("0", "1"):
        metrics = Metrics()
        metrics.note_failover("stream")
        metrics.note_workers({"ready": 2 + int(router)}, ['w"0'])
        texts[router] = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(merged_metrics(texts).decode())}
    alone = {family.name: family for family in text_string_to_metric_families(texts["0"])}
    assert families.keys() == alone.keys()
    assert [(sample.labels, sample.value) for sample in families["kvroute_workers"].samples] == [
        ({"router": "0", "state": "ready"}, 2.0),
        ({"router": "1", "state": "ready"}, 3.0),
    ]
    for name, family in families.items():
        assert (family.documentation, family.type) == (alone[name].documentation, alone[name].type)
        assert len(family.samples) == 2 * len(alone[name].samples)


async def test_front_tells_the_metrics_of_all_and_its_own(tokenizer: Tokenizer) -> None:
    async def all_of_them() -> bytes:
        return b"# all\n"

    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, all_metrics=all_of_them)
    assert (await ask(front, "/metrics")).body == b"# all\n"
    assert (await ask(front, OWN_METRICS_PATH)).body == b"# no metrics\n"


async def test_process_that_does_not_answer_is_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, metrics=b"# HELP a b\na 1.0\n")
    with contextlib.ExitStack() as stack:
        living = stack.enter_context(listen_for_siblings(tmp_path, 0))
        silent = stack.enter_context(listen_for_siblings(tmp_path, 2))
        assert silent.fileno() >= 0
        async with serving_http(front, [living], front.limits), asyncio.timeout(30.0):
            told = await all_metrics(tmp_path, 3)
    assert told == b'# HELP a b\na{router="0"} 1.0\n'
