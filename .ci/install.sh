#!/usr/bin/env bash
# Usage: install.sh VENV cpu|gpu
#
# Installs kvroute, one engine and the development tools into VENV, from the lock of that engine, resolving nothing.
# Needs Python 3.11 or newer (PYTHON names another interpreter) and a package index that pip reaches.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
engine=$2
lock=.ci/lock-$engine.txt
say() { echo "install: $*" >&2; }
fail() {
  say "$*"
  exit 2
}

[ -f "$lock" ] || fail "ENGINE must be cpu or gpu, not '$engine'"
started_at=$SECONDS

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; on Debian: apt-get install python3 python3-venv, or set PYTHON"
}

other=$([ "$engine" = cpu ] && echo gpu || echo cpu)
if [ -e "$venv/installed-$other" ]; then
  say "$venv holds the $other engine, and both ship the package vllm: building it anew for $engine"
  rm -rf "$venv"
fi

if [ ! -x "$venv/bin/pip" ]; then
  python=$(find_python)
  say "creating $venv with $("$python" --version)"
  if ! "$python" -m venv --clear "$venv"; then
    rm -rf "$venv"
    fail "this Python cannot create virtual environments; on Debian: apt-get install python3-venv"
  fi
fi
rm -f "$venv/installed-$engine"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$engine" = cpu ]; then
  torch=$(grep '^torch==' "$lock")
  say "installing $torch"
  if ! pip install -qq --no-deps "$torch" 2>/dev/null; then
    say "the configured index has no $torch: taking it from PyTorch's own CPU index"
    pip install -qq --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
  fi
fi

say "installing $(grep -c == "$lock") locked packages for $engine; the first time takes some minutes and gigabytes"
pip install -qq --no-deps --only-binary :all: --requirement "$lock"

# What the lock no longer names goes, so that an updated environment equals a new one.
normal() { tr 'A-Z_.' 'a-z--' | sort -u; }
superfluous=$(comm -23 \
  <(pip list --format=freeze | sed 's/==.*//' | normal) \
  <({ sed -n 's/==.*//p' "$lock"; echo pip; echo kvroute; } | normal))
if [ -n "$superfluous" ]; then
  say "removing what the lock does not name:" $superfluous
  pip uninstall -qq --yes $superfluous
fi

pip install -qq --no-deps --no-build-isolation --editable .

say "checking that the engine can be imported"
VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -c 'import vllm' ||
  fail "vllm does not import; on Debian it needs the package libnuma1"

touch "$venv/installed-$engine"
say "done in $((SECONDS - started_at)) s: $(du -sh "$venv" | cut -f1) in $venv, engine $engine"
