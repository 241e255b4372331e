"""When, where and of which code figures were measured."""

from __future__ import annotations

from typing import Any

from benchmarks.code import Code
from tandem.bench.machine import machine, now, versions


def origin() -> dict[str, Any]:
    """Plain data, for the head of a file of figures."""
    return {"date": now(), "machine": machine(), "versions": versions(), "code": Code.of().as_json()}
