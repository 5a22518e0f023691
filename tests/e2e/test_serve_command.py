"""`kvroute serve` as its users run it: what it tells, how many processes answer, and how it ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.traces import read_trace
from tests.support.commands import assert_no_process_left, start_command, tagged_environment, tagged_processes

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow]

SIMULATED = ["--model", "tiny", "--engine", "simulator", "--kv-cache-blocks", "200", "--max-model-len", "4096"]


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag for one test's processes; none of them may outlive it."""
    tag = uuid.uuid4().hex
    yield tag
    assert_no_process_left(tag)


def start(tag: str, tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, list[str]]:
    """A server that listens, its port, and what it told until then."""
    process = start_command(
        "serve",
        *("--port", "0", "--run-dir", tmp_path / "run", "--files-dir", tmp_path / "files", *SIMULATED, *arguments),
        environment=tagged_environment(tag),
    )
    assert process.stderr is not None
    told: list[str] = []
    for line in process.stderr:
        told.append(line)
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)/v1", line)
        if found:
            return process, int(found[1]), told
    raise AssertionError(f"it ended with {process.wait()}: {''.join(told)}")


def ask(port: int, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    """Status and body of one answer, by a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response.status, json.loads(raw) if response.headers.get_content_type() == "application/json" else raw


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "abc", "max_tokens": 4, **fields}


def test_server_answers_and_ends_after_what_it_has_under_way(tmp_path: Path, tag: str) -> None:
    process, port, told = start(tag, tmp_path, "--api-key", "sk-the-only-one")
    assert "1 of 1 workers are ready" in "".join(told)
    assert process.stderr is not None
    next_steps = [process.stderr.readline() for _ in range(2)]
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Authorization: Bearer KEY' " in next_steps[1]
    assert ask(port, "/v1/completions", completion(), "sk-the-only-one")[0] == 200
    assert ask(port, "/v1/completions", completion(), "sk-another-one")[0] == 401
    assert ask(port, "/ready")[0] == 200

    streaming = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)
    body = completion(max_tokens=60, stream=True, ignore_eos=True)
    headers = {"content-type": "application/json", "authorization": "Bearer sk-the-only-one"}
    streaming.request("POST", "/v1/completions", json.dumps(body), headers)
    response = streaming.getresponse()
    response.readline()
    process.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    streaming.close()
    _, stderr = process.communicate(timeout=240.0)
    assert (process.returncode, stderr.splitlines()[-1]) == (0, "kvroute: stopped")


def test_several_processes_share_the_port_and_a_killed_one_comes_back(tmp_path: Path, tag: str) -> None:
    process, port, _ = start(tag, tmp_path, "--routers", "2", "--request-log", str(tmp_path / "log.jsonl"))

    def routers_with_requests() -> set[str]:
        text = ask(port, "/metrics")[1].decode()
        return set(re.findall(r'^kvroute_requests_total\{router="(\d)",outcome="ok"', text, re.MULTILINE))

    def ask_until_both_have_answered() -> None:
        for _ in range(2000):
            assert ask(port, "/v1/completions", completion())[0] == 200
            if routers_with_requests() == {"0", "1"}:
                return
        raise AssertionError("one process gets no connection")

    ask_until_both_have_answered()
    view: Any = {"routers": []}
    while len(view["routers"]) < 2:
        # One that is too busy to answer the other in time is left out.
        view = ask(port, "/dashboard/snapshot.json")[1]
    counts = [router["num_requests"] for router in view["routers"]]
    assert min(counts) > 0
    assert view["num_requests"] == sum(counts)
    assert {decision["router"] for decision in view["decisions"]} <= {router["router"] for router in view["routers"]}
    (child,) = [one for one in tagged_processes(tag) if "router.serve_child" in one.cmdline()]
    child.kill()
    assert process.stderr is not None
    assert any("is started again" in line for line in process.stderr)
    # Only the new one can count from nothing again: its predecessor's figures are gone with it.
    ask_until_both_have_answered()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240.0)
    assert process.returncode == 130
    logs = [(tmp_path / name).read_bytes() for name in ("log.jsonl", "log.1.jsonl")]
    assert all(logs)
    (tmp_path / "both.jsonl").write_bytes(b"".join(logs))
    assert len(list(read_trace(tmp_path / "both.jsonl"))) == b"".join(logs).count(b"\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--api-key-file", "missing.yaml"], "--api-key-file: cannot read missing.yaml"),
        (["--routers", "0"], "--routers 0: not a number of processes from 1 to 64"),
        (["--port", "70000"], "--port"),
        (["--files-dir", "/dev/null/files"], "--files-dir: cannot write /dev/null/files: Not a directory"),
        (["--request-log", "/dev/null/log"], "--request-log: cannot write /dev/null/log: Not a directory"),
        (["--host", "203.0.113.1"], "--host, --port: cannot listen on 203.0.113.1"),
    ],
)
def test_wrong_arguments_stop_it_before_anything_is_started(
    tmp_path: Path, tag: str, arguments: list[str], told: str
) -> None:
    process = start_command("serve", *SIMULATED, "--run-dir", tmp_path, *arguments, environment=tagged_environment(tag))
    stdout, stderr = process.communicate(timeout=120.0)
    assert (process.returncode, stdout) == (2, "")
    assert told in stderr
    assert "starting" not in stderr
