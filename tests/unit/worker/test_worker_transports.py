"""What of the configuration a worker's transport is made by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtransfer.transports.nccl import NcclTransport
from kvtransfer.transports.registry import transport_names
from tandem.core.config import TransportConfig
from tandem.worker.parts import WorkerPlace, make_transport


def a_place(incarnation: str) -> WorkerPlace:
    return WorkerPlace("prefill-0", incarnation, Path("unused"), kv_bytes=0, num_threads=1)


@pytest.mark.long
@pytest.mark.parametrize("name", transport_names())
def test_a_library_that_blocks_waits_for_a_peer_as_long_as_the_lease(name: str) -> None:
    transport = make_transport(TransportConfig(name=name, lease_s=60.0), a_place(f"{name}-lease#1"))
    arena = np.zeros(64, np.uint8)
    try:
        transport.register(arena.ctypes.data, arena.nbytes, owner=arena)
        assert transport.timeout_s == 60.0
        if isinstance(transport, NcclTransport):
            assert transport._side is not None
            assert transport._side.timeout_s == 60.0, "each of its helper threads"
    finally:
        transport.close()
