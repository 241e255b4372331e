"""What a process holds when it is ready is not gone through again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import gc, json
from tandem.core import garbage
held = [[number] for number in range(100_000)]
before = len(gc.get_objects())
garbage.settle()
looked_at = len(gc.get_objects())
new = [[number] for number in range(50)]
new.append(new)
del new
print(json.dumps([before, looked_at, gc.get_freeze_count(), gc.get_threshold(), gc.collect()]))
"""


def test_what_is_there_is_frozen_and_what_comes_is_still_collected() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, looked_at, num_frozen, thresholds, num_found = json.loads(run.stdout)
    assert before > 100_000
    assert looked_at < 1000
    assert num_frozen > 100_000
    assert thresholds[2] == 1000
    assert num_found >= 1, "the cycle"
