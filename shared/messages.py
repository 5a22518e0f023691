"""What routers and workers say to each other.

A message is `[kind, field, field, ...]` in msgpack. Nothing past this module sees bytes of a stranger.

Routers and workers of one `PROTOCOL_VERSION` understand each other, whichever is older. So what is added within a
version is a trailing field, whose default is what a peer that does not know it goes by. All else takes another version:
a field that a peer must know, a field that changes or goes, another value of an enumeration, and another kind, but for
one that is only sent to who has asked for it. Of all versions are `Challenge`, `Refused` and the first field of
`Hello`, so that a peer of another version can be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.errors import ProtocolError
from shared.types import Epoch, FinishReason, Instance, RequestId, RouterId, Sampling, WorkerId, WorkerStatus
from shared.wire import fields_of, from_fields, pack, unpack

PROTOCOL_VERSION = 2
"""Version 1 knew neither forms of answers nor more than their tokens, and took no field that it did not know."""
MAX_KEYS_PER_PART = 4096
"""Most keys in one `ResidentKeys`: frames of tokens pass in between."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """Worker to router, first on a connection."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """Router to worker: proves the secret over the worker's nonce and asks for its own to be answered."""

    protocol: int
    router: RouterId
    session: bytes
    """16 random bytes, constant while the router wants to resume what it had under way."""
    nonce: bytes
    proof: bytes
    last_frame: int
    """Last frame of this session that arrived; 0 on a new session."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Worker to router: the connection stands."""

    worker: WorkerId
    instance: Instance
    proof: bytes
    is_resumed: bool
    """Whether the session's requests are still alive; if not, the router has lost what was under way."""
    last_submit: int
    """Last submit of this session that arrived; the router sends later ones again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Either side, before it closes: why."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Router to worker: compute one sequence."""

    number: int
    """Counts submits of one session from 1."""
    request: RequestId
    attempt: int
    token_ids: bytes
    """Prompt, as `hashing.pack_tokens` gives it."""
    sampling: Sampling
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    matched_tokens: int = 0
    """What the router expects the cache to give; for load accounting only."""
    max_queued_tokens: int | None = None
    """Most prefill that may be before it: a worker that has more answers `Outpaced` at once. `None`: any."""
    traceparent: str = ""
    """The router's span, as W3C Trace Context has it; empty where nobody records any."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Router to worker: free the engine's request. Unknown requests are no error."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Router to worker: frames up to `frame` have arrived and may be forgotten."""

    frame: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request failed: an error code of `shared.errors` and a sentence."""

    code: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    """The request's field that is at fault, where there is one."""


@dataclass(slots=True)
class Delta:
    """New tokens of one request. `offset` is the number of tokens sent before these.

    Nobody modifies one that is in a frame. It is not frozen, since one is made at each end for each token, and freezing
    triples the time.
    """

    request: RequestId
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    """The engine's own count of prompt tokens served from its cache, sent with the first delta."""
    fault: Fault | None = None
    """Ends the request as `finish` does, after the tokens beside it."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely one token was, and which were likeliest in its place. Logarithms are natural, and finite."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    """The likeliest first."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """New text of one call of a tool."""

    index: int
    """Of the call within its answer."""
    arguments: str = ""
    id: str = ""
    """Told with the call's first part, as the name is."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """New text of an answer that the worker reads, by what it is."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPart, ...] = ()


@dataclass(slots=True)
class RichDelta(Delta):
    """A delta of an answer of which more is told than tokens."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they are asked for."""
    parts: tuple[MessagePart, ...] = ()
    """What has become certain with these tokens, where the worker reads the answer."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Worker to router: one engine step's news for this router. `number` counts frames of a session from 1."""

    instance: Instance
    number: int
    last_submit: int
    """Last submit of this session that the status accounts for."""
    deltas: tuple[Delta, ...] = ()
    status: WorkerStatus | None = None
    rich_deltas: tuple[RichDelta, ...] = ()
    """Of other requests than `deltas`: a request has one kind or the other."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Router to worker: tell what the engine holds, and what is published of it."""

    number: int
    """Stands in all parts of the answer."""
    is_repair: bool = False
    """Whether to publish the engine's own account first, in place of what was published so far."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Worker to router: one moment of a worker. The keys themselves follow in `ResidentKeys`."""

    number: int
    num_resident: int
    """Blocks that the engine's pool can serve: so many keys follow."""
    epoch: Epoch
    seq: int
    """Number of the last batch that the publisher knows to be applied."""
    num_published: int
    """Blocks that the publisher takes for resident: what the store holds after quiet."""
    num_differing: int
    """Blocks that are in one of those two sets alone. A few are on their way from engine to publisher at any time."""
    num_pending: int
    """Changes that the publisher has and the store is not known to have."""
    is_quiet: bool
    """Whether the publisher has nothing left to tell."""
    num_audits: int = 0
    """Times that the worker compared engine, publisher and store by itself."""
    num_drifts: int = 0
    """Times that this found a difference that lasted."""
    fault: Fault | None = None
    """Why there is no answer."""
    lag_s: float | None = None
    """How long the oldest of those changes has waited, by the worker's clock; 0 without one, `None` if not told."""


@dataclass(frozen=True, slots=True)
class ResidentKeys:
    """Worker to router: some of the keys that an `Inspection` has announced."""

    number: int
    keys: bytes
    """16 bytes each, end to end."""


@dataclass(frozen=True, slots=True)
class AskTokenizer:
    """Router to worker: send the files of the model's tokenizer."""

    number: int
    """Stands in all parts of the answer."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """Worker to router: one of these files."""

    number: int
    name: str
    content: bytes
    num_left: int
    """Files that follow."""
    fault: Fault | None = None
    """Why there are none."""


_KINDS: tuple[type[Any], ...] = (
    Challenge, Hello, Welcome, Refused, Submit, Cancel, Ack, Frame, Inspect, Inspection, ResidentKeys,
    AskTokenizer, TokenizerFile,
)  # fmt: skip
"""A kind is a place in here: new ones come last."""
_KIND_OF = {message_type: kind for kind, message_type in enumerate(_KINDS)}


def encode(message: object) -> bytes:
    """The wire form of any message of this module."""
    return pack((_KIND_OF[type(message)], *fields_of(message)))


def protocol_of(raw: bytes) -> int | None:
    """The version of a hello, whatever else may have become of it there; `None` if this is none. Never raises."""
    try:
        body = unpack(raw)
    except ProtocolError:
        return None
    is_hello = isinstance(body, list) and len(body) > 1 and body[0] == _KIND_OF[Hello]
    return body[1] if is_hello and type(body[1]) is int else None


def decode(raw: bytes) -> Any:
    """The message in `raw`.

    Raises:
        ProtocolError: the bytes are not one message of this protocol; says which field of which message.
    """
    body = unpack(raw)
    if not isinstance(body, list) or not body or type(body[0]) is not int or not 0 <= body[0] < len(_KINDS):
        raise ProtocolError("not a message: no known kind in front")
    return from_fields(_KINDS[body[0]], body[1:])
