#!/usr/bin/env bash
# Writes requirements/lock.txt: upgrades what pyproject.toml leaves open, then records what is installed.
# torch, its setuptools, and the CUDA packages that a torch build pins by itself stay out: TORCH chooses them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"

installed_torch="torch==$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
"$VENV/bin/python" -m pip install --quiet --upgrade --upgrade-strategy eager \
    --constraint <(printf '%s\n' "$installed_torch") --editable '.[dev]'
{
    echo '# Exact versions of everything that `make setup` installs, used as pip constraints. Made by `make lock`.'
    echo '# Not here: torch (see TORCH in the Makefile), its setuptools, and the CUDA packages that its builds pin.'
    "$VENV/bin/python" -m pip freeze --all --exclude-editable \
        | grep -viE '^(torch|triton|pip|setuptools|tandem[-_]serving|nvidia-.*|cuda-.*)( @ |==)' | LC_ALL=C sort -f
} > requirements/lock.txt
echo "wrote $(grep -c == requirements/lock.txt) pins to requirements/lock.txt"
