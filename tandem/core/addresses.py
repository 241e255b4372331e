"""Host and port as one text, `10.0.0.5:7001` or `[fd00::5]:7001`: written and read here, and nowhere else."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

ANY_HOST = ("", "0.0.0.0", "::")
"""Listens on all addresses of a host, and is none by which others could reach it."""


def join_address(host: str, port: int | str) -> str:
    """An IPv6 address gets the brackets that keep it apart from its port."""
    return f"{url_host(host)}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises `ValueError`: it is no host:port."""
    host, _, port = address.rpartition(":")
    bare = bare_host(host)
    if not bare or not port.isdigit() or (":" in bare) != (bare != host):
        raise ValueError(f"{address!r} is no host:port; an IPv6 address stands in brackets, [fd00::5]:6379")
    return bare, int(port)


def bare_host(host: str) -> str:
    """`fd00::5` of `[fd00::5]`; all else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def url_host(host: str) -> str:
    """As it stands before a port: an IPv6 address in brackets."""
    bare = bare_host(host)
    return f"[{bare}]" if ":" in bare else bare


def split_url(url: str) -> SplitResult:
    """Of a server that speaks HTTP; its `port` may be read. Raises `ValueError`: it is no such URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # reading the port checks it
        raise ValueError(f"{url!r} is no URL of a server")
    return parts
