"""A process of one thread in which grammars are tried: each in a fork of its own, that ends with it.

What compiling a grammar takes cannot be told from it, and nothing ends it within a process: an expression of 12 KB can
take a quarter of a minute. So a fork has as much of the processor and of memory as it is given, and the kernel ends it.

Started by `router.http.grammar_trials` with the number of a socket, over which come other sockets. The first one brings
the vocabulary; each other one a grammar, and takes back what is to be said of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import statistics
import sys
import time
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.core.grammar import CompiledGrammar
from tandem.core.grammar_compiler import compile_grammar
from tandem.core.slices import take_usual_slices
from tandem.core.vocabulary import Description

#: Said before anything else: an end after that is the kernel's bound.
BEGUN = b" "
#: Memory that a trial may take beside its stack, in bytes.
MAX_BYTES = 1 << 30
# A mask that takes longer would hold up the batch of whoever follows the grammar. So many are made, and half may.
_MAX_MASK_S, _NUM_MASKS = 0.01, 5


def main() -> None:
    take_usual_slices()  # the router's loop has started it
    with socket.socket(fileno=int(sys.argv[1])) as door:
        _, sockets, _, _ = socket.recv_fds(door, 1, 1)
        if not sockets:
            return
        tokens = Description(**json.loads(_read(socket.socket(fileno=sockets[0])))).tokens()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks: their sockets tell of their ends
        while True:
            _, sockets, _, _ = socket.recv_fds(door, 1, 1)
            if not sockets:
                return
            if os.fork() == 0:
                door.close()
                with contextlib.suppress(BaseException):
                    _try(socket.socket(fileno=sockets[0]), tokens)
                os._exit(0)
            os.close(sockets[0])


def _read(sender: socket.socket) -> bytes:
    """All that comes until the sender says no more. The socket stays open."""
    parts = []
    while part := sender.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def _try(asker: socket.socket, tokens: Any) -> None:
    asked = json.loads(_read(asker))
    asker.sendall(BEGUN)
    _end_with(asker)
    text: str = asked["text"]
    failure = ""
    try:
        _bound(asked["max_s"], len(text.encode()))
        grammar = compile_grammar(text, tokens)
        grammar.try_out()
        said = _too_slow(grammar)
    except InvalidRequestError as error:
        said = error.message
    except MemoryError:
        return  # that is the bound, too
    except Exception as error:  # noqa: BLE001 - told; it says nothing of the grammar
        said, failure = "", f"{type(error).__name__}: {error}"
    asker.sendall(json.dumps({"said": said, "failure": failure, "cpu_s": time.process_time()}).encode())


def _end_with(asker: socket.socket) -> None:
    """From now on the kernel ends this process where the asker closes its end: nobody waits for the verdict."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(asker, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asker, fcntl.F_SETFL, fcntl.fcntl(asker, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(asker, 0)
    if closed.poll(0):  # before that
        os._exit(0)


def _bound(max_s: float, num_bytes: int) -> None:
    """From now on the kernel ends this process where it takes more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, max_s)
    # Where the host's memory ends before that of the trial does, no worker is to go for it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/statm") as file:
        num_mapped = int(file.read().split()[0]) * resource.getpagesize()
    # A stack takes 4096 bytes of addresses for each of the text, and hardly any of memory.
    most = num_mapped + 4096 * num_bytes + (64 << 20) + MAX_BYTES
    # A limit under which the router was started holds here, too, and cannot be raised.
    known = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    most = min([most, *known])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # what a library says when its memory ends is nobody's to read


def _too_slow(grammar: CompiledGrammar) -> str:
    """What is to be said of masks that take too long; empty: they do not."""
    matcher, taken_s = grammar.new_matcher(), list[float]()
    while len(taken_s) < _NUM_MASKS:
        began_s = time.thread_time()
        mask = matcher.inner.compute_bitmask()
        taken_s.append(time.thread_time() - began_s)
        if matcher.inner.is_error() or (token_id := _first_of(mask)) is None:
            break
        if matcher.inner.try_consume_tokens([token_id]) == 0:
            break
    if (usual_s := statistics.median_low(taken_s)) <= _MAX_MASK_S:
        return ""
    return (
        f"each token of it takes {1e3 * usual_s:.0f} ms to choose, and may take {1e3 * _MAX_MASK_S:.0f}: it has too "
        "long a text or expression"
    )


def _first_of(mask: bytes) -> int | None:
    """The first token that may come."""
    return next((8 * at + (byte & -byte).bit_length() - 1 for at, byte in enumerate(mask) if byte), None)


if __name__ == "__main__":
    main()
