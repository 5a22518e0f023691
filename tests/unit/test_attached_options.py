"""The values of `--attach`: what they mean, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import Settings, load_settings
from shared.errors import ConfigError
from worker.engines.attached_options import AttachedServer, parse_servers


def test_a_url_alone_is_a_server_without_events():
    assert parse_servers(("http://10.0.0.1:8001/",)) == [AttachedServer("http://10.0.0.1:8001")]


def test_every_option():
    text = (
        "https://llm.example/base,events=tcp://llm.example:5557,replay=ipc:///run/replay,topic=kv@,"
        "max-num-seqs=64,max-num-batched-tokens=8192"
    )
    (server,) = parse_servers((text,))
    assert server == AttachedServer(
        "https://llm.example/base",
        events="tcp://llm.example:5557",
        replay="ipc:///run/replay",
        topic="kv@",
        max_num_seqs=64,
        max_num_batched_tokens=8192,
    )
    assert server.worker == "llm.example/base"


def test_ranks_are_workers_of_their_own_with_ports_of_their_own():
    servers = parse_servers(("http://h:8000,events=tcp://h:5557,replay=tcp://h:6557,ranks=3",))
    assert [(server.worker, server.rank, server.events, server.replay) for server in servers] == [
        ("h:8000#0", 0, "tcp://h:5557", "tcp://h:6557"),
        ("h:8000#1", 1, "tcp://h:5558", "tcp://h:6558"),
        ("h:8000#2", 2, "tcp://h:5559", "tcp://h:6559"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1:8001", "--attach 10.0.0.1:8001: not the address of a server, as http://host:8000; it takes URL"),
        ("ftp://h:1", "not the address of a server"),
        ("http://", "not the address of a server"),
        ("http://h:99999", "Port out of range"),
        ("http://h:8000/v1", "give the server's own address, without /v1"),
        ("http://h:8000?x=1", "give the server's own address"),
        ("http://h:8000,event=tcp://h:1", "'event' is not understood; it takes URL"),
        ("http://h:8000,events", "'events' is not understood"),
        ("http://h:8000,events=", "'events' is not understood"),
        ("http://h:8000,events=tcp://h:1,events=tcp://h:2", "events is given twice"),
        ("http://h:8000,events=tcp://*:5557", r"events=tcp://\*:5557: \* is for the server"),
        ("http://h:8000,events=tcp://h", "events=tcp://h: not an endpoint as tcp://host:5557"),
        ("http://h:8000,events=5557", "not an endpoint"),
        ("http://h:8000,replay=tcp://h:1", "replay is of no use without events"),
        ("http://h:8000,ranks=0", "ranks=0: not a number of 1 or more"),
        ("http://h:8000,ranks=2000", "ranks=2000: more than 256"),
        ("http://h:8000,events=ipc:///e,ranks=2", "ranks publish at ports of their own"),
        ("http://h:8000,events=tcp://h:65535,ranks=2", "rank 1 would have a port over 65535"),
        ("http://h:8000,max-num-seqs=many", "max-num-seqs=many: not a number"),
        ("http://h:8000,api-key-file=/nowhere/key", "api-key-file=/nowhere/key: cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_told_by_name(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_servers((text,))


def test_a_server_given_twice_is_refused():
    with pytest.raises(ConfigError, match="--attach: h:1: given twice"):
        parse_servers(("http://h:1", "http://h:2", "http://h:1/"))


def test_a_key_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="name a file with api-key-file") as refused:
        parse_servers(("http://user:hunter2@h:1",))
    assert "hunter2" not in str(refused.value)


def test_keys_come_from_a_servers_own_file_or_from_the_settings_and_show_nowhere(tmp_path: Path):
    (tmp_path / "key").write_text("sk-own\n")
    own, other = parse_servers((f"http://h:1,api-key-file={tmp_path}/key", "http://h:2"), "sk-common")
    assert (own.api_key, other.api_key) == ("sk-own", "sk-common")
    settings = load_settings(flags={}, environment={"KVROUTE_ATTACH_API_KEY": "sk-common"})
    assert settings.attach_api_key.get_secret_value() == "sk-common"
    assert "sk-" not in f"{own!r} {other!r} {settings!r} {settings.model_dump(mode='json')}"


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "k" * 5000, "schlüssel"])
def test_a_file_that_holds_no_key_is_refused_and_not_repeated(tmp_path: Path, content: str):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="holds no key: one line of printable ASCII") as refused:
        parse_servers((f"http://h:1,api-key-file={tmp_path}/key",))
    assert not content.strip() or content not in str(refused.value)


def test_the_environment_holds_servers_with_blanks_between_them():
    settings = load_settings(flags={}, environment={"KVROUTE_ATTACH": "http://h:1,ranks=2 http://h:2"})
    assert settings.attach == ("http://h:1,ranks=2", "http://h:2")
    assert Settings().attach == ()
