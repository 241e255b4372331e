"""Figures within sentences: a line does not end between a number and its unit."""

from __future__ import annotations

_NO_BREAK = "\N{NO-BREAK SPACE}"


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}{_NO_BREAK}ms" if value >= 20 else f"{value:.1f}{_NO_BREAK}ms"


def per_cent(share: float) -> str:
    digits = 1 if 0.95 < share < 0.9995 else 0  # where it matters how much is missing
    return f"{share * 100:.{digits}f}{_NO_BREAK}%"
