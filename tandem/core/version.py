"""The version of this package, as its distribution states it."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "tandem-serving"
TOP_LEVEL_NAMES = ("tandem", "router", "prefill_worker", "decode_worker", "kvtransfer")
"""What the distribution owns at the top of `site-packages`; no other distribution may own one of them."""


def version() -> str:
    """Version of the installed distribution; `0+source` when it runs from a checkout that is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+source"
