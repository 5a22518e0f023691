"""The one settings model. Precedence: command line over environment over file over default.

Nothing else of kvroute reads the environment. Unknown keys and malformed values are errors that name the key and
where it came from; nothing falls back silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from shared.errors import ConfigError

ENVIRONMENT_PREFIX = "KVROUTE_"
TEST_PREFIX = "KVROUTE_TEST_"
"""Variables of the test suite, which are no settings; no setting's name may start with `test_`."""
TRACE_DIR_VARIABLE = "KVROUTE_TRACE_DIR"
"""Where tests and benchmarks find recorded traces; no setting either."""

TenantWeight = Annotated[float, Field(ge=0.001, le=1000)]
JSON_SETTINGS = ("engine_args", "tenant_weights")
"""Mappings, which flags and variables write as JSON."""

EngineName = Literal["vllm", "simulator"]
EvictionName = Literal["lru", "shared_first", "adaptive", "stock"]
MIN_BLOCK_SIZE_TOKENS, MAX_BLOCK_SIZE_TOKENS = 16, 256


class Settings(BaseModel):
    """Everything a user may set. Field names are the flags' names with underscores."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("", description="Hugging Face name, local folder, or a built-in: smollm2, tiny.")
    served_model_name: str = Field("", description="Name that requests use; default: the value of --model.")
    engine: EngineName = Field("vllm", description="What computes tokens: vllm, or simulator, which only takes time.")
    profile: str = Field(
        "13b-a100", description="Latency profile of a simulated engine: 13b-a100, 13b-h100, or a file."
    )
    workers: int = Field(1, ge=1, le=4096, description="Number of workers.")
    policy: str = Field(
        "cost",
        description="How requests find workers: cost, random, round_robin, least_load, power_of_two, prefix_hash; as "
        "others do it: dynamo, llm_d, llm_d_affinity, sglang, ray_prefix; or MODULE:CLASS. Knobs follow, as in "
        "dynamo:temperature=0.1.",
    )
    seed: int = Field(0, description="Seed of every random choice that kvroute makes.")

    block_size: int = Field(
        64, ge=MIN_BLOCK_SIZE_TOKENS, le=MAX_BLOCK_SIZE_TOKENS, description="Tokens for each KV block."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt and answer together, in tokens.")
    max_num_seqs: int = Field(8, ge=1, description="Sequences that one worker runs at once.")
    kv_cache_blocks: int | None = Field(None, ge=2, description="KV blocks for each worker; default: what fits.")
    kv_cache_bytes: int | None = Field(None, ge=1, description="Bytes of KV cache for each worker.")
    pin_budget_blocks: int | None = Field(
        None, ge=0, description="KV blocks that pins may hold on each worker; default: half, with room for a request."
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU's memory for the engine.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs for each worker.")
    gpus_per_worker: float | None = Field(
        None, gt=0, le=64, description="GPUs that Ray sets aside; a fraction lets workers share one."
    )
    dtype: str = Field("auto", description="Weights' and cache's type, as vLLM names it.")
    eviction: EvictionName = Field("adaptive", description="Which cached blocks go first; stock: vLLM's own pool.")
    tool_call_parser: str = Field(
        "", description="vLLM's parser of the model's calls of tools; default: none, and tools are refused."
    )
    reasoning_parser: str = Field(
        "", description="vLLM's parser of the model's reasoning; default: none, and it counts as content."
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="Further vLLM engine arguments, as JSON.")

    redis_url: str = Field("", description="Store of the directory; default: an embedded server.")
    redis_deadline_s: float = Field(0.02, gt=0, description="Longest wait for the store on a request's way.")
    lease_s: float = Field(5.0, gt=0, description="A worker silent for this long is forgotten.")
    heartbeat_s: float = Field(1.0, gt=0, description="Time between two heartbeats of a worker.")
    audit_s: float = Field(60.0, gt=0, description="Time between two audits of what the store holds of a worker.")
    ray_address: str = Field("", description="Ray cluster to use; default: a local one. RAY_ADDRESS counts too.")

    attach: tuple[str, ...] = Field(
        (),
        description="Server that runs already, in place of own workers: URL[,events=ENDPOINT][,replay=ENDPOINT]"
        "[,ranks=N]...; once for each.",
    )
    attach_api_key: SecretStr = Field(
        SecretStr(""), description="Key of the attached servers' API; not on the command line, where others see it."
    )
    tokenizer: str = Field(
        "", description="Folder or Hugging Face name of the attached servers' tokenizer; default: the model's own."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address that `serve` listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that `serve` listens on; 0: any free one.")
    api_key: SecretStr = Field(SecretStr(""), description="Key that requests must show; default: none is asked for.")
    api_key_file: Path | None = Field(None, description="Keys that requests must show one of, as YAML; see README.")
    files_dir: Path | None = Field(
        None, description="Where `serve` keeps files and batches; default: the user's cache folder."
    )

    max_in_flight: int | None = Field(None, ge=1, description="Batch rows under way at once.")
    max_queued: int = Field(4096, ge=1, description="Requests held by a router before it answers 429.")
    tenant_weights: dict[str, TenantWeight] = Field(
        default_factory=dict, description="Shares of the workers by tenant, as JSON; 1 for whom it does not name."
    )
    queue_timeout_s: float = Field(600.0, gt=0, description="Longest time that a request is held.")
    max_attempts: int = Field(3, ge=1, description="Workers that a request is tried on.")
    min_prefix_tokens: int = Field(0, ge=0, description="Shorter cached prefixes are not weighed.")

    request_log: Path | None = Field(
        None, description="Where a line for each answered request goes, for replay: block hashes, no text."
    )
    drain_timeout_s: float = Field(
        300.0, ge=0, description="Longest wait for the requests of a worker or server that ends."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Longest wait for workers to be ready.")
    otlp_endpoint: str = Field("", description="OTLP collector that traces go to, as http://HOST:4318; default: none.")
    run_dir: Path | None = Field(None, description="Where `up` writes what it started; default: the user's run folder.")
    cache_dir: Path | None = Field(None, description="Where converted models lie; default: the user's cache folder.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="Least level logged.")
    log_format: Literal["text", "json"] = Field("text", description="Form of log lines.")

    @field_validator("attach", mode="before")
    @classmethod
    def _split(cls, attach: Any) -> Any:
        """A variable of the environment holds all servers, with blanks between them."""
        return attach.split() if isinstance(attach, str) else attach

    @field_validator("profile")
    @classmethod
    def _make_absolute(cls, profile: str) -> str:
        """Workers have other working folders."""
        return str(Path(profile).expanduser().absolute()) if Path(profile).suffix or "/" in profile else profile

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(
                f"lease_s ({self.lease_s}) must be at least twice heartbeat_s ({self.heartbeat_s}), "
                "or one lost heartbeat loses the worker"
            )
        if self.engine == "simulator" and self.eviction == "stock":
            raise ValueError("eviction 'stock' is vLLM's own pool, which a simulated engine has not")
        if self.engine == "simulator" and (self.tool_call_parser or self.reasoning_parser):
            raise ValueError("tool_call_parser and reasoning_parser are vLLM's own, which a simulated engine has not")
        if self.kv_cache_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("kv_cache_blocks and kv_cache_bytes exclude each other")
        return self

    @property
    def model_cache_dir(self) -> Path:
        """Where converted models lie. Raises `ConfigError` where nothing says so."""
        try:
            return self.cache_dir or Path.home() / ".cache" / "kvroute"
        except RuntimeError:
            raise ConfigError("--cache-dir: needed, since this user has no home folder") from None

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        return self.served_model_name or self.model


def load_settings(
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge all sources into one checked `Settings`.

    `flags` holds only what was given on the command line. `defaults` are those of a command, weaker than the file.

    Raises:
        ConfigError: a key is unknown or a value is wrong; names key, value and source.
    """
    merged: dict[str, Any] = dict(defaults or {})
    source_of = dict.fromkeys(merged, "default")
    layers = [(f"file {file}", _read_file(file) if file else {})]
    layers += [("environment", _read_environment(environment)), ("command line", dict(flags))]
    for source, layer in layers:
        for name in layer:
            if name not in Settings.model_fields:
                raise ConfigError(f"{_spell(name, source)}: unknown setting ({source})")
        merged.update(layer)
        source_of.update(dict.fromkeys(layer, source))
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(detail, source_of) for detail in error.errors())) from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from None
    settings = _mapping(document, path, "the file")
    if "cluster_name" in settings:
        # A file of Ray's cluster launcher: ours is what stands where Ray leaves room for its users.
        metadata = _mapping(settings.get("metadata"), path, "metadata")
        settings = _mapping(metadata.get("kvroute"), path, "metadata.kvroute")
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in found:
            raise ConfigError(f"{name}: given twice (file {path})")
        found[name] = value
    return found


def _mapping(value: Any, path: Path, where: str) -> dict[str, Any]:
    """`value` if it maps names to something; nothing at all counts as empty."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"--config: {path}: {where} must hold a mapping of settings")
    return value


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if environment.get("RAY_ADDRESS"):
        found["ray_address"] = environment["RAY_ADDRESS"]
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(TEST_PREFIX):
            continue
        if variable == TRACE_DIR_VARIABLE:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in JSON_SETTINGS:
            try:
                found[name] = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{variable}: not JSON: {error}") from None
        else:
            found[name] = text
    return found


def _spell(name: str, source: str) -> str:
    """A setting's name as its source writes it."""
    if source == "environment":
        return ENVIRONMENT_PREFIX + name.upper()
    return "--" + name.replace("_", "-") if source == "command line" else name


def _describe(detail: Any, source_of: Mapping[str, str]) -> str:
    if not detail["loc"]:
        return str(detail["msg"]).removeprefix("Value error, ")
    name = str(detail["loc"][0])
    source = source_of.get(name, "default")
    part = "".join(f" {key}" for key in detail["loc"][1:])
    return f"{_spell(name, source)}{part}: invalid value {detail['input']!r}: {detail['msg']} ({source})"
