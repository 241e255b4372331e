"""What decides runs anywhere: the protocol and its neighbours import no tensor, wire, transport or clock."""

from __future__ import annotations

import pytest

from tests.support.imports import loaded_by

pytestmark = pytest.mark.processes

CODE = """
import kvtransfer.protocol.receiver, kvtransfer.protocol.sender
import kvtransfer.extents, kvtransfer.digest, kvtransfer.layout
import kvtransfer.transports.registry, kvtransfer.transfer_thread
"""


def test_neither_torch_nor_grpc_nor_ray_nor_nixl_comes_along() -> None:
    assert loaded_by(CODE, "torch", "grpc", "ray", "nixl", "nixl_cu12", "numpy") == []
