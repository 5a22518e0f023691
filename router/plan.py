"""`kvroute plan`: how much KV cache a GPU holds for a model, before anything is started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from router.fields import brief
from shared.errors import ConfigError
from shared.kv_size import ModelShape, model_shape, sequences_in_flight

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kKMGT]i?)?B?")
_COUNT = re.compile(r"[0-9]{1,9}")
"""A number of tokens, which no context comes near to."""
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """Sequences of one length, prompt and answer together, that are in flight at once."""

    length_tokens: int
    num_alone: int
    num_with_shared_prompt: int | None
    """Where all of them begin with the same system prompt; None where that is no shorter than they are."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The cache of one worker. Activations and CUDA graphs are not counted, so an engine gets a little less."""

    bytes_per_token: int
    block_size_tokens: int
    bytes_per_block: int
    weight_bytes: int
    cache_bytes: int
    num_blocks: int
    system_prompt_tokens: int
    num_static: int | None
    """Sequences in flight if each had room for the whole context set aside; None where that is not known."""
    lengths: tuple[LengthPlan, ...]


def make_plan(
    shape: ModelShape,
    *,
    gpu_memory_bytes: int,
    gpu_memory_utilization: float,
    tensor_parallel_size: int,
    dtype: str,
    block_size_tokens: int,
    lengths_tokens: Sequence[int],
    system_prompt_tokens: int,
    weight_bytes: int | None = None,
) -> Plan:
    """The plan for one worker with so many GPUs of that size.

    Raises:
        ConfigError: the weights' size is not known, or not one block is left beside them.
    """
    weight_bytes = shape.weight_bytes(dtype) if weight_bytes is None else weight_bytes
    if weight_bytes is None:
        raise ConfigError("--weights: needed, since the model's configuration does not tell its number of parameters")
    bytes_per_token = shape.bytes_per_token(dtype, tensor_parallel_size)
    bytes_per_block = bytes_per_token * block_size_tokens
    usable_bytes = int(gpu_memory_bytes * tensor_parallel_size * gpu_memory_utilization)
    cache_bytes = usable_bytes - weight_bytes
    if cache_bytes < bytes_per_block:
        raise ConfigError(
            f"--gpu-memory: of {show_bytes(usable_bytes)} that may be used, weights take {show_bytes(weight_bytes)}; "
            f"not one block of {show_bytes(bytes_per_block)} is left"
        )
    num_blocks = cache_bytes // bytes_per_block
    return Plan(
        bytes_per_token=bytes_per_token,
        block_size_tokens=block_size_tokens,
        bytes_per_block=bytes_per_block,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        num_blocks=num_blocks,
        system_prompt_tokens=system_prompt_tokens,
        num_static=sequences_in_flight(num_blocks, block_size_tokens, shape.context_tokens)
        if shape.context_tokens
        else None,
        lengths=tuple(
            LengthPlan(
                length,
                sequences_in_flight(num_blocks, block_size_tokens, length),
                sequences_in_flight(num_blocks, block_size_tokens, length, system_prompt_tokens)
                if system_prompt_tokens < length
                else None,
            )
            for length in lengths_tokens
        ),
    )


def plan_text(plan: Plan) -> str:
    """The plan for people."""
    lines = [
        f"{'KV cache for a token':<24} {plan.bytes_per_token:,} bytes",
        f"{f'block of {plan.block_size_tokens} tokens':<24} {show_bytes(plan.bytes_per_block)}",
        f"{'weights':<24} {show_bytes(plan.weight_bytes)}",
        f"{'left for the cache':<24} {show_bytes(plan.cache_bytes)}, less what activations take",
        f"{'blocks':<24} {plan.num_blocks:,}",
    ]
    if plan.num_static is not None:
        lines.append(f"sequences in flight, the whole context set aside for each: {plan.num_static:,}")
    lines.append("sequences in flight, blocks taken as needed:")
    lines.append(f"{'tokens':>10}  {'alone':>10}  {f'sharing {plan.system_prompt_tokens} tokens':>22}")
    for row in plan.lengths:
        shared = "-" if row.num_with_shared_prompt is None else f"{row.num_with_shared_prompt:,}"
        lines.append(f"{row.length_tokens:>10,}  {row.num_alone:>10,}  {shared:>22}")
    return "\n".join(lines)


def plan_json(plan: Plan) -> str:
    """The plan as one JSON line."""
    return json.dumps(asdict(plan))


def read_shape(path: Path) -> ModelShape:
    """The shape in a model's `config.json`.

    Raises:
        ConfigError: the file cannot be read, or describes no model that can be planned.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config-json: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config-json: {path} is not JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"--config-json: {path} does not hold an object")
    return model_shape(config)


def download_config(model: str) -> Path:
    """The `config.json` of a model on Hugging Face, without its weights. Blocks.

    Raises:
        ConfigError: Hugging Face does not give it.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, ValueError) as error:  # roots of all that the hub's client raises
        cause = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model: {model!r} is no folder, and Hugging Face did not give it: {cause}") from error


def parse_size(flag: str, text: str) -> int:
    """Bytes in `80GiB`, `80GB`, `512 MiB` or a plain number.

    Raises:
        ConfigError: that is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{flag}: {brief(text)} is no size; write it as 80GiB, 80GB or in bytes")
    unit = found[2] or ""
    base = 1024 if unit.endswith("i") else 1000
    return int(float(found[1]) * base ** _POWERS[unit.rstrip("i").upper()])


def parse_lengths(flag: str, text: str) -> list[int]:
    """Token counts in `512,2048`.

    Raises:
        ConfigError: one is no number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(_COUNT.fullmatch(word) and int(word) > 0 for word in words):
        raise ConfigError(f"{flag}: {brief(text)} must be numbers above 0 of at most 9 digits, with commas between")
    return [int(word) for word in words]


def show_bytes(number: int) -> str:
    """Bytes in the largest binary unit that leaves a whole number before the point."""
    value, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if value == int(value) else f"{value:,.1f} {unit}"


def parse_count(flag: str, text: str) -> int:
    """A number of tokens, 0 included.

    Raises:
        ConfigError: it is none.
    """
    if not _COUNT.fullmatch(text):
        raise ConfigError(f"{flag}: {brief(text)} must be a number of tokens of at most 9 digits")
    return int(text)
