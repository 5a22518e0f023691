"""API keys: who a caller is, and how much of the service is theirs. Keys are kept as hashes only."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.fields import brief
from shared.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized

logger = logging.getLogger(__name__)

_MAX_KEY_BYTES = 1024
_MAX_FILE_BYTES = 4 << 20
_NAME = r"^[A-Za-z0-9._-]{1,64}$"
_BUSY_RETRY_S = 1.0
"""When to come back after too many requests at once: nobody knows when one of them ends."""


class KeyEntry(BaseModel):
    """One key of a key file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=_NAME)]
    key: Annotated[str, Field(min_length=8, max_length=_MAX_KEY_BYTES)] | None = None
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """In place of the key itself: the hash of its UTF-8 bytes, in hex."""
    tenant: Annotated[str, Field(pattern=_NAME)] | None = None
    """Keys of one tenant share blocks; the default is the key's name."""
    salt: Annotated[str, Field(min_length=8, max_length=256)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    max_concurrent: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    admin: bool = False
    """Whether it also opens what tells of all tenants: the dashboard, what it explains, and metrics."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256) if self.key_sha256 else hashlib.sha256((self.key or "").encode()).digest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key belongs to."""

    name: str = ""
    tenant: str = ""
    salt: str = ""
    is_admin: bool = False
    """Whether it may see what all tenants do."""

    def salted(self, cache_salt: str) -> str:
        """The salt of a request: equal only for equal tenants and equal salts of their own.

        A tenant's bare salt is that of its requests without one, so that an operator can warm prompts up for it.
        """
        if not self.salt or not cache_salt:
            return self.salt or cache_salt
        key = hashlib.sha256(self.salt.encode()).digest()
        return hashlib.blake2b(cache_salt.encode(), key=key, digest_size=16).hexdigest()


ANYBODY = Caller(is_admin=True)
"""Where no key is asked for, or one key is for all: there are no tenants then to keep anything from."""


class Allowance:
    """What one key may still do: a bucket of requests that fills steadily, and places for those under way."""

    def __init__(self, requests_per_minute: int | None, max_concurrent: int | None, clock: Callable[[], float]) -> None:
        self.requests_per_minute = requests_per_minute
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._num_left = float(requests_per_minute or 0)
        self._counted_at_s = clock()
        self.num_under_way = 0

    def take(self) -> None:
        """Begin one request, which is to be given back. Modifies. Raises `Overloaded`, with the time to come back."""
        if self._max_concurrent is not None and self.num_under_way >= self._max_concurrent:
            raise Overloaded(
                f"this key has {self.num_under_way} requests under way, which is its limit", retry_after_s=_BUSY_RETRY_S
            )
        if self.requests_per_minute is not None:
            self._refill()
            if self._num_left < 1.0:
                raise Overloaded(
                    f"this key is limited to {self.requests_per_minute} requests a minute",
                    retry_after_s=(1.0 - self._num_left) * 60.0 / self.requests_per_minute,
                )
            self._num_left -= 1.0
        self.num_under_way += 1

    def give_back(self) -> None:
        """End one request. Modifies."""
        self.num_under_way -= 1

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers on the rate; none where there is no limit."""
        if self.requests_per_minute is None:
            return []
        self._refill()
        reset_s = (self.requests_per_minute - self._num_left) * 60.0 / self.requests_per_minute
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.requests_per_minute),
            (b"x-ratelimit-remaining-requests", b"%d" % math.floor(self._num_left)),
            (b"x-ratelimit-reset-requests", b"%.3fs" % reset_s),
        ]

    def _refill(self) -> None:
        now_s = self._clock()
        limit = self.requests_per_minute or 0
        self._num_left = min(float(limit), self._num_left + (now_s - self._counted_at_s) * limit / 60.0)
        self._counted_at_s = now_s


UNLIMITED = Allowance(None, None, lambda: 0.0)
"""Where there is nothing to count."""


@dataclass(frozen=True, slots=True)
class _Held:
    digest: bytes
    caller: Caller
    allowance: Allowance


class KeyRing:
    """Owns all keys and what each may still do. Without keys everybody may do everything."""

    def __init__(self, entries: Sequence[KeyEntry], clock: Callable[[], float], *, num_shares: int = 1) -> None:
        """With `num_shares`, this is one of so many servers that share each limit evenly."""
        self._held = [
            _Held(
                entry.digest,
                Caller(entry.name, entry.tenant or entry.name, _salt_of(entry), entry.admin),
                Allowance(
                    _share(entry.requests_per_minute, num_shares), _share(entry.max_concurrent, num_shares), clock
                ),
            )
            for entry in entries
        ]

    @classmethod
    def of_one(cls, key: str, clock: Callable[[], float]) -> KeyRing:
        """A ring with one key that all callers share, or with none where it is empty."""
        ring = cls([], clock)
        if key:
            ring._held.append(_Held(hashlib.sha256(key.encode()).digest(), ANYBODY, UNLIMITED))
        return ring

    @property
    def has_tenants(self) -> bool:
        """Whether there are callers that must not learn of each other."""
        return any(not held.caller.is_admin for held in self._held)

    def caller_of(self, tenant: str) -> Caller | None:
        """Whom requests of a tenant come from; `None` where none of its keys is there any more."""
        callers = [held.caller for held in self._held] or [ANYBODY]
        return next((caller for caller in callers if caller.tenant == tenant), None)

    def salt_of(self, caller: Caller, cache_salt: str, tenant: str = "") -> str:
        """The salt of a request of `caller`, or of `tenant` where one is named.

        Raises:
            InvalidRequest: no key is of that tenant.
        """
        asker = self.caller_of(tenant) if tenant else caller
        if asker is None:
            raise InvalidRequest(f"Invalid 'tenant': no key is of {brief(tenant)}.", param="tenant")
        return asker.salted(cache_salt)

    def identify(self, authorization: bytes | None) -> tuple[Caller, Allowance]:
        """Whose key an `authorization` header shows: as a bearer's token, or as a password, as browsers show it.

        Raises:
            Unauthorized: none, or one that is not known. Takes the same time however much of a key is right.
        """
        if not self._held:
            return ANYBODY, UNLIMITED
        shown = _shown_key(authorization)
        if shown is None:
            raise Unauthorized("You didn't provide an API key: send it as 'Authorization: Bearer KEY'.")
        digest = hashlib.sha256(shown).digest()
        found: _Held | None = None
        for held in self._held:
            if hmac.compare_digest(held.digest, digest):
                found = held
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return found.caller, found.allowance


def read_key_file(path: Path) -> list[KeyEntry]:
    """The keys of a file: YAML or JSON with a list under `keys`.

    Raises:
        ConfigError: it cannot be read, or an entry is wrong; names the entry, and never shows a key.
    """
    try:
        if path.stat().st_mode & 0o077:
            logger.warning("--api-key-file: %s can be read by other users than its owner", path)
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file: {path} is over the limit of {_MAX_FILE_BYTES} bytes")
    try:
        document: Any = yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError, RecursionError):
        # What a parser says of the place may show a key.
        raise ConfigError(f"--api-key-file: {path} is not YAML") from None
    if not isinstance(document, Mapping) or set(document) != {"keys"} or not isinstance(document["keys"], list):
        raise ConfigError(f"--api-key-file: {path} must hold one list, named 'keys'")
    entries = [_entry(item, f"--api-key-file: {path}: keys[{index}]") for index, item in enumerate(document["keys"])]
    if not entries:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    _check_together(entries, path)
    return entries


def _entry(item: Any, where: str) -> KeyEntry:
    try:
        entry = KeyEntry.model_validate(item, strict=True)
    except ValidationError as error:
        detail = error.errors(include_input=False, include_url=False)[0]
        name = ".".join(str(part) for part in detail["loc"])
        raise ConfigError(f"{where}{'.' if name else ''}{name}: {detail['msg']}") from None
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"{where}: needs either 'key' or 'key_sha256'")
    return entry


def _check_together(entries: Sequence[KeyEntry], path: Path) -> None:
    """Raise where entries contradict each other."""
    names: set[str] = set()
    digests: set[bytes] = set()
    tenant_to_salt: dict[str, str] = {}
    for entry in entries:
        if entry.name in names:
            raise ConfigError(f"--api-key-file: {path}: two keys are named {entry.name!r}")
        if entry.digest in digests:
            raise ConfigError(f"--api-key-file: {path}: the key of {entry.name!r} stands there twice")
        tenant, salt = entry.tenant or entry.name, _salt_of(entry)
        if tenant_to_salt.setdefault(tenant, salt) != salt:
            raise ConfigError(f"--api-key-file: {path}: the keys of tenant {tenant!r} have different salts")
        names.add(entry.name)
        digests.add(entry.digest)
    if len(set(tenant_to_salt.values())) < len(tenant_to_salt):
        raise ConfigError(f"--api-key-file: {path}: two tenants have the same salt, and would share blocks")


def _salt_of(entry: KeyEntry) -> str:
    return entry.salt or hashlib.sha256(f"kvroute tenant {entry.tenant or entry.name}".encode()).hexdigest()[:32]


def _share(limit: int | None, num_shares: int) -> int | None:
    return None if limit is None else -(-limit // num_shares)


def _shown_key(authorization: bytes | None) -> bytes | None:
    found = re.fullmatch(rb"(?i:(bearer|basic)) +(\S+)", authorization or b"")
    if found is None or len(found[2]) > 2 * _MAX_KEY_BYTES:
        return None
    if found[1].lower() == b"bearer":
        return found[2]
    try:
        return base64.b64decode(found[2], validate=True).partition(b":")[2]
    except binascii.Error:
        return None
