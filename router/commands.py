"""What each command does, once its arguments are settings. Tells its exit code."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router import checkup, deployment, holdings, launch, pins, rollout, runfile, warmup
from router import plan as planning
from router.bench import figures_json, figures_text, run_benchmark
from router.cli import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from router.policies import make_policy
from router.prompts import prompt_tokens, read_prompt
from router.serving import Say
from router.status import deployment_state, status_text
from router.tokenizer import Tokenizer
from router.workers import find_workers, serving_of, with_run
from shared.config import Settings
from shared.errors import ConfigError
from shared.hashing import parity_key, tokenizer_fingerprint
from shared.telemetry import set_up_logging
from shared.types import CacheScheme, WorkerId


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of one command."""

    settings: Settings
    own: Mapping[str, Any]
    """Arguments of the command itself."""
    say: Say
    show: Callable[[str], None]

    @property
    def run_dir(self) -> Path:
        return self.settings.run_dir or runfile.default_run_dir()


def run(
    command: str,
    settings: Settings,
    own: Mapping[str, Any],
    *,
    say: Say,
    show: Callable[[str], None],
) -> int:
    """Run one command and give its exit code. `say` takes talk for people, `show` takes results."""
    set_up_logging(settings.log_level, settings.log_format)
    # A policy that cannot be made must stop the command before it starts anything.
    make_policy(settings.policy)
    try:
        # What is measured runs on the loop that it runs on in service; Ray's actors have that one, too.
        is_fast = command == "serve" or (command == "bench" and own.get("benchmark") in ("http", "transport"))
        with asyncio.Runner(loop_factory=_fast_loop() if is_fast else None) as runner:
            return runner.run(_interruptible(_COMMANDS[command](Invocation(settings, own, say, show))))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _interruptible(command: Coroutine[Any, Any, int]) -> int:
    """Let SIGTERM end a command as Ctrl-C does."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await command


async def _batch(call: Invocation) -> int:
    from router.batch_command import run_batch_command

    asked = call.own["max_errors"]
    max_errors = None if asked is None else _count("--max-errors", asked, "failed rows", 999_999_999)
    return await run_batch_command(call.settings, call.own, max_errors, call.run_dir, call.say)


async def _serve(call: Invocation) -> int:
    from router.serve import run_serve

    num_routers = _count("--routers", call.own["routers"], "processes", 64)
    workers = await find_workers(call.settings, call.run_dir, call.say)
    is_interrupted = await run_serve(workers.settings, serving_of(workers, call.say), num_routers, call.say)
    call.say("stopped")
    return EXIT_INTERRUPTED if is_interrupted else EXIT_OK


async def _up(call: Invocation) -> int:
    if runfile.alive(call.run_dir) is not None:
        run = await rollout.change(call.run_dir, call.settings, call.say)
        call.say(f"{len(run.workers)} workers serve {run.settings['model']}: {', '.join(run.workers)}")
        return EXIT_OK
    run = await deployment.bring_up(call.settings, call.run_dir, call.say)
    call.say(f"{len(run.workers)} workers serve {run.settings['model']}; Ray at {run.ray_address}")
    call.say("Next steps:")
    call.say("  kvroute status")
    call.say("  kvroute batch IN.jsonl -o OUT.jsonl")
    call.say("  kvroute down")
    return EXIT_OK


async def _down(call: Invocation) -> int:
    run = runfile.read_run(call.run_dir)
    was_running = await deployment.take_down(call.run_dir, call.say)
    if run is not None and run.settings.get("redis_url"):
        await pins.forget_pins(run, with_run(call.settings, run), call.say)
    call.say("stopped" if was_running else "nothing is running")
    return EXIT_OK


async def _top(call: Invocation) -> int:
    from router.top_command import run_top

    run = runfile.alive(call.run_dir)
    await run_top(with_run(call.settings, run), run, call.own, call.say, call.show)
    return EXIT_OK


async def _explain(call: Invocation) -> int:
    from router.explain import explanation_text
    from router.top_command import run_explain

    prompt = replace(await asyncio.to_thread(read_prompt, call.own), tenant=call.own["tenant"] or "")
    run = runfile.alive(call.run_dir)
    state = await run_explain(with_run(call.settings, run), run, call.own, prompt, call.say)
    call.show(json.dumps(state) if call.own["json"] else explanation_text(state))
    return EXIT_OK


async def _scale(call: Invocation) -> int:
    num_workers = _count("scale", call.own["num_workers"], "workers", 4096, "; `kvroute down` ends all workers")
    run = await deployment.scale(call.run_dir, num_workers, call.settings, call.say)
    call.say(f"{len(run.workers)} workers serve {run.settings['model']}: {', '.join(run.workers)}")
    return EXIT_OK


async def _drain(call: Invocation) -> int:
    run = await deployment.drain(call.run_dir, WorkerId(call.own["worker"]), call.settings, call.say)
    call.say(f"{len(run.workers)} workers serve {run.settings['model']}: {', '.join(run.workers)}")
    return EXIT_OK


def _count(flag: str, text: str, what: str, most: int, hint: str = "") -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:20]) <= most:
        raise ConfigError(f"{flag} {text}: not a number of {what} from 1 to {most}{hint}")
    return int(text)


async def _status(call: Invocation) -> int:
    run = runfile.read_run(call.run_dir)
    if run is None:
        if call.own["json"]:
            call.show(json.dumps({"is_running": False, "workers": []}))
        call.say("nothing is running; `kvroute up` starts workers")
        return EXIT_FAILURE
    state = await deployment_state(run, with_run(call.settings, run))
    call.show(json.dumps(state) if call.own["json"] else status_text(state))
    return EXIT_OK if state["is_running"] else EXIT_FAILURE


async def _warmup(call: Invocation) -> int:
    order = await asyncio.to_thread(warmup.read_order, call.own)
    run = runfile.running(call.run_dir)
    settings = with_run(call.settings, run)
    tokenizer = await asyncio.to_thread(Tokenizer, await launch.prepare_model_folder(settings, call.say))
    token_ids = await asyncio.to_thread(warmup.tokenise, order, tokenizer, settings)
    is_kept = await warmup.warm_up(run, settings, order, token_ids, say=call.say, show=call.show)
    return EXIT_OK if is_kept else EXIT_FAILURE


async def _pins(call: Invocation) -> int:
    run = runfile.running(call.run_dir)
    state = await pins.pin_state(run, with_run(call.settings, run))
    call.show(json.dumps(state) if call.own["json"] else pins.pin_text(state))
    return EXIT_OK


async def _unpin(call: Invocation) -> int:
    run = runfile.running(call.run_dir)
    await pins.unpin(run, with_run(call.settings, run), call.own["name"])
    call.say(f"pin {call.own['name']} is given up")
    return EXIT_OK


async def _doctor(call: Invocation) -> int:
    run = runfile.running(call.run_dir)
    settings = with_run(call.settings, run)
    folder = await launch.prepare_model_folder(settings, call.say)
    scheme = CacheScheme(settings.model_name, settings.block_size)
    own_key = parity_key(scheme, await asyncio.to_thread(tokenizer_fingerprint, folder))
    state = await checkup.check_up(run, settings, own_key, is_repair=call.own["repair"], say=call.say)
    call.show(json.dumps(state) if call.own["json"] else checkup.check_up_text(state))
    return EXIT_OK if state["is_healthy"] else EXIT_FAILURE


async def _directory(call: Invocation) -> int:
    is_json = call.own["json"]
    if call.own["view"] == "size":
        run = runfile.running(call.run_dir)
        state = await holdings.directory_size(run, with_run(call.settings, run))
        call.show(json.dumps(state) if is_json else holdings.size_text(state))
        return EXIT_FAILURE if any(worker["error"] for worker in state["workers"]) else EXIT_OK
    prompt = await asyncio.to_thread(read_prompt, call.own)
    run = runfile.running(call.run_dir)
    settings = with_run(call.settings, run)
    tokenizer = await asyncio.to_thread(Tokenizer, await launch.prepare_model_folder(settings, call.say))
    token_ids = await asyncio.to_thread(prompt_tokens, prompt, tokenizer, settings, add_generation_prompt=True)
    state = await holdings.who_holds(run, settings, token_ids, salt=prompt.salt)
    call.show(json.dumps(state) if is_json else holdings.who_text(state))
    return EXIT_OK


async def _demo(call: Invocation) -> int:
    from router.demo import run_demo

    return await run_demo(call.settings, call.own["output_dir"], is_json=call.own["json"], say=call.say, show=call.show)


async def _calibrate(call: Invocation) -> int:
    from router.calibrate import run_calibrate

    own = call.own
    return await run_calibrate(
        call.settings,
        output=own["out"],
        is_validated=own["validate"],
        is_json=own["json"],
        say=call.say,
        show=call.show,
    )


async def _plan(call: Invocation) -> int:
    settings, own = call.settings, call.own
    lengths = planning.parse_lengths("--lengths", own["lengths"])
    gpu_memory_bytes = planning.parse_size("--gpu-memory", own["gpu_memory"])
    path = own["config_json"] or await asyncio.to_thread(launch.model_config_file, settings)
    plan = planning.make_plan(
        await asyncio.to_thread(planning.read_shape, path),
        gpu_memory_bytes=gpu_memory_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        dtype=settings.dtype,
        block_size_tokens=settings.block_size,
        lengths_tokens=lengths,
        system_prompt_tokens=planning.parse_count("--system-prompt", own["system_prompt"]),
        weight_bytes=None if own["weights"] is None else planning.parse_size("--weights", own["weights"]),
    )
    call.show(planning.plan_json(plan) if own["json"] else planning.plan_text(plan))
    return EXIT_OK


async def _replay(call: Invocation) -> int:
    from router.replay_command import run_replay

    await run_replay(call.settings, call.own, call.say, call.show)
    return EXIT_OK


async def _bench(call: Invocation) -> int:
    name = call.own["benchmark"]
    figures = await run_benchmark(name, call.say)
    call.show(figures_json(name, figures) if call.own["json"] else figures_text(figures))
    return EXIT_OK


_COMMANDS: Mapping[str, Callable[[Invocation], Coroutine[Any, Any, int]]] = {
    "batch": _batch,
    "serve": _serve,
    "up": _up,
    "down": _down,
    "top": _top,
    "explain": _explain,
    "scale": _scale,
    "drain": _drain,
    "status": _status,
    "warmup": _warmup,
    "pins": _pins,
    "unpin": _unpin,
    "doctor": _doctor,
    "directory": _directory,
    "demo": _demo,
    "plan": _plan,
    "replay": _replay,
    "bench": _bench,
    "calibrate": _calibrate,
}
