"""A real router on loopback with a scripted pair of workers behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router_site import Site, opened_site, write_checkpoint
from tests.support.tool_site import opened_tool_site


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def make_site(checkpoint: Path) -> Iterator[Callable[..., Site]]:
    """Starts routers with `overrides` of the configuration (dotted names); each gets a pair of workers."""
    with contextlib.ExitStack() as sites:

        def make(overrides: dict[str, Any] | None = None, **options: Any) -> Site:
            return sites.enter_context(opened_site(checkpoint, overrides, **options))

        yield make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


@pytest.fixture(scope="module")
def shared_tool_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened_tool_site(tmp_path_factory.mktemp("models")) as site:
        yield site


@pytest.fixture
def tool_site(shared_tool_site: Site) -> Site:
    """A router whose model knows tools; its workers have heard of nothing yet."""
    shared_tool_site.prefill.received.clear()
    shared_tool_site.decode.received.clear()
    return shared_tool_site
