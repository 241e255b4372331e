"""What the tests of the cluster share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tandem.cluster.spec import ClusterSpec
from tandem.core.config import Config


@pytest.fixture
def spec() -> ClusterSpec:
    """Of a cluster of which nothing is started here."""
    return ClusterSpec(
        config=Config(),
        model_name="m",
        model_dir="",
        kv_bytes={},
        num_threads={},
        local=True,
        control_port=1,
        node_id="",
        ray_address="",
        log_directory="",
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])
