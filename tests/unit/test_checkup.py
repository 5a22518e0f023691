"""The doctor and the views of the directory over a real store, with fake engines behind real hosts and publishers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from router import cli, holdings, runfile
from router.checkup import check_up, check_up_text
from router.runfile import Run
from shared.config import Settings
from shared.directory.embedded import EmbeddedStore
from shared.directory.redis import RedisDirectory
from shared.directory.survey import StoreSurvey, WorkerSize
from shared.hashing import block_keys, pack_tokens, root_key
from shared.types import BlockKey, WorkerId
from tests.faults.test_cluster import WORKERS_KEY, names_on, owner
from tests.support.fakes import FakeEngine
from tests.support.servers import ClusterProcesses, redis_cluster
from tests.support.stores import (
    PATIENT_S,
    SCHEME,
    embedded_store,
    instance,
    key,
    keys,
    redis_bench,
    wait_until,
    worker_info,
)
from tests.support.tokenizers import write_model_folder
from worker.auditor import AuditCounts, Auditor
from worker.engines.base import BlockChange
from worker.host import WorkerHost
from worker.inspector import PoolInspector
from worker.publisher import Publisher

__all__ = ["embedded_store", "redis_cluster"]

pytestmark = pytest.mark.redis

HEARTBEAT_S = 0.05
LEASE_S = 600.0
SECRET = b"secret of the ward"
PARITY_KEY = worker_info("w0").parity_key
SETTINGS = Settings(model=SCHEME.model, block_size=SCHEME.block_size_tokens)


@dataclass
class Staffed:
    """One worker that serves."""

    engine: FakeEngine
    host: WorkerHost
    publisher: Publisher

    def hold(self, held: tuple[BlockKey, ...], *, is_told: bool = True) -> None:
        """Let the engine hold these blocks, with or without a word to the publisher."""
        self.engine._resident.update(dict.fromkeys(held))
        if is_told:
            self.publisher.on_blocks(BlockChange(stored=held))


@dataclass
class Ward:
    """A deployment on a real store."""

    directory: RedisDirectory
    client: Redis
    run: Run
    folder: Path
    name_to_worker: dict[str, Staffed] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    async def start(self, name: str, *, parity: bytes = PARITY_KEY) -> Staffed:
        publishers: list[Publisher] = []
        engine = FakeEngine(scheme=SCHEME)
        host = WorkerHost(
            engine,
            engine.info,
            worker=WorkerId(name),
            instance=instance(1),
            secret=SECRET,
            inspector=PoolInspector(engine, lambda: publishers[0] if publishers else None, AuditCounts()),
        )
        address = await host.listen(f"unix:{self.folder}/{name}.sock")
        info = replace(worker_info(name), address=address, parity_key=parity)
        publisher = Publisher(
            self.directory, info, rng=random.Random(name), lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, tick_s=0.001
        )
        publishers.append(publisher)
        await publisher.start()
        self.name_to_worker[name] = Staffed(engine, host, publisher)
        return self.name_to_worker[name]

    async def quiet(self) -> None:
        """Wait until all is published."""
        for worker in self.name_to_worker.values():
            await wait_until(lambda worker=worker: worker.publisher.is_quiet)  # type: ignore[misc]

    async def check_up(self, *, is_repair: bool = False, is_patient: bool = False) -> dict[str, Any]:
        """With patience there are many heartbeats between two looks, so that what mends itself has done so."""
        run = replace(self.run, settings={**self.run.settings, "heartbeat_s": 1.0}) if is_patient else self.run
        return await check_up(run, SETTINGS, PARITY_KEY, is_repair=is_repair, say=self.said.append)

    def key(self, name: str, kind: str) -> str:
        return f"kvr:{{{SCHEME.namespace}:{name}}}:{kind}"

    def blocks_key(self, name: str) -> str:
        return self.key(name, "blocks")


@asynccontextmanager
async def staffed(ward: Ward) -> AsyncIterator[Ward]:
    """The ward with all its workers, each with ten blocks."""
    try:
        for name in ward.run.workers:
            (await ward.start(name)).hold(keys(range(10)))
        await ward.quiet()
        yield ward
    finally:
        for worker in ward.name_to_worker.values():
            await worker.publisher.stop()
            await worker.host.close()


def run_on(url: str, *workers: str) -> Run:
    settings = {"model": SCHEME.model, "redis_url": url, "heartbeat_s": HEARTBEAT_S}
    return Run("marker", SECRET.hex(), settings, url, "host:1", workers, is_ready=True)


@pytest.fixture
async def ward(embedded_store: EmbeddedStore, tmp_path: Path) -> AsyncIterator[Ward]:
    """`w0` and `w1`, each with ten blocks."""
    async with redis_bench(embedded_store) as bench:
        assert isinstance(bench.directory, RedisDirectory)
        assert isinstance(bench.client, Redis)
        run = run_on(embedded_store.url, "w0", "w1")
        async with staffed(Ward(bench.directory, bench.client, run, tmp_path)) as found:
            yield found


async def test_a_deployment_that_is_well_is_told_so(ward: Ward) -> None:
    state = await ward.check_up()
    assert (state["is_healthy"], state["problems"], state["repaired"]) == (True, [], [])
    worker = state["workers"][0]
    assert (worker["num_resident"], worker["num_in_store"], worker["num_in_mirror"]) == (10, 10, 10)
    assert (worker["seq"], worker["store_seq"], worker["num_looks"]) == (1, 1, 1)
    assert (worker["lag_s"], worker["spoilt"], worker["is_mirrored"]) == (0.0, [], True)
    assert 0 < worker["lease_left_s"] <= LEASE_S
    assert json.loads(json.dumps(state)) == state
    assert [line.split()[:6] for line in check_up_text(state).splitlines()[1:3]] == [
        ["w0", "ready", "ok", "10", "10", "10"],
        ["w1", "ready", "ok", "10", "10", "10"],
    ]
    assert check_up_text(state).splitlines()[-1] == "all is well"


async def test_what_is_planted_in_the_store_is_found_and_mended_from_the_engine(ward: Ward) -> None:
    await ward.client.sadd(ward.blocks_key("w0"), key(500), key(501))
    await ward.client.srem(ward.blocks_key("w0"), key(3))
    await ward.client.sadd(ward.blocks_key("gone"), key(1))
    state = await ward.check_up()
    (w0, w1) = state["workers"]
    assert [(one["num_phantom"], one["num_missing"], one["num_looks"]) for one in (w0, w1)] == [(2, 1, 3), (0, 0, 1)]
    assert (state["is_healthy"], state["store"]["leftovers"], state["repaired"]) == (False, ["gone"], [])
    assert check_up_text(state).splitlines()[-3:] == state["problems"]

    state = await ward.check_up(is_repair=True)
    assert (state["is_healthy"], state["problems"]) == (True, [])
    assert state["repaired"] == [
        "gone: dropped 1 key that nobody owned",
        "w0: publishes its engine's 10 blocks anew",
    ]
    assert ward.said[-2:] == state["repaired"]
    assert await ward.directory.resident(WorkerId("w0")) == set(keys(range(10)))
    assert ward.name_to_worker["w0"].publisher.num_snapshots["repair"] == 1
    assert ward.name_to_worker["w1"].publisher.num_snapshots["repair"] == 0


@pytest.mark.parametrize("kind", ["blocks", "events", "staged"])
async def test_a_key_of_a_wrong_type_is_found_and_mended(ward: Ward, kind: str) -> None:
    await ward.client.set(ward.key("w0", kind), "junk")
    state = await ward.check_up()
    assert (state["is_healthy"], state["store"]["is_reachable"]) == (False, True)
    assert f"w0: the store holds something else than it should under {kind}" in state["problems"]
    assert [worker["spoilt"] for worker in state["workers"]] == [[kind], []]
    assert state["workers"][1]["num_in_store"] == 10
    state = await ward.check_up(is_repair=True, is_patient=True)
    assert state["repaired"] == ["w0: publishes its engine's 10 blocks anew"]
    assert (state["is_healthy"], state["problems"]) == (True, [])
    assert [worker["num_in_mirror"] for worker in state["workers"]] == [10, 10]
    assert await ward.directory.resident(WorkerId("w0")) == set(keys(range(10)))


@pytest.mark.parametrize(("name", "value"), [("info", b"junk"), ("instance", b"somebody else")])
async def test_a_lease_that_nobody_can_read_is_found_and_taken_anew(ward: Ward, name: str, value: bytes) -> None:
    await ward.client.hset(ward.key("w0", "meta"), name, value)
    state = await ward.check_up()
    assert state["problems"] == ["w0: the store holds something else than it should under meta"]
    state = await ward.check_up(is_repair=True, is_patient=True)
    assert state["repaired"] == ["w0: dropped what cannot be read; it registers anew with its next heartbeat"]
    assert (state["is_healthy"], state["problems"]) == (True, [])
    assert await ward.directory.resident(WorkerId("w0")) == set(keys(range(10)))


async def test_a_store_that_was_emptied_is_well_again_by_itself(ward: Ward) -> None:
    await ward.client.flushall()
    state = await ward.check_up(is_patient=True)
    assert (state["is_healthy"], state["problems"]) == (True, [])
    assert [worker["num_in_store"] for worker in state["workers"]] == [10, 10]


async def test_a_store_with_much_in_it_that_is_killed_is_well_again_by_itself(
    ward: Ward, embedded_store: EmbeddedStore
) -> None:
    ward.name_to_worker["w0"].hold(keys(range(1000, 101_000)))
    await ward.quiet()
    assert embedded_store.pid is not None
    os.kill(embedded_store.pid, signal.SIGKILL)
    await wait_until(lambda: embedded_store.pid is None)
    embedded_store.start()
    async with asyncio.timeout(PATIENT_S):
        while not (state := await ward.check_up(is_patient=True))["is_healthy"]:
            pass
    assert state["problems"] == []
    assert [worker["num_in_store"] for worker in state["workers"]] == [100_010, 10]
    assert [worker["num_in_mirror"] for worker in state["workers"]] == [100_010, 10]


async def test_values_that_are_no_block_keys_are_found_and_mended(ward: Ward) -> None:
    await ward.client.sadd(ward.blocks_key("w0"), b"short", b"x" * 40)
    state = await ward.check_up()
    assert state["problems"] == ["w0: 2 values in its set that can be no block"]
    state = await ward.check_up(is_repair=True)
    assert (state["is_healthy"], state["problems"]) == (True, [])
    assert await ward.client.scard(ward.blocks_key("w0")) == 10


async def test_a_store_that_is_full_is_told_with_what_it_holds(ward: Ward) -> None:
    await ward.client.config_set("maxmemory", 1000)
    try:
        ward.name_to_worker["w0"].hold(keys([10]))
        state = await ward.check_up()
    finally:
        await ward.client.config_set("maxmemory", 0)
    assert not state["is_healthy"]
    assert state["problems"][0].startswith("store: cannot be used: connect: OutOfMemoryError: command not allowed")
    assert "has little memory left: it uses " in state["problems"][1]
    assert [worker["num_in_store"] for worker in state["workers"]] == [10, 10]
    assert [(worker["num_missing"], worker["is_stuck"]) for worker in state["workers"]] == [(1, True), (0, False)]
    assert state["problems"][-1].startswith("w0: its publisher does not get through to the store with 1 change, up to ")
    assert [worker["lag_s"] > 0 for worker in state["workers"]] == [True, False]
    await ward.quiet()
    assert [worker["lag_s"] for worker in (await ward.check_up())["workers"]] == [0.0, 0.0]


async def test_a_repair_goes_by_the_engine_and_not_by_its_publisher(ward: Ward) -> None:
    ward.name_to_worker["w0"].hold(keys([70, 71]), is_told=False)
    state = await ward.check_up()
    assert state["problems"] == ["w0: 2 missing blocks, which the engine holds and the store does not show"]
    state = await ward.check_up(is_repair=True)
    assert state["is_healthy"]
    assert await ward.directory.resident(WorkerId("w0")) == set(keys([*range(10), 70, 71]))


async def test_a_workers_own_audit_finds_and_mends_the_same(ward: Ward) -> None:
    worker = ward.name_to_worker["w0"]
    survey = StoreSurvey(ward.run.redis_url, SCHEME, deadline_s=PATIENT_S)
    auditor = Auditor(WorkerId("w0"), worker.engine, worker.publisher, survey, rng=random.Random(0), audit_s=3600.0)
    try:
        assert await auditor.audit()
        await ward.client.sadd(ward.blocks_key("w0"), key(500))
        await ward.client.srem(ward.blocks_key("w0"), key(3))
        assert not await auditor.audit()
        await ward.quiet()
        assert await ward.directory.resident(WorkerId("w0")) == set(keys(range(10)))
        assert await auditor.audit()
        await ward.client.delete(ward.blocks_key("w0"))
        assert not await auditor.audit()
        await ward.quiet()
        assert await ward.directory.resident(WorkerId("w0")) == set(keys(range(10)))
    finally:
        await survey.close()


async def test_a_repair_of_what_is_well_does_nothing(ward: Ward) -> None:
    state = await ward.check_up(is_repair=True)
    assert (state["is_healthy"], state["repaired"], ward.said) == (True, [], [])


async def test_more_blocks_than_one_part_holds_are_compared(ward: Ward) -> None:
    ward.name_to_worker["w0"].hold(keys(range(1000, 21_000)))
    await ward.quiet()
    await ward.client.sadd(ward.blocks_key("w0"), key(500))
    state = await ward.check_up()
    worker = state["workers"][0]
    assert (worker["num_resident"], worker["num_in_store"], worker["num_in_mirror"]) == (20_010, 20_011, 20_011)
    assert (worker["num_phantom"], worker["num_missing"], worker["num_mismatched"]) == (1, 0, 0)


async def test_blocks_that_come_and_go_all_the_time_are_no_fault(ward: Ward) -> None:
    worker = ward.name_to_worker["w0"]

    async def churn() -> None:
        number = 1000
        while True:
            worker.hold(keys([number]))
            number += 1
            await asyncio.sleep(0.002)

    churning = asyncio.create_task(churn())
    state = await ward.check_up()
    churning.cancel()
    await asyncio.wait({churning})
    assert (state["is_healthy"], state["problems"]) == (True, [])


async def test_a_worker_whose_host_is_gone_is_silent(ward: Ward) -> None:
    await ward.name_to_worker["w1"].host.close()
    state = await ward.check_up()
    assert [worker["state"] for worker in state["workers"]] == ["ready", "silent"]
    assert [problem.partition(": ")[:1] for problem in state["problems"]] == [("w1",)]


async def test_an_engine_that_is_dead_is_told_in_its_own_words(ward: Ward) -> None:
    ward.name_to_worker["w1"].engine.die("out of memory")
    state = await ward.check_up(is_repair=True)
    assert state["problems"] == ["w1: does not answer: out of memory"]
    assert ward.said[-1] == "nothing here can be repaired from here"


async def test_keys_of_another_tokenizer_are_told(ward: Ward) -> None:
    ward.run = replace(ward.run, workers=("w0", "w1", "w2"))
    await ward.start("w2", parity=b"another")
    state = await ward.check_up()
    assert [worker["parity"] for worker in state["workers"]] == ["ok", "ok", "mismatch"]
    assert len(state["problems"]) == 1


async def test_a_worker_that_never_came_holds_no_lease(ward: Ward) -> None:
    ward.run = replace(ward.run, workers=("w0", "w9"))
    state = await ward.check_up()
    assert state["problems"] == ["w9: holds no lease"]
    assert "no lease" in check_up_text(state)


async def test_who_holds_a_prompt_is_told_for_each_worker(ward: Ward) -> None:
    token_ids = list(range(300))
    chain = block_keys(pack_tokens(token_ids), SCHEME.block_size_tokens, root_key(SCHEME, salt="tenant"))
    ward.name_to_worker["w0"].hold(tuple(chain[:3]))
    await ward.quiet()
    ward.run = replace(ward.run, workers=("w0", "w1", "w9"))
    state = await holdings.who_holds(ward.run, SETTINGS, token_ids, salt="tenant")
    assert state == {
        "num_prompt_tokens": 300,
        "num_prompt_blocks": 4,
        "block_size": 64,
        "workers": [
            {"worker": "w0", "is_away": False, "num_blocks": 3, "num_tokens": 192},
            {"worker": "w1", "is_away": False, "num_blocks": 0, "num_tokens": 0},
            {"worker": "w9", "is_away": True, "num_blocks": 0, "num_tokens": 0},
        ],
    }
    assert holdings.who_text(state).splitlines() == [
        "300 tokens, 4 full blocks of 64",
        "worker  blocks  tokens",
        "w0      3       192",
        "w1      0       0",
        "w9      away    -",
    ]
    unsalted = await holdings.who_holds(ward.run, SETTINGS, token_ids, salt="")
    assert [worker["num_blocks"] for worker in unsalted["workers"]] == [0, 0, 0]


async def test_sizes_are_told_for_each_worker_and_in_all(ward: Ward) -> None:
    ward.name_to_worker["w1"].hold(keys(range(10, 30)))
    await ward.quiet()
    state = await holdings.directory_size(ward.run, SETTINGS)
    assert [worker["num_entries"] for worker in state["workers"]] == [10, 30]
    total = state["total"]
    assert (total["num_entries"], total["num_bytes"]) == (40, sum(worker["num_bytes"] for worker in state["workers"]))
    assert holdings.size_text(state).splitlines()[-1].split() == [
        "total", "40", str(total["num_bytes"]), str(total["num_stream_entries"]),
    ]  # fmt: skip


def test_a_size_that_is_not_told_makes_no_sum() -> None:
    assert holdings._total([1, None]) is None
    assert holdings._total([]) == 0


async def test_of_a_cluster_the_workers_of_a_lost_node_are_unknown_and_the_others_are_examined(
    redis_cluster: ClusterProcesses, tmp_path: Path
) -> None:
    kept = owner(redis_cluster, WORKERS_KEY)
    lost = next(node for node in redis_cluster.nodes if node is not kept)
    (hidden,), (seen,) = names_on(redis_cluster, lost), names_on(redis_cluster, kept)
    url = kept.url
    directory = RedisDirectory(url, SCHEME, publish_deadline_s=PATIENT_S)
    try:
        async with (
            contextlib.aclosing(kept.client()) as client,
            staffed(Ward(directory, client, run_on(url, hidden, seen), tmp_path)) as ward,
        ):
            state = await ward.check_up()
            assert (state["problems"], len(state["store"]["servers"])) == ([], 2)
            await client.sadd(ward.blocks_key(seen), key(500))
            lost.kill()
            state = await ward.check_up()
            assert [worker["state"] for worker in state["workers"]] == ["unknown", "ready"]
            assert not state["is_healthy"]
            told = "\n".join(state["problems"])
            assert f"store 127.0.0.1:{lost.port}: does not answer: " in told
            assert f"{hidden}: nothing is known of it: holding: " in told
            assert f"{seen}: 1 phantom block, which" in told
            assert "lease" not in told
            redis_cluster.start()
    finally:
        redis_cluster.start()
        await directory.close()


# The commands themselves.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor"], "nothing is running"),
        (["doctor", "--repair"], "nothing is running"),
        (["directory", "size"], "nothing is running"),
        (["directory", "who", "--file", "prompt.txt"], "nothing is running"),
        (["directory", "who"], "--file, --messages: one is needed"),
        (["directory", "who", "--file", "missing.txt"], "--file: cannot read"),
        (["directory", "who", "--messages", "prompt.txt"], "prompt.txt is not JSON"),
    ],
)
def test_bad_usage_is_told_with_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("word " * 100)
    placed = [str(tmp_path / one) if one.endswith(".txt") else one for one in arguments]
    assert cli.main([*placed, "--run-dir", str(tmp_path / "run")]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, len(err.splitlines())) == ("", True, 1)


@pytest.fixture
def stranded(embedded_store: EmbeddedStore, tmp_path: Path) -> Path:
    """The run folder of a deployment whose only worker has never come."""

    async def flush() -> None:
        async with contextlib.aclosing(Redis.from_url(embedded_store.url)) as client:
            await client.flushall()

    asyncio.run(flush())
    write_run(tmp_path, embedded_store.url)
    return tmp_path


def write_run(folder: Path, url: str) -> None:
    model = folder / "model"
    model.mkdir()
    write_model_folder(model)
    settings = {"model": str(model), "redis_url": url, "ray_address": "127.0.0.1:1", "block_size": 16}
    runfile.write_run(folder, Run("marker", "00", settings, url, "127.0.0.1:1", ("w7",), is_ready=True))


def test_a_doctor_that_finds_something_ends_with_1(stranded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--run-dir", str(stranded)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "w7: holds no lease"
    assert cli.main(["doctor", "--json", "--repair", "--run-dir", str(stranded)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["w7: holds no lease"]


def test_a_store_that_is_away_is_told_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, f"unix://{tmp_path}/nobody.sock")
    assert cli.main(["doctor", "--json", "--run-dir", str(tmp_path)]) == 1
    state = json.loads(capsys.readouterr().out)
    assert (state["is_healthy"], state["store"]["is_reachable"]) == (False, False)
    assert [worker["state"] for worker in state["workers"]] == ["unknown"]
    assert cli.main(["doctor", "--run-dir", str(tmp_path)]) == 1
    assert "store: does not answer: health: ConnectionError" in capsys.readouterr().out
    assert cli.main(["status", "--json", "--run-dir", str(tmp_path)]) == 0
    assert [worker["state"] for worker in json.loads(capsys.readouterr().out)["workers"]] == ["unknown"]
    assert cli.main(["directory", "size", "--run-dir", str(tmp_path)]) == 1
    assert "error: sizes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "5", '["a"]', '[{"rle": "user"}]', '[{"role": "user", "content": "\\ud800"}]'])
def test_messages_that_are_none_are_refused_with_the_files_name(
    stranded: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stranded / "messages.json"
    path.write_text(text)
    assert cli.main(["directory", "who", "--messages", str(path), "--run-dir", str(stranded)]) == 2
    out, err = capsys.readouterr()
    assert (out, f"error: --messages: {path}: " in err) == ("", True)


def test_a_size_that_is_known_in_part_is_printed_and_ends_with_1(
    stranded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sizes(survey: StoreSurvey, workers: object) -> dict[WorkerId, WorkerSize]:
        away = WorkerSize(None, None, None, None, "sizes: no answer within 10 s")
        return {WorkerId("w7"): WorkerSize(3, 200, 1, 4.5), WorkerId("w8"): away}

    monkeypatch.setattr(StoreSurvey, "sizes", sizes)
    assert cli.main(["directory", "size", "--run-dir", str(stranded)]) == 1
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["w7", "3", "200", "1"],
        ["w8", "-", "-", "-"],
        ["total", "-", "-", "-"],
        ["w8:", "not", "known:", "sizes:", "no", "answer", "within", "10", "s"],
    ]


def test_views_of_the_directory_are_printed(stranded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stranded / "prompt.txt").write_text("word " * 100)
    (stranded / "messages.json").write_text(json.dumps([{"role": "user", "content": "word " * 100}]))
    run_dir = ["--run-dir", str(stranded)]
    assert cli.main(["directory", "who", "--file", str(stranded / "prompt.txt"), *run_dir]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["w7", "away", "-"]
    assert cli.main(["directory", "who", "--messages", str(stranded / "messages.json"), "--json", *run_dir]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["is_away"]
    assert cli.main(["directory", "size", *run_dir]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["total", "0", "0", "0"]
