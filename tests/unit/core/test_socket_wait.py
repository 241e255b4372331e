"""Since when bytes had lain in the kernel, of real sockets."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from tandem.core.socket_wait import TICK_S, came_s


@pytest.mark.long
def test_what_was_read_late_had_come_before() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        client = socket.create_connection(listener.getsockname())
        for is_accepted in (False, True):
            client.send(b"x")
            sent_s = time.monotonic()
            threading.Event().wait(0.1)  # the time that is measured
            if not is_accepted:
                server, _ = listener.accept()
            assert server.recv(10) == b"x"
            now_s = time.monotonic()
            assert came_s(server.fileno(), now_s) == pytest.approx(sent_s, abs=2 * TICK_S + 0.005)
            assert came_s(server.fileno(), sent_s - 1) == sent_s - 1, "it had come by then, as its reader knows"
        server.send(b"y")  # the socket is still its owner's
        client.close()
        server.close()


def test_of_what_is_no_tcp_nothing_is_known() -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        one.send(b"x")
        assert came_s(other.fileno(), 7.0) == 7.0
