"""What the tests of the cluster share."""

from __future__ import annotations

import pytest

from tandem.cluster.spec import ClusterSpec
from tandem.core.config import Config


@pytest.fixture
def spec() -> ClusterSpec:
    """Of a cluster of which nothing is started here."""
    return ClusterSpec(
        config=Config(),
        model_dir="",
        kv_bytes={},
        num_threads={},
        local=True,
        control_port=1,
        node_id="",
        ray_address="",
        log_directory="",
    )
