"""One `tandem serve` for the files `test_serve*.py`, one after the other; the last test of the last of them ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Serve


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """1 prefill, 1 decode, of which one may change its role; two routers at first. Leave the workers as they were."""
    pool = {"threads": 1}
    serve = Serve(
        tmp_path_factory.mktemp("serve"), "--routers", "2", pools={"prefill": pool, "decode": pool, "flexible": 1}
    )
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()
