"""Whether routers can listen where they shall."""

from __future__ import annotations

import errno
import socket

import psutil

from tandem.cluster import statefile
from tandem.cluster.checks.finding import Finding
from tandem.core.addresses import bare_host, join_address
from tandem.core.config import HttpConfig
from tandem.core.errors import ConfigError


def check_port(http: HttpConfig) -> Finding:
    """Raises `ConfigError`: the port is taken, or not to be had."""
    statefile.check_free(http.port)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bare_host(http.host), http.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _port_error(http.host, http.port, error) from error
    return Finding("port", "ok", f"{join_address(http.host, http.port)} is free")


def _port_error(host: str, port: int, error: OSError) -> ConfigError:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"http.host is {host}, which is no address of this host; use 127.0.0.1", key="http.host")
    if error.errno == errno.EACCES:
        return ConfigError(
            f"http.port {port} is reserved for the administrator; choose one above 1023 with --port", key="http.port"
        )
    return ConfigError(
        f"http.port {port} on {host} cannot be used: {error.strerror}{_listener(port)}; "
        "stop what listens there, or choose another with --port",
        key="http.port",
    )


def _listener(port: int) -> str:
    """` (by NAME, pid N)` of who listens on `port`, where the system tells."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pid = next(c.pid for c in connections if c.laddr and c.laddr.port == port and c.status == "LISTEN")
        return f" (by {psutil.Process(pid).name()}, pid {pid})" if pid else ""
    except (psutil.Error, StopIteration, PermissionError):
        return ""
