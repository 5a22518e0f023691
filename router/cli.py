"""The command `kvroute`: parsing, exit codes and nothing else. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from router.bench import BENCHMARKS
from shared import __version__

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_FAILED_ROWS = 3
EXIT_TOO_MANY_ERRORS = 4
EXIT_INTERRUPTED = 130

_MODEL_FLAGS = (
    ("model", "NAME", "Hugging Face name, local folder, or a built-in: smollm2, tiny."),
    ("served-model-name", "NAME", "Name that requests use; default: the value of --model."),
    ("engine", "NAME", "What computes tokens: vllm, or simulator, which only takes time."),
    ("profile", "NAME|FILE", "Latency profile of a simulated engine: 13b-a100, 13b-h100, or a file."),
    ("workers", "N", "Number of workers."),
    ("block-size", "TOKENS", "Tokens for each KV block."),
    ("max-model-len", "TOKENS", "Longest prompt and answer together, in tokens."),
    ("max-num-seqs", "N", "Sequences that one worker runs at once."),
    ("kv-cache-blocks", "N", "KV blocks for each worker; default: what fits."),
    ("kv-cache-bytes", "BYTES", "Bytes of KV cache for each worker."),
    ("pin-budget-blocks", "N", "KV blocks that pins may hold on each worker; default: half, with room for a request."),
    ("gpu-memory-utilization", "SHARE", "Share of a GPU's memory for the engine."),
    ("tensor-parallel-size", "N", "GPUs for each worker."),
    ("gpus-per-worker", "N", "GPUs that Ray sets aside; a fraction lets workers share one."),
    ("dtype", "TYPE", "Weights' and cache's type, as vLLM names it."),
    ("eviction", "RULE", "Which cached blocks go first; stock: vLLM's own pool."),
    ("tool-call-parser", "NAME", "vLLM's parser of the model's calls of tools; default: none, and tools are refused."),
    ("reasoning-parser", "NAME", "vLLM's parser of the model's reasoning; default: none, and it counts as content."),
    ("engine-args", "JSON", "Further vLLM engine arguments, as JSON."),
    ("start-timeout-s", "S", "Longest wait for workers to be ready."),
)
_ROUTER_FLAGS = (
    (
        "policy",
        "NAME",
        "How requests find workers: cost, random, round_robin, least_load, power_of_two, prefix_hash; as others do it: "
        "dynamo, llm_d, llm_d_affinity, sglang, ray_prefix; or MODULE:CLASS. Knobs follow, as in "
        "dynamo:temperature=0.1.",
    ),
    ("seed", "N", "Seed of every random choice that kvroute makes."),
    ("min-prefix-tokens", "TOKENS", "Shorter cached prefixes are not weighed."),
    ("max-queued", "N", "Requests held by a router before it answers 429."),
    ("tenant-weights", "JSON", "Shares of the workers by tenant, as JSON; 1 for whom it does not name."),
    ("queue-timeout-s", "S", "Longest time that a request is held."),
    ("max-attempts", "N", "Workers that a request is tried on."),
    ("request-log", "FILE", "Where a line for each answered request goes, for replay: block hashes, no text."),
    ("otlp-endpoint", "URL", "OTLP collector that traces go to, as http://HOST:4318; default: none."),
)
_DIRECTORY_FLAGS = (
    ("redis-url", "URL", "Store of the directory; default: an embedded server."),
    ("redis-deadline-s", "S", "Longest wait for the store on a request's way."),
    ("lease-s", "S", "A worker silent for this long is forgotten."),
    ("heartbeat-s", "S", "Time between two heartbeats of a worker."),
    ("audit-s", "S", "Time between two audits of what the store holds of a worker."),
    ("ray-address", "ADDRESS", "Ray cluster to use; default: a local one. RAY_ADDRESS counts too."),
)
_ATTACH_FLAGS = (
    (
        "attach",
        "URL[,...]",
        "Server that runs already, in place of own workers: URL[,events=ENDPOINT][,replay=ENDPOINT][,ranks=N]...; once "
        "for each.",
    ),
    (
        "tokenizer",
        "DIR|NAME",
        "Folder or Hugging Face name of the attached servers' tokenizer; default: the model's own.",
    ),
)
_PLAN_FLAGS = tuple(
    flag
    for flag in _MODEL_FLAGS
    if flag[0] in ("model", "block-size", "gpu-memory-utilization", "tensor-parallel-size", "dtype")
)
_REPLAY_FLAGS = tuple(
    flag
    for flag in (*_MODEL_FLAGS, *_ROUTER_FLAGS)
    if flag[0] in ("model", "profile", "workers", "block-size", "max-num-seqs", "eviction", "seed")
)
_REPLAY_OWN_FLAGS = (
    ("routers", "N", "Routers that requests are dealt to in turn; default: 1."),
    ("rate", "R", "Mean requests for each second; default: the trace's own times."),
    ("load", "L", "The same, as a multiple of what this fleet serves under round_robin at most."),
    ("cache-blocks", "N", "KV blocks for each worker; default: what fits the profile's GPU."),
    ("max-prompt-tokens", "N", "Longer prompts are cut to this."),
    ("skip", "N", "Requests left out at the trace's beginning."),
    ("limit", "N", "Most requests replayed; default: all, and 1000 of a made-up trace."),
    ("slo-ttft-s", "S", "Longest time to first token that is good; default: 2."),
    ("slo-itl-s", "S", "Longest mean time between an answer's tokens that is good; default: any."),
    ("lag-s", "S", "One way between a router and a worker, and from a worker to the directory; default: 0."),
)
"""Arguments of `replay` alone, which checks them."""
_SEED_FLAGS = tuple(flag for flag in _ROUTER_FLAGS if flag[0] == "seed")
_DRAIN_FLAGS = (("drain-timeout-s", "S", "Longest wait for the requests of a worker or server that ends."),)
_SERVER_FLAGS = (
    ("host", "ADDRESS", "Address that `serve` listens on."),
    ("port", "N", "Port that `serve` listens on; 0: any free one."),
    ("api-key", "KEY", "Key that requests must show; default: none is asked for."),
    ("api-key-file", "FILE", "Keys that requests must show one of, as YAML; see README."),
    ("files-dir", "DIR", "Where `serve` keeps files and batches; default: the user's cache folder."),
    *_DRAIN_FLAGS,
)
_BATCH_FLAGS = (("max-in-flight", "N", "Batch rows under way at once."),)
_COMMON_FLAGS = (
    ("run-dir", "DIR", "Where `up` writes what it started; default: the user's run folder."),
    ("cache-dir", "DIR", "Where converted models lie; default: the user's cache folder."),
    ("log-level", "LEVEL", "Least level logged."),
    ("log-format", "FORM", "Form of log lines."),
)
_SERVING_GROUPS = (
    ("workers", _MODEL_FLAGS),
    ("routing", _ROUTER_FLAGS),
    ("directory and cluster", _DIRECTORY_FLAGS),
    ("general", _COMMON_FLAGS),
)


_REPEATED_FLAGS = ("attach",)
_FLAG_TO_ALIASES = {"ray-address": ("--address",)}
"""What Ray's own commands call it."""
_STARTING_COMMANDS = ("batch", "serve", "up", "demo")
"""Commands that start a Ray of their own where none is named."""


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Values are checked by the settings model, which names the flag in its errors."""
    parser = argparse.ArgumentParser(
        prog="kvroute",
        allow_abbrev=False,
        description="Routes LLM requests to the worker that already holds their KV blocks.",
        epilog="Every setting can stand in --config FILE (YAML) or in the environment as KVROUTE_<SETTING>; "
        "the command line wins over the environment, the environment over the file.",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"kvroute {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    groups = (*_SERVING_GROUPS, ("attached servers", _ATTACH_FLAGS), ("batch", _BATCH_FLAGS))
    batch = _add_command(commands, "batch", "answer an OpenAI batch file", groups)
    batch.add_argument(
        "input", type=Path, nargs="+", metavar="IN.jsonl", help="OpenAI batch input or pattern; plain, gzip or zstd."
    )
    batch.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.jsonl", help="One row for each row.")
    batch.add_argument("--error-file", type=Path, metavar="FILE", help="Where failed rows go; default: the output.")
    batch.add_argument("--max-errors", metavar="N", help="Stop with 4 when so many rows have failed.")
    batch.add_argument("--shard", metavar="I/N", help="Answer every Nth row only, beginning with row I.")
    batch.add_argument("--summary", type=Path, metavar="FILE", help="Where figures of the run go, as JSON.")
    batch.add_argument("--resume", action="store_true", help="Go on with an output that exists.")
    batch.add_argument("--strict", action="store_true", help="Exit with 3 when a row failed.")
    batch.add_argument("--progress", action="store_true", help="Show progress where stderr is no terminal, too.")

    serve = _add_command(
        commands,
        "serve",
        "answer OpenAI clients over HTTP",
        (("server", _SERVER_FLAGS), ("attached servers", _ATTACH_FLAGS), *_SERVING_GROUPS),
    )
    serve.add_argument("--routers", metavar="N", default="1", help="Processes that share the port; default: 1.")
    _add_up_command(commands)
    _add_command(commands, "down", "end what `up` started", (("general", _COMMON_FLAGS),))
    status = _add_command(commands, "status", "show the workers that `up` started", (("general", _COMMON_FLAGS),))
    status.add_argument("--json", action="store_true", help="Print one JSON line.")
    _add_looking_commands(commands)
    _add_scale_commands(commands)
    _add_pin_commands(commands)
    _add_directory_commands(commands)
    demo = _add_command(commands, "demo", "run the shipped batch under two policies", (("general", _COMMON_FLAGS),))
    demo.add_argument("--json", action="store_true", help="Print one JSON line.")
    demo.add_argument(
        "-o", "--output-dir", type=Path, default=Path("out/demo"), metavar="DIR", help="Where results go."
    )
    plan = _add_command(
        commands,
        "plan",
        "tell how much KV cache a GPU holds for a model",
        (("worker", _PLAN_FLAGS), ("general", _COMMON_FLAGS)),
    )
    plan.add_argument("--gpu-memory", required=True, metavar="SIZE", help="Memory of one GPU, as 80GiB.")
    plan.add_argument("--config-json", type=Path, metavar="FILE", help="A model's config.json, in place of --model.")
    plan.add_argument("--weights", metavar="SIZE", help="Size of the weights; default: from the configuration.")
    plan.add_argument("--lengths", default="512,1024,2048,4096", metavar="N,N", help="Prompt and answer, in tokens.")
    plan.add_argument("--system-prompt", default="1024", metavar="TOKENS", help="Beginning that all prompts share.")
    plan.add_argument("--json", action="store_true", help="Print one JSON line.")
    _add_replay_command(commands)
    calibrate = _add_command(
        commands,
        "calibrate",
        "fit a latency profile to a live engine, for simulations",
        (("worker", _MODEL_FLAGS), ("general", (*_SEED_FLAGS, *_COMMON_FLAGS))),
    )
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="Where the profile goes, as YAML.")
    calibrate.add_argument(
        "--validate", action="store_true", help="Then compare predicted and measured TTFT of the demo's prompts."
    )
    calibrate.add_argument("--json", action="store_true", help="Print one JSON line.")
    bench = _add_command(commands, "bench", "measure one part of kvroute here", (("general", _COMMON_FLAGS),))
    bench.add_argument(
        "benchmark", choices=BENCHMARKS, metavar="NAME", help=f"What to measure: {', '.join(BENCHMARKS)}."
    )
    bench.add_argument("--json", action="store_true", help="Print one JSON line.")
    return parser


def _add_up_command(commands: Any) -> None:
    groups = (
        ("workers", (*_MODEL_FLAGS, *_SEED_FLAGS, *_DRAIN_FLAGS)),
        ("directory and cluster", tuple(flag for flag in _DIRECTORY_FLAGS if flag[0] != "redis-deadline-s")),
        ("general", _COMMON_FLAGS),
    )
    _add_command(commands, "up", "start workers that stay, or change those that run", groups)


def _add_looking_commands(commands: Any) -> None:
    names = ("host", "port", "api-key")
    groups = (
        ("server", tuple(flag for flag in _SERVER_FLAGS if flag[0] in names)),
        ("general", _COMMON_FLAGS),
    )
    top = _add_command(commands, "top", "show live what a router does", groups)
    top.add_argument("--once", action="store_true", help="Show it once and end.")
    explain = _add_command(commands, "explain", "tell where a prompt would go now, and why", groups)
    explain.add_argument("--messages", type=Path, metavar="FILE", help="Messages of a chat, as a JSON array.")
    explain.add_argument("--file", type=Path, metavar="PROMPT", help="A plain prompt, as of a completion.")
    explain.add_argument("--cache-salt", metavar="SALT", help="Salt of the requests with this prompt.")
    explain.add_argument("--tenant", metavar="NAME", help="Whose requests; default: those of the key that is shown.")
    for command in (top, explain):
        command.add_argument("--url", metavar="URL", help="Front to ask; default: that at --host and --port.")
        command.add_argument("--json", action="store_true", help="Print JSON lines.")


def _add_scale_commands(commands: Any) -> None:
    start_flags = tuple(flag for flag in _MODEL_FLAGS if flag[0] == "start-timeout-s")
    general = ("general", _COMMON_FLAGS)
    scale = _add_command(
        commands,
        "scale",
        "start more workers, or drain and end the newest",
        (("workers", start_flags + _DRAIN_FLAGS), general),
    )
    scale.add_argument("num_workers", metavar="N", help="Number of workers from now on.")
    drain = _add_command(commands, "drain", "let one worker finish and end it", (("workers", _DRAIN_FLAGS), general))
    drain.add_argument("worker", metavar="WORKER", help="Its name, as `status` shows it.")


def _add_pin_commands(commands: Any) -> None:
    general = (("general", _COMMON_FLAGS),)
    waiting = (("general", (*(flag for flag in _MODEL_FLAGS if flag[0] == "start-timeout-s"), *_COMMON_FLAGS)),)
    warmup = _add_command(commands, "warmup", "compute a prompt on running workers and keep its blocks", waiting)
    warmup.add_argument("name", metavar="NAME", help="Name to keep it under; 1 to 64 of A-Z a-z 0-9 . _ -")
    warmup.add_argument("--file", type=Path, metavar="PROMPT", help="A plain prompt, as of a completion.")
    warmup.add_argument("--messages", type=Path, metavar="FILE", help="Messages of a chat, as a JSON array.")
    warmup.add_argument("--ttl-s", metavar="S", help="How long to keep it; default: until it is unpinned.")
    warmup.add_argument(
        "--workers",
        dest="on_workers",
        default="all",
        metavar="all|N",
        help="How many workers keep it; all: those that come later, too.",
    )
    warmup.add_argument("--cache-salt", metavar="SALT", help="Salt of the requests that are to find it.")
    pins = _add_command(commands, "pins", "show what is kept on running workers", general)
    pins.add_argument("--json", action="store_true", help="Print one JSON line.")
    unpin = _add_command(commands, "unpin", "keep a prompt no longer", general)
    unpin.add_argument("name", metavar="NAME", help="Name that it is kept under.")


def _add_replay_command(commands: Any) -> None:
    groups = (("fleet", _REPLAY_FLAGS), ("general", _COMMON_FLAGS))
    replay = _add_command(commands, "replay", "simulate what a fleet would do with recorded traffic", groups)
    replay.add_argument("trace", metavar="TRACE", help="A file, or made up: conversations, system_prompts, flood.")
    replay.add_argument("--policy", dest="policies", metavar="NAME,NAME", help="Policies to compare; default: cost.")
    for flag, metavar, text in _REPLAY_OWN_FLAGS:
        replay.add_argument(f"--{flag}", metavar=metavar, help=text)
    replay.add_argument("--spread", action="store_true", help="Spread requests of one time over that until the next.")
    replay.add_argument("--plot", type=Path, metavar="OUT.png", help="Draw waiting times and hit ratios.")
    replay.add_argument("--json", action="store_true", help="Print one JSON line for each policy.")


def _add_directory_commands(commands: Any) -> None:
    general = (("general", _COMMON_FLAGS),)
    doctor = _add_command(commands, "doctor", "compare what engines hold with the store and with a mirror", general)
    doctor.add_argument("--repair", action="store_true", help="Have what differs published anew, and look again.")
    doctor.add_argument("--json", action="store_true", help="Print one JSON line.")
    purpose = "tell what the directory holds"
    directory = commands.add_parser("directory", help=purpose, description="Tell what the directory holds.")
    views = directory.add_subparsers(dest="view", metavar="VIEW", required=True)
    who = _add_command(views, "who", "tell how much of a prompt each worker holds", general)
    who.add_argument("--file", type=Path, metavar="PROMPT", help="A plain prompt, as of a completion.")
    who.add_argument("--messages", type=Path, metavar="FILE", help="Messages of a chat, as a JSON array.")
    who.add_argument("--cache-salt", metavar="SALT", help="Salt of the requests with this prompt.")
    size = _add_command(views, "size", "tell how much the store holds of each worker", general)
    for view in (who, size):
        view.add_argument("--json", action="store_true", help="Print one JSON line.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went."""
    words = _kebab(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_unknown_text(arguments.command, unknown))
    from shared.config import load_settings
    from shared.errors import ConfigError, KvrouteError

    try:
        flags, own = _split(vars(arguments))
        own["command_line"] = shlex.join(["kvroute", *words])
        settings = load_settings(flags=flags, environment=os.environ, file=own["config"])
        from router import ray_access

        starts_ray = arguments.command in _STARTING_COMMANDS and not settings.ray_address
        ray_access.prepare(arguments.command, settings.run_dir, ray_address=settings.ray_address, starts_ray=starts_ray)
        from router import commands

        return commands.run(arguments.command, settings, own, say=_say, show=_show)
    except ConfigError as error:
        _say(f"error: {error}")
        return EXIT_USAGE
    except KvrouteError as error:
        _say(f"error: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED


def _unknown_text(command: str, unknown: Sequence[str]) -> str:
    """What is wrong with arguments that the command does not have."""
    of_routers = {f"--{flag}" for flag, _, _ in (*_ROUTER_FLAGS, *_DIRECTORY_FLAGS)}
    misplaced = [word for word in unknown if word.partition("=")[0] in of_routers]
    if command == "up" and misplaced:
        return f"{', '.join(misplaced)}: for routers, and `up` starts workers alone; give it to `batch` or `serve`"
    return f"unrecognized arguments: {' '.join(unknown)}"


def _add_command(commands: Any, name: str, purpose: str, groups: Sequence[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="Settings as YAML, or a cluster.yaml.")
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag, metavar, text in flags:
            action = "append" if flag in _REPEATED_FLAGS else "store"
            names = [f"--{flag}", *_FLAG_TO_ALIASES.get(flag, ())]
            group.add_argument(*names, metavar=metavar, help=text, default=argparse.SUPPRESS, action=action)
    return parser


def _kebab(argv: Sequence[str]) -> list[str]:
    """vLLM takes `_` for `-` in every flag, and so do its users."""
    spelled = []
    for word in argv:
        flag, equals, value = word.partition("=")
        spelled.append(flag.replace("_", "-") + equals + value if word.startswith("--") else word)
    return spelled


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given on the command line as (settings, arguments of the command itself)."""
    from shared.config import JSON_SETTINGS, Settings
    from shared.errors import ConfigError

    own = {name: value for name, value in arguments.items() if name not in Settings.model_fields}
    flags = {name: value for name, value in arguments.items() if name in Settings.model_fields}
    for name in JSON_SETTINGS:
        if name in flags:
            try:
                flags[name] = json.loads(flags[name])
            except ValueError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: not JSON: {error}") from None
    return flags, own


def _say(line: str) -> None:
    """Talk goes to stderr: stdout is data. Where nobody listens any more, the work goes on."""
    with contextlib.suppress(OSError):
        print(f"kvroute: {line}", file=sys.stderr, flush=True)


def _show(text: str) -> None:
    """Results go to stdout. Raises `OutputError` where they cannot."""
    from shared.errors import OutputError

    try:
        print(text, flush=True)
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"standard output: cannot write: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
