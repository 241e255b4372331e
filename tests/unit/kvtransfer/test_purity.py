"""What decides runs anywhere: the protocol and its neighbours import no tensor, wire, transport or clock."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROBE = """
import sys
import kvtransfer.protocol.receiver, kvtransfer.protocol.sender
import kvtransfer.extents, kvtransfer.digest, kvtransfer.layout
import kvtransfer.transports.registry, kvtransfer.transfer_thread
print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'grpc', 'ray', 'nixl', 'nixl_cu12', 'numpy'}))
"""


def test_neither_torch_nor_grpc_nor_ray_nor_nixl_comes_along() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
