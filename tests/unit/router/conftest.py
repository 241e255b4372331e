"""A real router on loopback with a scripted pair of workers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from router_fakes import FakeDecode, FakePool, FakePrefill
from router_site import Site, write_checkpoint

from router.server import RouterServer
from tandem.core import config as configuration


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def make_site(checkpoint: Path) -> Iterator[Callable[..., Site]]:
    """Starts routers with `overrides` of the configuration (dotted names); each gets a pair of workers."""
    sites: list[Site] = []

    def make(overrides: dict[str, Any] | None = None, *, with_workers: bool = True) -> Site:
        base = {"model.served_names": ["toy", "toy/alias"], "transport.lease_s": 1.0}
        config = configuration.load(None, {**base, **(overrides or {})})
        server = RouterServer(config, model_dir=checkpoint)
        info = server.start()
        pool = FakePool(info.control_address)
        site = Site(info.http_url, pool, FakePrefill("prefill-0"), FakeDecode("decode-0"), server)
        sites.append(site)
        if with_workers:
            pool.add(site.prefill, site.decode)
            site.wait_ready()
        return site

    yield make
    for site in sites:
        site.server.stop(drain_s=0.2)
        site.pool.close()


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()
