"""What one check of the machine, the configuration or the model saw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check saw. `remedy` is empty where nothing needs to be done."""

    check: str
    status: str  # "ok", "warn" or "fail"
    detail: str
    remedy: str = ""
