#!/usr/bin/env bash
# Make the virtual environment VENV from the lock LOCK, or return at once when it already is that environment.
#
#   torch first, with its own dependencies; then every line of the lock with --no-deps (cpu.txt says why);
#   then this package, editable. The stamp is written last, so an interrupted run never counts as ready.
#
# Variables: VENV, LOCK, PYTHON (interpreter to build from), TORCH_INDEX (extra index with PyTorch's own builds),
# PIP_FLAGS (default -qq: errors only; empty shows what pip does).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
LOCK=${LOCK:-requirements/cpu.txt}
PIP_FLAGS=${PIP_FLAGS--qq}
STAMP=$VENV/.ready

fail() {
    echo "setup: $1" >&2
    exit 2
}

say() { echo "setup: $1 ($(date +%H:%M:%S))"; }

supported() { "$1" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        supported "$name" && { command -v "$name"; return; }
    done
    fail "needs Python 3.11 (3.12 and 3.13 also resolve) and found ${PYTHON:+$PYTHON, }$(python3 --version 2>&1 || echo 'no python3').
       Install it (Debian: apt install python3.11 python3.11-venv; conda: conda env create -f environment.yml) or name
       one: make setup PYTHON=/path/to/python3.11"
}

[ -f "$LOCK" ] || fail "no lock at $LOCK; use LOCK=requirements/cpu.txt or LOCK=requirements/gpu.txt"

# One setup at a time: two terminals may run `make test` and `make reproduce` together.
if command -v flock >/dev/null; then
    exec 9>"${VENV%/}.lock"
    flock -n 9 || { say "waiting for another setup of $VENV"; flock 9; }
fi

# The stamp's two lines: where the environment was made (its scripts hold that path) and what it was made of.
here=$(pwd -P)
content=$(cat "$LOCK" pyproject.toml requirements/install.sh | cksum)
complete() { [ -x "$VENV/bin/python" ] && [ "$(sed -n 1p "$STAMP" 2>/dev/null)" = "$here" ]; }
if complete && [ "$(sed -n 2p "$STAMP")" = "$content" ]; then
    exit 0
fi

started=$SECONDS
if complete; then
    say "updating $VENV to $LOCK"
    rm -f "$STAMP"
else
    python=$(find_python)
    say "making $VENV with $("$python" --version) from $LOCK: 4 to 5 GB, a few minutes"
    "$python" -m venv --clear "$VENV" || fail "$python cannot make a virtual environment.
       Debian: apt install python3-venv; or name another: make setup PYTHON=/path/to/python3.11"
fi
pip() { "$VENV/bin/python" -m pip "$1" $PIP_FLAGS --disable-pip-version-check "${@:2}"; }

say "1/3 torch and its libraries"
pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' "$LOCK")"
say "2/3 $(grep -c '==' "$LOCK") locked packages"
pip install --no-deps -r "$LOCK"
say "3/3 trace-rl, editable"
pip install --no-deps --no-build-isolation -e .

printf '%s\n%s\n' "$here" "$content" >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
say "ready after $((SECONDS - started)) s"
