"""How to reach an engine behind a server that somebody else runs, and what such a server does not tell of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.types import CacheScheme, WorkerId

_MAX_RANKS = 256
_MAX_KEY_BYTES = 4096
_GRAMMAR = (
    "URL[,events=ENDPOINT][,replay=ENDPOINT][,topic=TEXT][,ranks=N][,max-num-seqs=N][,max-num-batched-tokens=N]"
    "[,api-key-file=FILE]"
)


@dataclass(frozen=True, slots=True)
class AttachedServer:
    """One engine behind one server: the whole server, or one of its data-parallel ranks."""

    url: str
    """Without a slash at its end, and without `/v1`."""
    events: str | None = None
    """Where it publishes KV events; None where it publishes none."""
    replay: str | None = None
    """Where it sends events again that were lost; None where it does not."""
    topic: str = ""
    """Beginning of the topics to listen to."""
    rank: int | None = None
    """None where the server has one engine."""
    max_num_seqs: int = 256
    """vLLM's default for a server. It tells nobody of its own."""
    max_num_batched_tokens: int = 2048
    """The same of the prompt tokens that one step takes."""
    api_key: str = field(default="", repr=False)

    @property
    def worker(self) -> WorkerId:
        """The name that routers know it by: `host:port`, and the rank if there are several."""
        parts = urlsplit(self.url)
        return WorkerId(f"{parts.netloc}{parts.path}{'' if self.rank is None else f'#{self.rank}'}")


@dataclass(frozen=True, slots=True)
class ParityProbe:
    """A text and its tokens by the router's tokenizer: a server that makes others of it would answer other prompts."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttachedOptions:
    """One attached engine, and what the router has agreed on with all of them."""

    server: AttachedServer
    scheme: CacheScheme
    model: str
    """The name that the server knows the model by."""
    probe: ParityProbe | None = None
    poll_s: float = 1.0
    """Time between two looks at the server's health and load."""
    timeout_s: float = 5.0
    """Longest wait for an answer that the server has at hand."""
    num_missed: int = 3
    """Looks in a row without an answer after which the server is lost. A refused connection counts as all of them."""
    events_timeout_s: float = 5.0
    """Longest wait for the publisher of its events, at the start and after a break."""
    quiet_s: float = 5.0
    """Time without events after which it is asked whether some were lost."""


def parse_servers(texts: tuple[str, ...], api_key: str = "") -> list[AttachedServer]:
    """The engines that the values of `--attach` name, each rank by itself. Reads the files of keys.

    `api_key` is for the servers that name no file. Raises `ConfigError` naming what is wrong; never shows a key.
    """
    servers = [server for text in texts for server in _parse_server(text, api_key)]
    names = [server.worker for server in servers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--attach: {', '.join(twice)}: given twice")
    return servers


def _parse_server(text: str, api_key: str) -> list[AttachedServer]:
    url, *words = text.split(",")
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in _CHECKS or not equals or not value:
            raise ConfigError(f"--attach {_shown(text)}: {name or word!r} is not understood; it takes {_GRAMMAR}")
        if name in values:
            raise ConfigError(f"--attach {_shown(text)}: {name} is given twice")
        try:
            values[name] = _CHECKS[name](value)
        except ValueError as error:
            raise ConfigError(f"--attach {_shown(text)}: {name}={value}: {error}") from None
    for name in ("replay", "topic"):
        if name in values and "events" not in values:
            raise ConfigError(f"--attach {_shown(text)}: {name} is of no use without events")
    num_ranks = values.pop("ranks", 1)
    server = AttachedServer(
        url=_checked_url(url, text),
        api_key=values.pop("api-key-file", api_key),
        **{name.replace("-", "_"): value for name, value in values.items()},
    )
    if num_ranks == 1:
        return [server]
    try:
        return [_rank_of(server, rank) for rank in range(num_ranks)]
    except ValueError as error:
        raise ConfigError(f"--attach {_shown(text)}: ranks={num_ranks}: {error}") from None


def _shown(text: str) -> str:
    """The value as an error may show it: without what stands before the host."""
    scheme, separator, rest = text.partition("://")
    credentials, at, host = rest.partition("@")
    return f"{scheme}{separator}***@{host}" if at and "," not in credentials else text


def _checked_url(url: str, text: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--attach {_shown(text)}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(
            f"--attach {_shown(text)}: not the address of a server, as http://host:8000; it takes {_GRAMMAR}"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"--attach {_shown(text)}: keys do not belong into a URL; name a file with api-key-file=FILE")
    path = parts.path.rstrip("/")
    if parts.query or parts.fragment or path.endswith("/v1"):
        raise ConfigError(f"--attach {_shown(text)}: give the server's own address, without /v1 or anything behind it")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _endpoint(value: str) -> str:
    """An address to connect to, in ZMQ's form."""
    parts = urlsplit(value)
    if parts.scheme == "ipc" and (parts.netloc or parts.path):
        return value
    if parts.scheme == "tcp" and parts.hostname == "*":
        raise ValueError("* is for the server, which listens everywhere; name its host")
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or parts.path:
        raise ValueError("not an endpoint as tcp://host:5557 or ipc:///path")
    return value


def _count(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 1 <= int(value) <= 1 << 24:
        raise ValueError("not a number of 1 or more")
    return int(value)


def _num_ranks(value: str) -> int:
    if (number := _count(value)) > _MAX_RANKS:
        raise ValueError(f"more than {_MAX_RANKS}")
    return number


def _key_in(value: str) -> str:
    """The key in a file: its one line."""
    path = Path(value).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    key = raw.strip().decode("ascii", errors="replace")
    if len(raw) > _MAX_KEY_BYTES or not key or not key.isprintable() or not key.isascii():
        raise ValueError("holds no key: one line of printable ASCII")
    return key


_CHECKS: Mapping[str, Callable[[str], Any]] = {
    "events": _endpoint,
    "replay": _endpoint,
    "topic": str,
    "ranks": _num_ranks,
    "max-num-seqs": _count,
    "max-num-batched-tokens": _count,
    "api-key-file": _key_in,
}


def _rank_of(server: AttachedServer, rank: int) -> AttachedServer:
    return replace(server, rank=rank, events=_moved(server.events, rank), replay=_moved(server.replay, rank))


def _moved(endpoint: str | None, rank: int) -> str | None:
    """Where a rank publishes if rank 0 does here: a rank's port is so much higher (vLLM's `offset_endpoint_port`)."""
    if endpoint is None or rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"{endpoint}: ranks publish at ports of their own, as tcp://host:5557 and the next")
    base, _, port = endpoint.rpartition(":")
    if int(port) + rank > 0xFFFF:
        raise ValueError(f"{endpoint}: rank {rank} would have a port over 65535")
    return f"{base}:{int(port) + rank}"
