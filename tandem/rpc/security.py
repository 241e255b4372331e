"""How this process's gRPC is secured: decided once, at its start, for every channel and server that it makes.

A process is one member of the cluster and shows one certificate, so this is a property of the process, like its log:
`configure` sets it, and `tandem.rpc.channel` reads it. Tests in which one process is several members pass `Security`
objects instead.

    security.tls    listens on loopback only    listens beyond
    auto            plain                       mutual TLS, on loopback too
    on              mutual TLS                  mutual TLS
    off             plain                       plain, with a warning

Nothing goes beyond loopback in plain text unless `off` says so: without certificates it fails instead.
"""

from __future__ import annotations

import ipaddress
import logging
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from tandem.core.config import SecurityConfig
from tandem.core.errors import ConfigError
from tandem.rpc.permissions import PeerRole

if TYPE_CHECKING:
    from tandem.rpc.identity import Identity

#: People are told of a certificate's end so long before.
WARN_BEFORE: Final = timedelta(days=30)

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is surely this host's loopback; names other than `localhost` are not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Security:
    """One member of the cluster: when it uses TLS, and with which certificate.

    Args:
        role: what the process is; `None` for one that never leaves loopback.
        host: where it listens for gRPC, or whom a process that does not listen speaks to.
    """

    def __init__(self, config: SecurityConfig, role: PeerRole | None, host: str) -> None:
        self._config = config
        self._role = role
        #: Whether even loopback is encrypted.
        self.uses_tls = config.tls == "on" or (config.tls == "auto" and not is_loopback(host))

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """For a server on `host`; `None`: plain. Raises `ConfigError` where it must not be plain and cannot be TLS."""
        return self._server_credentials if self._needs_tls(host) else None

    def channel_credentials(self, host: str) -> grpc.ChannelCredentials | None:
        """For a channel to `host`; as `server_credentials`."""
        return self._channel_credentials if self._needs_tls(host) else None

    def check(self) -> None:
        """Raises `ConfigError`: it shall use TLS, and its certificate is missing, does not match, or has expired."""
        if self.uses_tls:
            _ = self.identity

    @property
    def certificate_expires(self) -> int:
        """When the certificate ends that this process shows, in seconds since the epoch; 0: it shows none."""
        return int(self.identity.expires.timestamp()) if self.uses_tls else 0

    def _needs_tls(self, host: str) -> bool:
        return self._config.tls != "off" and (self.uses_tls or not is_loopback(host))

    @cached_property
    def identity(self) -> Identity:
        """Raises `ConfigError`: no certificates, or wrong ones."""
        if not self._config.certificates or self._role is None:
            raise ConfigError(
                "gRPC beyond loopback, or with security.tls: on, needs certificates, and security.certificates names "
                "none; make them with `tandem certs DIR`, or set security.tls: off in a network of which every host is "
                "trusted",
                key="security.certificates",
            )
        from tandem.rpc.identity import load_identity  # loads `cryptography`, which a plain command does without

        return load_identity(Path(self._config.certificates).expanduser(), self._role)

    @cached_property
    def _server_credentials(self) -> grpc.ServerCredentials:
        own = self.identity
        return grpc.ssl_server_credentials(
            [(own.key, own.certificate)], root_certificates=own.authority, require_client_auth=True
        )

    @cached_property
    def _channel_credentials(self) -> grpc.ChannelCredentials:
        own = self.identity
        return grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)


_process = Security(SecurityConfig(), None, "127.0.0.1")


def current() -> Security:
    """This process's; before `configure`, one that stays on loopback."""
    return _process


def configure(config: SecurityConfig, role: PeerRole, host: str) -> Security:
    """Decide for this process, once at its start and before any channel or server is made.

    Args:
        host: as for `Security`. All processes of one cluster give the address that its workers listen on, so that they
            agree on TLS also where one of them listens on loopback.

    Raises:
        ConfigError: TLS is to be used and the certificates are missing, do not match, or have expired.
    """
    global _process
    security = Security(config, role, host)
    if security.uses_tls:
        _log.info("gRPC by mutual TLS as %s; the certificate expires %s", role, security.identity.expires.date())
    elif config.tls == "off" and not is_loopback(host):
        _log.warning(
            "security.tls is off and this process speaks gRPC beyond loopback (%s): whoever reaches its port can run "
            "and cancel requests, read prompts and answers, write into the KV pages and stop the cluster",
            host,
        )
    _process = security
    return security
