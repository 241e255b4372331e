"""Raw writes between two processes: what a transport gives, with its memory registered and nothing else to do.

python -m benchmarks.parts.wire SPEC --ready-file FILE

Starts a second process of itself that owns the target memory. Both poll without a pause. The seconds of each run, from
before the post to its completion, go into the ready file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtransfer.extents import ArenaShape, PageArea, PageWrite, merge_extents
from kvtransfer.transports.base import Transport
from kvtransfer.transports.events import PeerId, WriteCompleted, WriteFailed
from kvtransfer.transports.registry import create_transport
from tandem.core.errors import TransportError
from tandem.core.ready_file import write_ready_file
from tandem.engine.arena import KVArena
from tandem.engine.layout import KVLayout

_WRITE_S = 30.0
_NUM_WARM_UP = 3


@dataclass(frozen=True)
class WireResult:
    """What was written, and how long it took."""

    seconds: list[float]  # of each run
    num_bytes: int  # of one run, as `num_descriptors`
    num_descriptors: int


def measure(transport: str, layout: KVLayout, num_pages: int, remote_pages: Sequence[int], num_runs: int) -> WireResult:
    """Write `len(remote_pages)` neighbouring pages, in all layers, to `remote_pages` of the other process.

    Args:
        num_pages: of each arena.

    Raises:
        TransportError: the transport is not there, or a write failed or took too long.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    target = context.Process(target=_be_target, args=(there, transport, layout, num_pages, remote_pages), daemon=True)
    target.start()
    there.close()
    try:
        return _write_all(here, transport, layout, num_pages, remote_pages, num_runs)
    except EOFError:
        raise TransportError("the target of raw writes ended; its error is above") from None
    finally:
        here.close()  # ends the target
        target.join(5)
        if target.is_alive():
            target.kill()
            target.join()


def _write_all(
    target: Connection,
    transport: str,
    layout: KVLayout,
    num_pages: int,
    remote_pages: Sequence[int],
    num_runs: int,
) -> WireResult:
    shape = ArenaShape(layout.num_layers, num_pages, layout.extent_bytes)
    writes = [
        PageWrite(layer, local, remote)
        for layer in range(layout.num_layers)
        for local, remote in enumerate(remote_pages)
    ]
    descriptors = merge_extents(writes, shape, shape)
    num_bytes = sum(descriptor.num_bytes for descriptor in descriptors)
    end = _open_end(transport, layout, num_pages, range(len(remote_pages)))
    try:
        target.send(end.metadata())
        peer = end.connect(target.recv())
        seconds = []
        for _ in range(_NUM_WARM_UP + num_runs):
            target.send((end.agent_name, PageArea(remote_pages, shape)))
            target.recv()  # it expects the write and polls
            begun_s = time.perf_counter()
            end.post_write(peer, descriptors)
            _poll_until_done(end)
            seconds.append(time.perf_counter() - begun_s)
            target.send(None)
            target.recv()
    finally:
        end.close()
    return WireResult(seconds[_NUM_WARM_UP:], num_bytes, len(descriptors))


def _poll_until_done(end: Transport) -> None:
    deadline_s = time.monotonic() + _WRITE_S
    while True:
        for event in end.poll():
            match event:
                case WriteCompleted():
                    return
                case WriteFailed():
                    raise TransportError(f"a raw write failed: {event.error}")
        if time.monotonic() > deadline_s:
            raise TransportError(f"a raw write did not end within {_WRITE_S:.0f} s")


def _be_target(source: Connection, transport: str, layout: KVLayout, num_pages: int, pages: Sequence[int]) -> None:
    """The other process: owns memory, and polls from each announced write to its end."""
    end = _open_end(transport, layout, num_pages, pages)
    try:
        metadata = source.recv()
        source.send(end.metadata())
        end.connect(metadata)
        while True:
            name, area = source.recv()
            end.expect_incoming("raw", PeerId(name), area)
            source.send(None)
            while not source.poll():
                end.poll()
            source.recv()
            end.end_incoming("raw")
            source.send(None)
    except EOFError:
        pass  # the measurement is over
    finally:
        end.close()


def _open_end(transport: str, layout: KVLayout, num_pages: int, pages: Sequence[int]) -> Transport:
    """A transport with an arena of `num_pages`, of which `pages` have been touched."""
    arena = KVArena(layout, num_pages)
    for page in pages:
        arena.tensor[:, page].fill_(1)
    end = create_transport(transport, f"raw-{os.getpid()}-{time.monotonic_ns()}")
    end.register(arena.base_address, arena.num_bytes, owner=arena.tensor)
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description="Raw writes between two processes")
    parser.add_argument("spec", help="JSON: transport, layout, num_pages, remote_pages, num_runs")
    parser.add_argument("--ready-file", type=Path, required=True, help="written, as JSON, when all is measured")
    options = parser.parse_args()
    spec: dict[str, Any] = json.loads(options.spec)
    result = measure(**{**spec, "layout": KVLayout(**spec["layout"])})
    write_ready_file(options.ready_file, asdict(result))


if __name__ == "__main__":
    main()
