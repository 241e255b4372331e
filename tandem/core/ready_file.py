"""How a process tells its parent that it is ready."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_ready_file(path: Path, facts: object) -> None:
    """Write `facts` as JSON, atomically: a reader sees all of it or no file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(facts))
    partial.replace(path)
