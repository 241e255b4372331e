"""Checks of the tiers below the page pools: a directory that can be used, and room on disk and in host memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tandem.cluster.checks.finding import Finding
from tandem.cluster.checks.host import Host, human_bytes
from tandem.core.config import CacheConfig
from tandem.core.errors import ConfigError


def check_tiers(cache: CacheConfig, num_workers: int, host: Host, *, local: bool) -> Finding:
    """Whether `num_workers` workers of this host can keep their pages; elsewhere, each warns in its own log.

    Raises:
        ConfigError: naming the key.
    """
    found = []
    if cache.host_bytes:
        found.append(_host_memory(cache, num_workers if local else 1, host))
    if cache.disk_path:
        path = Path(cache.disk_path).expanduser()
        if not local:
            return _elsewhere(path)
        free = _free_bytes(path)
        wanted = cache.disk_bytes * num_workers
        detail = f"{human_bytes(wanted)} on disk for {num_workers} workers, {human_bytes(free)} are free in {path}"
        if free < wanted:
            remedy = f"set cache.disk_bytes to at most {free // num_workers}, unless older pages there fill the rest"
            return Finding("page tiers", "warn", detail, remedy)
        found.append(detail)
    return Finding("page tiers", "ok", "; ".join(found) or "none: pages that are evicted are computed again")


def _host_memory(cache: CacheConfig, num_workers: int, host: Host) -> str:
    wanted = cache.host_bytes * num_workers
    if wanted > host.available_bytes:
        raise ConfigError(
            f"cache.host_bytes is {cache.host_bytes} ({human_bytes(cache.host_bytes)}) for each of {num_workers} "
            f"workers, {human_bytes(host.available_bytes)} are free; set it to at most "
            f"{host.available_bytes // num_workers}",
            key="cache.host_bytes",
        )
    return f"{human_bytes(wanted)} of host memory for {num_workers} workers"


def _elsewhere(path: Path) -> Finding:
    if not path.is_absolute():  # the nodes' working directories differ
        raise ConfigError(
            f"cache.disk_path is {path}; give an absolute path, the same on every node", key="cache.disk_path"
        )
    return Finding("page tiers", "ok", f"pages are kept in {path} of each node, where that can be written")


def _free_bytes(path: Path) -> int:
    """Make the directory, and look how much room it has."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"this user may not write to {path}")
        return shutil.disk_usage(path).free
    except OSError as error:
        raise ConfigError(
            f"cache.disk_path is {path}, which cannot be used ({error}); name a directory that this user may write to",
            key="cache.disk_path",
        ) from error
