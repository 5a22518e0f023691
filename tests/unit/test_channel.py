"""Addresses, bounds and closing of channels."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from shared import errors
from shared.errors import ConfigError, ProtocolError
from shared.transport.channel import STRANGER_LIMIT_BYTES, SilenceGuard, SocketChannel, local_pair, parse_address
from shared.transport.client import connect_worker
from shared.transport.faults import error_of, fault_of
from shared.transport.listener import Listener
from shared.types import RouterId
from shared.vtime import run_virtual
from tests.support.stores import worker_info


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("unix:/run/w1.sock", Path("/run/w1.sock")),
        ("tcp://10.0.0.7:81", ("10.0.0.7", 81)),
        ("tcp://:0", ("127.0.0.1", 0)),
        ("tcp://[::1]:81", ("::1", 81)),
    ],
)
def test_addresses_have_two_forms(address: str, target: Path | tuple[str, int]) -> None:
    assert parse_address(address) == target


@pytest.mark.parametrize("address", ["unix:/a\0b", f"tcp://{'x' * 64}:1", "tcp://a..b:1", "http://h:1", "unix:/none"])
async def test_worker_at_an_address_that_is_none_is_lost_as_any_other(address: str) -> None:
    info = replace(worker_info("w1"), address=address)
    client = connect_worker(info, RouterId("r"), b"secret", rng=random.Random(0))
    with pytest.raises(errors.WorkerLost, match="cannot be reached"):
        await client.connect()
    await client.close()


@pytest.mark.parametrize(
    "address", ["", "unix:", "unix:relative", "unix://host/path", "tcp://h", "tcp://h:x", "http://h:1", "tcp://h:70000"]
)
def test_other_addresses_are_named_in_the_error(address: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(address)
    assert repr(address) in str(refused.value)


async def test_a_socket_takes_messages_at_once_while_it_has_room_and_in_order() -> None:
    one, other = socket.socketpair()
    ours = SocketChannel(*await asyncio.open_connection(sock=one))
    theirs = SocketChannel(*await asyncio.open_connection(sock=other))
    theirs.receive_limit_bytes = 1 << 24
    assert ours.send_now(b"a")
    assert await theirs.receive() == b"a"
    large = bytes(1 << 23)
    assert ours.send_now(large)
    assert not ours.send_now(b"b")
    sending = asyncio.create_task(ours.send(b"c"))
    assert await theirs.receive() == large
    assert await theirs.receive() == b"c"
    await sending
    ours.close()
    assert not ours.send_now(b"d")
    theirs.close()


async def test_a_local_channel_holds_a_sender_back_until_its_peer_reads() -> None:
    ours, theirs = local_pair(capacity_bytes=10)
    await ours.send(b"a" * 100)  # into an empty pipe goes any message
    blocked = asyncio.create_task(ours.send(b"b"))
    await asyncio.sleep(0)
    assert not blocked.done()
    assert await theirs.receive() == b"a" * 100
    await blocked
    assert await theirs.receive() == b"b"


async def test_closing_a_local_channel_still_gives_out_what_was_sent() -> None:
    ours, theirs = local_pair()
    waiting = asyncio.create_task(ours.receive())
    await theirs.send(b"last")
    await ours.send(b"word")
    assert await waiting == b"last"
    ours.close()
    assert await theirs.receive() == b"word"
    for call in (ours.receive(), theirs.receive(), ours.send(b""), theirs.send(b"")):
        with pytest.raises(ConnectionError):
            await call


async def test_a_stranger_cannot_send_much() -> None:
    ours, theirs = local_pair()
    await theirs.send(bytes(STRANGER_LIMIT_BYTES))
    await theirs.send(bytes(STRANGER_LIMIT_BYTES + 1))
    assert len(await ours.receive()) == STRANGER_LIMIT_BYTES
    with pytest.raises(ProtocolError, match="limit"):
        await ours.receive()


async def test_large_messages_pass_a_socket_whole_and_without_delay() -> None:
    served: asyncio.Queue[SocketChannel] = asyncio.Queue()
    listener = await Listener.open("tcp://:0", served.put_nowait)
    assert listener.address.startswith("tcp://127.0.0.1:")
    reader, writer = await asyncio.open_connection(*parse_address(listener.address))
    assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    ours, theirs = SocketChannel(reader, writer), await served.get()
    theirs.receive_limit_bytes = 5 << 20
    raw = bytes(range(256)) * (4 << 12)
    _, received = await asyncio.gather(ours.send(raw), theirs.receive())
    assert received == raw
    ours.close()
    with pytest.raises(ConnectionError):
        await theirs.receive()
    theirs.close()
    listener.close()


async def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    served: asyncio.Queue[SocketChannel] = asyncio.Queue()
    listener = await Listener.open(f"unix:{path}", served.put_nowait)
    _, writer = await asyncio.open_unix_connection(path)
    (await served.get()).close()
    writer.close()
    listener.close()


def test_a_silent_peer_is_cut_off_after_its_time() -> None:
    async def scenario() -> float:
        ours, theirs = local_pair()
        guard = SilenceGuard(ours, 10.0)
        await asyncio.sleep(7)
        guard.heard()
        with pytest.raises(ConnectionError):
            await theirs.receive()
        return asyncio.get_running_loop().time()

    assert run_virtual(scenario()) == pytest.approx(17.0, abs=1e-3)


def test_errors_keep_their_class_over_the_wire() -> None:
    told = [
        errors.InvalidRequest("a"),
        errors.ContextTooLong("b"),
        errors.ModelNotFound("c"),
        errors.Overloaded("d", retry_after_s=2.5),
        errors.WorkerLost("e"),
        errors.EngineError("f"),
    ]
    heard = [error_of(fault_of(error)) for error in told]
    assert [(type(error), str(error)) for error in heard] == [(type(error), str(error)) for error in told]
    assert isinstance(heard[3], errors.Overloaded)
    assert heard[3].retry_after_s == 2.5
    unknown = error_of(fault_of(errors.ConfigError("g")))
    assert (type(unknown), str(unknown)) == (errors.EngineError, "invalid_configuration: g")


def test_fault_is_short_whatever_the_engine_quotes() -> None:
    assert error_of(fault_of(errors.InvalidRequest("x", param="tools[0]"))).param == "tools[0]"  # type: ignore[attr-defined]
    assert fault_of(errors.InvalidRequest("x", param="\udcff" * 9999)).param == ("\\udcff" * 9999)[:2000]
    assert fault_of(errors.InvalidRequest("x" * 100_000_000)).message == "x" * 2000 + "..."
