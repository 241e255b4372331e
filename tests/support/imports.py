"""What comes along when something is imported."""

from __future__ import annotations

import ast
import subprocess
import sys

HEAVY = ("torch", "grpc", "ray", "google.protobuf", "nixl", "nixl_cu12")


def loaded_by(code: str, *names: str) -> list[str]:
    """Those of the modules `names` that are loaded once `code` has run, in a process of its own."""
    program = f"{code}\nimport sys\nprint(sorted({set(names)} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found: list[str] = ast.literal_eval(run.stdout.splitlines()[-1])
    return found
