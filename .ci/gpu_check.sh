#!/usr/bin/env bash
# Usage: gpu_check.sh VENV
#
# On a machine with an NVIDIA GPU: installs the gpu engine where it is missing, runs the tests of the real engine and
# the demo, and prints one report. Exits 0 when all passed, 1 when something failed, 2 when this machine cannot do it.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$1

missing() {
  echo "gpu-check: $*" >&2
  exit 2
}
command -v nvidia-smi >/dev/null || missing "no nvidia-smi: this machine has no NVIDIA driver, so nothing was checked"
gpus=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1) ||
  missing "nvidia-smi finds no GPU, so nothing was checked: $gpus"

make --no-print-directory ENGINE=gpu install || missing "the gpu engine cannot be installed"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
vllm_version=$("$venv/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("vllm"))') ||
  missing "$venv holds no vllm"
"$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
  missing "the driver answers, but this torch cannot use it; see nvidia-smi for the CUDA version that it supports"

echo "gpu-check: running the tests of the real engine" >&2
"$venv/bin/python" -m pytest -m "vllm or gpu" >"$scratch/tests" 2>&1
tests_exit=$?
echo "gpu-check: running the demo" >&2
"$venv/bin/kvroute" demo --json -o "$scratch/demo" >"$scratch/demo.json" 2>"$scratch/demo.log"
demo_exit=$?

echo "== gpu-check report"
echo "commit:  $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
while read -r gpu; do echo "gpu:     $gpu"; done <<<"$gpus"
echo "vllm:    $vllm_version"
echo "tests:   exit $tests_exit: $(tail -n 1 "$scratch/tests")"
echo "demo:    exit $demo_exit"
cat "$scratch/demo.json"
if [ "$tests_exit" != 0 ]; then
  echo "== last lines of the tests"
  tail -n 60 "$scratch/tests"
fi
if [ "$demo_exit" != 0 ]; then
  echo "== last lines of the demo"
  tail -n 30 "$scratch/demo.log"
fi
[ "$tests_exit" = 0 ] && [ "$demo_exit" = 0 ]
