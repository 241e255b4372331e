"""Passes Ethernet frames on between two interfaces, each of them some time after it came.

    python relay.py ONE OTHER SECONDS

Not every kernel has netem, so delay is made here, by packet sockets. Frames go as the
kernel has them, with their offloads (`PACKET_VNET_HDR`): a segment of 64 KiB stays one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ALL_PROTOCOLS = socket.htons(3)
_LARGEST = 1 << 17
_BUFFER_BYTES = 16 << 20


def _open(interface: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _ALL_PROTOCOLS)
    for option in (_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING):
        found.setsockopt(_SOL_PACKET, option, 1)
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        found.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    found.bind((interface, 0))
    found.setblocking(False)
    return found


def relay(one: socket.socket, other: socket.socket, delay_s: float) -> None:
    """For ever."""
    ways = {one: other, other: one}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()  # in the order of their times: all wait equally long
    while True:
        left_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([one, other], [], [], left_s)
        now_s = time.monotonic()
        for source in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    under_way.append((now_s + delay_s, ways[source], source.recv(_LARGEST)))
        while under_way and under_way[0][0] <= now_s:
            _, target, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the interface is full, or down: the frame is lost, as on any network
                target.send(frame)


if __name__ == "__main__":
    relay(_open(sys.argv[1]), _open(sys.argv[2]), float(sys.argv[3]))
