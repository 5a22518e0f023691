"""The handshake: both sides prove that they know the shared secret before anything else is said.

    worker -> router   Challenge   the worker's nonce
    router -> worker   Hello       the router's nonce, its session, and its proof
    worker -> router   Welcome     the worker's proof, or Refused

A proof is HMAC-SHA256 over the side's role, both nonces and all that the side says of itself, so it can be neither
replayed nor reflected nor moved to another session. The secret itself is never sent and never logged.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import TypeVar

from shared import __version__
from shared.errors import AuthenticationFailed, ProtocolError, WorkerLost
from shared.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Refused,
    Welcome,
    decode,
    encode,
    protocol_of,
)
from shared.transport.base import Channel
from shared.types import Instance, RouterId, WorkerId
from shared.wire import MAX_MESSAGE_BYTES

SESSION_BYTES = 16
_NONCE_BYTES = 32

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Greeting:
    """A router that has proved itself and waits for its welcome."""

    challenge: Challenge
    hello: Hello


async def receive_hello(channel: Channel, secret: bytes) -> Greeting:
    """The worker's first half: challenge the peer and check its proof.

    Raises `ProtocolError` or `AuthenticationFailed`, in which case the peer is to be told with `refuse`.
    """
    challenge = Challenge(secrets.token_bytes(_NONCE_BYTES))
    await channel.send(encode(challenge))
    raw = await channel.receive()
    protocol = protocol_of(raw)
    if protocol not in (None, PROTOCOL_VERSION):
        raise ProtocolError(
            f"the router speaks protocol {protocol}, this worker (kvroute {__version__}) protocol {PROTOCOL_VERSION}; "
            "bring the older one to the newer one's version"
        )
    hello = decode(raw)
    if not isinstance(hello, Hello):
        raise ProtocolError("the first message is no hello")
    if len(hello.session) != SESSION_BYTES or len(hello.nonce) != _NONCE_BYTES or not 0 <= hello.last_frame < 1 << 63:
        raise ProtocolError("hello: a field is out of range")
    if not hmac.compare_digest(hello.proof, _router_proof(secret, challenge, hello)):
        raise AuthenticationFailed("the router does not know this fleet's secret")
    channel.receive_limit_bytes = MAX_MESSAGE_BYTES
    return Greeting(challenge, hello)


async def send_welcome(
    channel: Channel,
    secret: bytes,
    greeting: Greeting,
    worker: WorkerId,
    instance: Instance,
    *,
    is_resumed: bool,
    last_submit: int,
) -> None:
    """The worker's second half: prove itself and say where the session stands."""
    proof = _worker_proof(secret, greeting.challenge, greeting.hello, worker, instance)
    await channel.send(encode(Welcome(worker, instance, proof, is_resumed, last_submit)))


async def refuse(channel: Channel, code: str, message: str) -> None:
    """Say why, as far as the peer still listens, and close."""
    try:
        await channel.send(encode(Refused(code, message)))
    except ConnectionError:
        pass
    finally:
        channel.close()


async def greet_worker(channel: Channel, secret: bytes, router: RouterId, session: bytes, last_frame: int) -> Welcome:
    """The router's whole part.

    Raises `AuthenticationFailed` when either side does not know the other's secret, `WorkerLost` when the worker
    refuses for another reason, and `ProtocolError` or `ConnectionError`.
    """
    challenge = _answer(await channel.receive(), Challenge)
    if len(challenge.nonce) != _NONCE_BYTES:
        raise ProtocolError("challenge: a field is out of range")
    unproved = Hello(PROTOCOL_VERSION, router, session, secrets.token_bytes(_NONCE_BYTES), b"", last_frame)
    proof = _router_proof(secret, challenge, unproved)
    hello = Hello(PROTOCOL_VERSION, router, session, unproved.nonce, proof, last_frame)
    await channel.send(encode(hello))
    welcome = _answer(await channel.receive(), Welcome)
    if not hmac.compare_digest(
        welcome.proof, _worker_proof(secret, challenge, hello, welcome.worker, welcome.instance)
    ):
        raise AuthenticationFailed("the worker does not know this fleet's secret")
    channel.receive_limit_bytes = MAX_MESSAGE_BYTES
    return welcome


def _answer(raw: bytes, wanted: type[Answer]) -> Answer:
    message = decode(raw)
    if isinstance(message, Refused):
        if message.code == AuthenticationFailed.code:
            raise AuthenticationFailed(message.message)
        raise WorkerLost(f"the worker refused the connection: {message.message}")
    if not isinstance(message, wanted):
        raise ProtocolError(f"{type(message).__name__} instead of {wanted.__name__}")
    return message


def _router_proof(secret: bytes, challenge: Challenge, hello: Hello) -> bytes:
    return _proof(
        secret, b"router", challenge, hello, hello.protocol.to_bytes(8, "big"), hello.last_frame.to_bytes(8, "big")
    )


def _worker_proof(secret: bytes, challenge: Challenge, hello: Hello, worker: WorkerId, instance: Instance) -> bytes:
    return _proof(secret, b"worker", challenge, hello, worker.encode(), instance.encode())


def _proof(secret: bytes, role: bytes, challenge: Challenge, hello: Hello, *claims: bytes) -> bytes:
    """Each field goes in with its length, so that no two different field lists give the same bytes."""
    fields = (role, challenge.nonce, hello.nonce, hello.router.encode(), hello.session, *claims)
    return hmac.digest(secret, b"".join(len(field).to_bytes(4, "big") + field for field in fields), "sha256")
