"""State files as a `tandem serve` would have left them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tandem.cluster.statefile import ClusterFile, Stage
from tandem.core.pidfd import started_at


def cluster_file(**changes: Any) -> ClusterFile:
    """Of a ready cluster whose `tandem serve` lives and is not this process."""
    started = started_at(os.getppid())
    assert started is not None
    file = ClusterFile(8000, os.getppid(), started, True, Stage.READY, 1.0e9, control_address="127.0.0.1:1")
    return replace(file, **changes)
