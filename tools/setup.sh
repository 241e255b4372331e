#!/usr/bin/env bash
# Creates the virtual environment and installs everything into it. Called by `make setup`, which keeps a stamp
# so that this runs only when something has changed. Running it again is harmless.
#
#   PYTHON   interpreter to create the environment with   (python3)
#   VENV     where the environment is                     (.venv)
#   TORCH    what pip installs as torch, options included (torch==2.13.0)
#   TRITON   what tests of kernels for GPUs are interpreted by where torch brings none (triton==3.7.1); empty: nothing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
TORCH="${TORCH:-torch==2.13.0}"
TRITON="${TRITON-triton==3.7.1}"
LOCK=requirements/lock.txt
LOG="$VENV/setup.log"

fail() {
    printf 'set-up: %s\n' "$@" >&2
    exit 1
}

recent_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

# pip, with one line for each large download; all that it says is in the log. It would compile all modules on one core.
install() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip install --no-compile --no-input --progress-bar off "$@" 2>&1 \
        | tee -a "$LOG" | awk '
            /^ *Downloading .*[0-9] [MG]B\)/ { sub(/^ */, "      "); print; fflush() }
            /^Installing collected packages/  { printf "      installing %d packages\n", NF - 3; fflush() }' \
        || { grep -E '^ERROR' "$LOG" >&2 || tail -n 15 "$LOG" >&2; fail "pip failed as said above; all of its output is in $LOG"; }
}

if ! [ -x "$VENV/bin/python" ]; then
    echo "[1/4] creating $VENV"
    command -v "$PYTHON" >/dev/null || fail "$PYTHON not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11"
    recent_enough "$PYTHON" || fail "$("$PYTHON" --version) is too old, 3.11 or newer is needed; name one: make PYTHON=python3.11"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON lacks its venv module; on Debian and Ubuntu: apt install python3-venv"
    "$PYTHON" -m venv "$VENV"
else
    echo "[1/4] $VENV is there"
    recent_enough "$VENV/bin/python" || fail "$VENV has $("$VENV/bin/python" --version), 3.11 or newer is needed; remove it: make distclean"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || fail "$VENV has no pip (an interrupted set-up?); remove it: make distclean"
fi

: > "$LOG"
# torch goes first, so that the build chosen here is the one that all that depends on it finds.
# The lock does not name torch; the word splitting is wanted: TORCH may hold options for pip.
echo "[2/4] installing $TORCH"
# shellcheck disable=SC2086
install --constraint "$LOCK" $TORCH

# A build of torch for CUDA has brought its own. Of wheels alone, and not for all machines there are some.
if [ -n "$TRITON" ] && ! "$VENV/bin/python" -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("triton"))'; then
    if "$VENV/bin/python" -m pip download --no-deps --only-binary :all: --quiet --dest "$VENV/triton" "$TRITON" >> "$LOG" 2>&1; then
        install --no-deps "$VENV"/triton/triton-*.whl
    else
        echo "      no wheel of $TRITON for this machine: tests of kernels for GPUs will skip themselves"
    fi
    rm -rf "$VENV/triton"
fi

echo "[3/4] installing tandem-serving and its dependencies (pinned in $LOCK)"
install --constraint "$LOCK" --editable '.[dev]'

echo "[4/4] compiling Python modules"
# On all cores. Some packages bring templates and examples that are no Python of today: they fail, and nobody imports them.
"$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >> "$LOG" 2>&1 || true
