"""Certificates of one cluster, and of another one that has nothing to do with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.certs import make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "ours", days=90).directory


@pytest.fixture(scope="session")
def foreign_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "theirs", days=90).directory
