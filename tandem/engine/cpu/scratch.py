"""Memory that a kernel has for itself while it computes, for Numba's code."""

from __future__ import annotations

import numpy as np

from tandem.engine.cpu.compiling import inlined
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES


@inlined
def on_lines(count):  # type: ignore[no-untyped-def] # pragma: no cover - compiled
    """Memory for so many float32, from the begin of a cache line on."""
    room = np.empty(count + LINE_BYTES // FLOAT_BYTES, dtype=np.float32)
    skipped = -room.ctypes.data % LINE_BYTES // FLOAT_BYTES
    return room[skipped : skipped + count]
