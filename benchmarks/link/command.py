"""`python -m benchmarks link`: from its options to a table and a file."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.link.control import connect
from benchmarks.link.receiver import listen
from benchmarks.link.section import FORMAT
from benchmarks.link.sender import Measured, Sender
from benchmarks.origin import origin
from tandem.bench.report import json_file
from tandem.core.errors import ConfigError

SECRET = "TANDEM_LINK_SECRET"


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        there: host and port of the receiver.
        prefill_rate: tokens a second at which pages are sealed where the exposed transfer is measured.
        link: a name for this link in the file.
    """

    there: tuple[str, int]
    transport: str
    layouts: Sequence[str]
    lengths: Sequence[int]
    prefill_rate: float
    num_runs: int
    link: str


def run(options: argparse.Namespace) -> int:
    """Raises `ConfigError` for options that do not fit, or a receiver that is not there."""
    secret = os.environ.get(SECRET, "")
    if not secret:
        raise ConfigError(f"set {SECRET} to the same text on both hosts: what they say to each other are pickles")
    if options.listen is not None:
        listen(options.listen, options.port, secret.encode(), options.transport, print)
        return 0
    settings = Settings(
        (options.to, options.port),
        options.transport,
        options.layouts,
        options.tokens,
        options.prefill_rate,
        options.runs,
        options.link,
    )
    measured = _measure(settings, secret.encode())
    Console(width=None if os.isatty(1) else 120).print(_table(measured))
    if options.json is not None:
        _write(options.json, settings, measured)
    return 0


def _measure(settings: Settings, secret: bytes) -> list[Measured]:
    host, port = settings.there
    try:
        controls = connect(settings.there, secret)
    except AuthenticationError:
        raise ConfigError(f"{host} port {port} has another {SECRET}", key="--to") from None
    except OSError as error:
        raise ConfigError(
            f"nobody listens on {host} port {port} ({error}): run it with --listen there", key="--to"
        ) from None
    sender = Sender(controls, _own_address(host, port), host, settings.transport, print)
    try:
        found = []
        for layout in settings.layouts:
            found += sender.measure(layout, settings.lengths, settings.prefill_rate, settings.num_runs)
        return found
    finally:
        controls.close()


def _own_address(host: str, port: int) -> str:
    """This host's, on the way to `host`."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found


def _table(measured: Sequence[Measured]) -> Table:
    table = Table("pages of", "tokens", "MB", "TCP GB/s", "raw GB/s", "handoff GB/s", "handoff of raw", "exposed ms")
    for one in measured:
        raw, handoff = one.gb_per_s(one.raw_s), one.gb_per_s(one.handoff_s)
        exposed_ms = sorted(one.exposed_s)[len(one.exposed_s) // 2] * 1e3
        table.add_row(
            one.layout,
            f"{one.num_tokens:,}",
            f"{one.num_bytes / 1e6:,.0f}",
            f"{one.gb_per_s(one.tcp_s):.2f}",
            f"{raw:.2f}",
            f"{handoff:.2f}",
            f"{handoff / raw:.2f}",
            f"{exposed_ms:,.1f}",
        )
    return table


def _write(path: Path, settings: Settings, measured: Sequence[Measured]) -> None:
    """Adds this link to what the file has of others."""
    links: list[dict[str, Any]] = []
    if path.exists():
        links = json_file.read_format(path, FORMAT, "`python -m benchmarks link`", key="--json")["links"]
    mine = {
        "link": settings.link,
        **origin(),
        "transport": settings.transport,
        "measured": [one.as_json() for one in measured],
    }
    others = [one for one in links if one["link"] != settings.link]
    json_file.write(path, {"format": FORMAT, "links": [*others, mine]})
