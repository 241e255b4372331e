"""Since when what was just read from a connection had lain in the kernel.

A loop that is busy reads late, and no stamp of its own shows it. TCP remembers when it last received something; its
clock ticks a hundred to a thousand times a second, and so does what is told here.

Source: Linux, `tcpi_last_data_recv` in tcp(7) and `tcp_get_info()`; the tick is that of CLOCK_MONOTONIC_COARSE.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

_NUM_BYTES = 56  # of `struct tcp_info`, up to the field
_OFFSET = 52  # eight bytes, then `__u32` fields; this one is the twelfth
_MS = struct.Struct("=I")
_COARSE = 6  # CLOCK_MONOTONIC_COARSE: the time of the last tick

#: Seconds between two ticks.
TICK_S = time.clock_getres(_COARSE) if sys.platform == "linux" else 0.0


def came_s(sock_fd: int, by_s: float) -> float:
    """When the last that was received on the TCP connection `sock_fd` had come, on the clock of `time.monotonic`.

    Right within a tick; `by_s` where that is not known, or where less than a tick lies between.
    """
    if TICK_S == 0.0:
        return by_s
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=sock_fd)
        try:
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NUM_BYTES)
        finally:
            sock.detach()  # it is not ours to close
    except OSError:  # it is closed, or has broken meanwhile, or is no TCP
        return by_s
    if len(told) < _NUM_BYTES:
        return by_s
    tick_s = time.clock_gettime(_COARSE)
    num_ticks = round(_MS.unpack_from(told, _OFFSET)[0] / (TICK_S * 1e3))
    return min(by_s, tick_s - (num_ticks - 1) * TICK_S) if num_ticks > 0 else by_s
