"""Waiting times that users give."""

from __future__ import annotations

from tandem.core.errors import ConfigError

LONGEST_WAIT_S = 7 * 86_400.0


def check_wait(seconds: float, option: str, *, least_s: float = 0.0) -> None:
    """Raises `ConfigError` for a time that nobody can wait: NaN and infinity are floats as well."""
    if not least_s <= seconds <= LONGEST_WAIT_S:
        limits = f"from {least_s:g} to {LONGEST_WAIT_S:.0f} seconds"
        raise ConfigError(f"{option} is {seconds:g}, must be {limits}", key=option)
