"""Processes that can import only what a bare machine with a GPU has: these packages, and what they bring along.

All other packages of this environment are hidden there by `tests/support/hiding/sitecustomize.py`: an import of theirs
fails as if they were not installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
from pathlib import Path

#: Which have wheels for any machine, and no part in serving on CPUs, over NIXL or under Ray.
PACKAGES = (
    "torch", "triton", "transformers", "numpy", "pytest", "safetensors", "tokenizers", "grpcio", "protobuf", "pyyaml",
    "xxhash", "jinja2", "prometheus-client", "uvloop",
)  # fmt: skip

ROOT = Path(__file__).parents[2]
HIDDEN = "HIDDEN_PACKAGES"


def environment(**more: str) -> dict[str, str]:
    """Of such a process. Plugins that pytest would find by themselves are not there either."""
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support" / "hiding"), str(ROOT)]),
        HIDDEN: json.dumps(hidden_modules()),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
    }
    return os.environ | own | more


@functools.cache
def hidden_modules() -> tuple[str, ...]:
    """Names of all top-level modules that other packages than those have."""
    kept, owners = _with_what_they_need(PACKAGES), importlib.metadata.packages_distributions()
    own = {path.name for path in ROOT.iterdir()}
    return tuple(sorted(name for name, of in owners.items() if name not in own and not kept & set(map(_normal, of))))


def _with_what_they_need(names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    waiting = [_normal(name) for name in names]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # triton, or for another system
        found.add(name)
        waiting += [_normal(re.split(r"[^\w.-]", each)[0]) for each in needed if "extra ==" not in each]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
