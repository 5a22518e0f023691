"""API keys: who is let in, what a key may do, and how tenants are kept apart."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.http_call import CALLER
from router.keys import ANYBODY, Caller, KeyEntry, KeyRing, read_key_file
from router.tokenizer import Tokenizer
from shared.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized
from tests.support.fake_generate import FakeGenerate
from tests.support.http_front import MODEL, ask, echo, make_front
from tests.support.tokenizers import write_model_folder

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
KEY_A, KEY_B = "sk-key-of-team-a", "sk-key-of-team-b"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ring(*entries: KeyEntry, clock: Clock | None = None, num_shares: int = 1) -> KeyRing:
    return KeyRing(entries, clock or Clock(), num_shares=num_shares)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write_keys(folder: Path, document: Any) -> Path:
    path = folder / "keys.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    path.chmod(0o600)
    return path


async def test_only_known_keys_are_let_in(tokenizer: Tokenizer) -> None:
    keys = ring(
        KeyEntry(name="a", key=KEY_A), KeyEntry(name="b", key_sha256=hashlib.sha256(KEY_B.encode()).hexdigest())
    )
    fake = FakeGenerate(echo(tokenizer))
    front = make_front(fake, tokenizer, keys=keys)
    basic = base64.b64encode(f"anybody:{KEY_A}".encode()).decode()
    for shown in (f"Bearer {KEY_A}", f"bearer  {KEY_B}", f"Basic {basic}"):
        assert (await ask(front, CHAT, BODY, headers={"authorization": shown})).status == 200
    num_answered = len(fake.requests)
    wrong = ["", KEY_A, f"Bearer {KEY_A}x", f"Bearer {KEY_A[:-1]}", "Bearer ", "Basic %%%", f"Token {KEY_A}"]
    wrong += ["Bearer " + "x" * 10_000, f"Bearer {KEY_A} {KEY_A}", "Bearer \xff"]
    for shown in wrong:
        answered = await ask(front, CHAT, BODY, headers={"authorization": shown})
        assert answered.error == (401, "invalid_api_key", None)
        assert answered.json["error"]["type"] == "authentication_error"
        assert answered.headers["x-should-retry"] == "false"
        assert answered.headers["www-authenticate"].splitlines() == ['Bearer realm="kvroute"', 'Basic realm="kvroute"']
        assert KEY_A not in answered.body.decode()
    assert (await ask(front, CHAT, BODY)).error == (401, "invalid_api_key", None)
    assert len(fake.requests) == num_answered


async def test_health_needs_no_key_and_all_else_does(tokenizer: Tokenizer) -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    keys = ring(KeyEntry(name="a", key=KEY_A, admin=True))
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=keys, mounts={"dashboard": page})
    for path in ("/health", "/ready", "/ping", "/version", "/openapi.json"):
        assert (await ask(front, path)).status == 200
    for path in ("/v1/models", "/v1/models/m", CHAT, "/dashboard", "/dashboard/events"):
        assert (await ask(front, path, BODY if path == CHAT else None)).status == 401
    assert (await ask(front, "/dashboard/events", headers=bearer(KEY_A))).body == b"page"


async def test_what_tells_of_all_tenants_needs_an_admins_key(tokenizer: Tokenizer) -> None:
    callers: list[Caller] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        callers.append(scope[CALLER])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"page"})

    keys = ring(KeyEntry(name="a", key=KEY_A), KeyEntry(name="b", key=KEY_B, tenant="ops", admin=True))
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=keys, mounts={"dashboard": page})
    for path in ("/dashboard", "/dashboard/snapshot.json", "/dashboard/explain", "/metrics"):
        body = {"prompt": "a"} if path.endswith("explain") else None
        assert (await ask(front, path, body)).error == (401, "invalid_api_key", None)
        refused = await ask(front, path, body, headers=bearer(KEY_A))
        assert (refused.error, refused.headers["x-should-retry"]) == ((403, "permission_denied", None), "false")
        assert refused.json["error"]["type"] == "permission_error"
        assert callers == []
        assert (await ask(front, path, body, headers=bearer(KEY_B))).status == 200
        assert [caller.name for caller in callers] == ([] if path == "/metrics" else ["b"])
        callers.clear()
    assert (await ask(front, CHAT, BODY, headers=bearer(KEY_B))).status == 200


async def test_where_all_have_one_key_it_opens_all_and_metrics_stay_open(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=KeyRing.of_one(KEY_A, Clock()))
    assert (await ask(front, "/metrics")).status == 200


def test_salt_is_the_callers_or_the_named_tenants() -> None:
    keys = ring(KeyEntry(name="a", key=KEY_A, salt="salt-of-a"), KeyEntry(name="b", key=KEY_B, admin=True))
    caller, _ = keys.identify(f"Bearer {KEY_B}".encode())
    assert keys.salt_of(caller, "own") == caller.salted("own") != "own"
    assert keys.salt_of(caller, "", "a") == "salt-of-a"
    with pytest.raises(InvalidRequest, match="no key is of 'c'"):
        keys.salt_of(caller, "", "c")
    assert KeyRing.of_one(KEY_A, Clock()).salt_of(ANYBODY, "own") == "own"


async def test_without_keys_everybody_is_let_in(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer)
    answered = await ask(front, CHAT, BODY, headers=bearer("whatever"))
    assert answered.status == 200
    assert not [name for name in answered.headers if name.startswith("x-ratelimit")]


async def test_one_key_for_all(tokenizer: Tokenizer) -> None:
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=KeyRing.of_one(KEY_A, Clock()))
    assert (await ask(front, CHAT, BODY, headers=bearer(KEY_A))).status == 200
    assert (await ask(front, CHAT, BODY, headers=bearer(KEY_B))).status == 401


async def test_rate_is_limited_for_each_key_and_told(tokenizer: Tokenizer) -> None:
    clock = Clock()
    keys = ring(KeyEntry(name="a", key=KEY_A, requests_per_minute=2), KeyEntry(name="b", key=KEY_B), clock=clock)
    front = make_front(FakeGenerate(echo(tokenizer)), tokenizer, keys=keys)
    told = []
    for _ in range(3):
        answered = await ask(front, CHAT, BODY, headers=bearer(KEY_A))
        names = ("limit", "remaining", "reset")
        told.append((answered.status, *(answered.headers[f"x-ratelimit-{name}-requests"] for name in names)))
    assert told == [(200, "2", "1", "30.000s"), (200, "2", "0", "60.000s"), (429, "2", "0", "60.000s")]
    assert answered.error == (429, "rate_limit_exceeded", None)
    assert answered.json["error"]["type"] == "rate_limit_error"
    assert (answered.headers["x-should-retry"], answered.headers["retry-after-ms"]) == ("true", "30000")
    assert (await ask(front, CHAT, BODY, headers=bearer(KEY_B))).status == 200
    clock.now_s = 30.0
    assert (await ask(front, CHAT, BODY, headers=bearer(KEY_A))).status == 200


def test_requests_at_once_are_limited_for_each_key() -> None:
    _, allowance = ring(KeyEntry(name="a", key=KEY_A, max_concurrent=2)).identify(f"Bearer {KEY_A}".encode())
    allowance.take()
    allowance.take()
    with pytest.raises(Overloaded) as caught:
        allowance.take()
    assert caught.value.retry_after_s == 1.0
    allowance.give_back()
    allowance.take()
    for _ in range(2):
        allowance.give_back()
    assert allowance.num_under_way == 0


async def test_place_of_a_request_is_free_again_however_it_ended(tokenizer: Tokenizer) -> None:
    keys = ring(KeyEntry(name="a", key=KEY_A, max_concurrent=1))
    front = make_front(FakeGenerate(echo(tokenizer), faults=[ValueError("broken")]), tokenizer, keys=keys)
    statuses = [(await ask(front, CHAT, body, headers=bearer(KEY_A))).status for body in (BODY, b"{", BODY)]
    assert statuses == [500, 400, 200]


def test_limits_are_shared_among_servers() -> None:
    entry = KeyEntry(name="a", key=KEY_A, requests_per_minute=5, max_concurrent=3)
    _, allowance = ring(entry, num_shares=2).identify(f"Bearer {KEY_A}".encode())
    assert (allowance.requests_per_minute, allowance._max_concurrent) == (3, 2)


def test_tenants_never_have_the_same_salt() -> None:
    a, b = Caller("a", "a", "salt-of-a"), Caller("b", "b", "salt-of-b")
    stolen = [a.salted("x"), a.salt, "salt-of-a\0x", "a", ""]
    salts = [a.salted(""), a.salted("x"), a.salted("y"), *(b.salted(salt) for salt in [*stolen, "x"])]
    assert len(set(salts)) == len(salts)
    assert a.salted("x") == Caller("other key", "a", "salt-of-a").salted("x")
    assert (ANYBODY.salted("x"), ANYBODY.salted("")) == ("x", "")


async def test_tenants_share_no_blocks_even_with_the_same_salt_of_their_own(tokenizer: Tokenizer) -> None:
    fake = FakeGenerate(echo(tokenizer))
    entries = [KeyEntry(name="a", key=KEY_A), KeyEntry(name="a2", key=KEY_A + "2", tenant="a")]
    front = make_front(fake, tokenizer, keys=ring(*entries, KeyEntry(name="b", key=KEY_B)))
    for key in (KEY_A, KEY_A + "2", KEY_B):
        await ask(front, CHAT, BODY, headers=bearer(key))
        await ask(front, CHAT, {**BODY, "cache_salt": "own", "user": "kim"}, headers=bearer(key))
    salts = [request.salt for request in fake.requests]
    assert salts[:2] == salts[2:4]
    assert len(set(salts)) == 4
    assert [request.tenant for request in fake.requests] == ["a", "a", "a", "a", "b", "b"]


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps])
def test_key_file_is_yaml_or_json(tmp_path: Path, write: Any) -> None:
    document = {
        "keys": [{"name": "a", "key": KEY_A, "tenant": "t", "requests_per_minute": 5}, {"name": "b", "key": KEY_B}]
    }
    entries = read_key_file(write_keys(tmp_path, write(document)))
    assert [(entry.name, entry.key, entry.tenant, entry.requests_per_minute) for entry in entries] == [
        ("a", KEY_A, "t", 5),
        ("b", KEY_B, None, None),
    ]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("keys: [", "is not YAML"),
        ([], "one list, named 'keys'"),
        ({"keys": []}, "holds no key"),
        ({"keys": {}}, "one list, named 'keys'"),
        ({"keys": [{"name": "a"}]}, "keys[0]: needs either 'key' or 'key_sha256'"),
        ({"keys": [{"name": "a", "key": KEY_A, "key_sha256": "0" * 64}]}, "keys[0]: needs either"),
        ({"keys": [{"name": "a", "key": "short"}]}, "keys[0].key: "),
        ({"keys": [{"name": "a b", "key": KEY_A}]}, "keys[0].name: "),
        ({"keys": [{"name": "a", "key": KEY_A, "rate": 1}]}, "keys[0].rate: "),
        ({"keys": [{"name": "a", "key": KEY_A, "admin": "yes"}]}, "keys[0].admin: "),
        ({"keys": [{"name": "a", "key": KEY_A, "requests_per_minute": 0}]}, "keys[0].requests_per_minute: "),
        ({"keys": [{"name": "a", "key": KEY_A}, {"name": "a", "key": KEY_B}]}, "two keys are named 'a'"),
        ({"keys": [{"name": "a", "key": KEY_A}, {"name": "b", "key": KEY_A}]}, "the key of 'b' stands there twice"),
        (
            {"keys": [{"name": "a", "key": KEY_A, "salt": "x" * 8}, {"name": "b", "key": KEY_B, "tenant": "a"}]},
            "the keys of tenant 'a' have different salts",
        ),
        (
            {"keys": [{"name": "a", "key": KEY_A, "salt": "x" * 8}, {"name": "b", "key": KEY_B, "salt": "x" * 8}]},
            "two tenants have the same salt",
        ),
    ],
)
def test_wrong_key_file_is_refused_without_showing_a_key(tmp_path: Path, document: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key_file(write_keys(tmp_path, document))
    assert told in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (KEY_A, KEY_B, "short"))


def test_key_file_that_others_can_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_keys(tmp_path, {"keys": [{"name": "a", "key": KEY_A}]})
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_key_file(path)
    assert "can be read by other users" in caplog.text
    with pytest.raises(ConfigError, match="--api-key-file: cannot read"):
        read_key_file(tmp_path / "missing")


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("router.keys.hmac.compare_digest", compare)
    keys = ring(KeyEntry(name="a", key=KEY_A), KeyEntry(name="b", key=KEY_B))
    keys.identify(f"Bearer {KEY_A}".encode())
    with pytest.raises(Unauthorized):
        keys.identify(b"Bearer wrong")
    assert len(compared) == 4
    assert {len(one) for pair in compared for one in pair} == {32}
