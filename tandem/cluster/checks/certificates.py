"""Whether the certificates that `security.certificates` names can be used, and for how long."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from tandem.cluster.certs import AUTHORITY_KEY_FILE
from tandem.cluster.checks.finding import Finding
from tandem.core.config import SecurityConfig
from tandem.core.errors import ConfigError
from tandem.rpc.identity import certificate_file, load_identity
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import WARN_BEFORE

HEAD_ROLES = frozenset({PeerRole.SUPERVISOR, PeerRole.ROUTER, PeerRole.CLIENT})
"""What runs on the node where `tandem serve` is called."""


def check_certificates(security: SecurityConfig, *, local: bool) -> Finding:
    """What lies in `security.certificates` is there for this host's roles, belongs together, and lasts."""
    if security.tls == "off":
        return Finding("certificates", "ok" if local else "warn", "security.tls is off: gRPC is plain")
    if local and security.tls == "auto":
        return Finding("certificates", "ok", "not needed: this cluster stays on loopback")
    if not security.certificates and security.tls == "auto":
        detail = "none; nodes with other addresses than loopback need them"
        return Finding("certificates", "warn", detail, "tandem certs DIR, then set security.certificates")
    if not security.certificates:
        raise ConfigError(
            "security.tls is on, but security.certificates names no directory; make one with `tandem certs DIR`",
            key="security.certificates",
        )
    directory = Path(security.certificates)
    if not directory.is_absolute():  # the nodes' working directories differ
        raise ConfigError(
            f"security.certificates is {directory}; give an absolute path, the same on every node",
            key="security.certificates",
        )
    return examine_certificates(directory, set(PeerRole) if local else HEAD_ROLES)


def examine_certificates(directory: Path, needed: Collection[PeerRole], *, now: datetime | None = None) -> Finding:
    """A finding about `needed` roles and all others that have files there.

    Raises:
        ConfigError: some cannot be used.
    """
    now = now or datetime.now(UTC)
    roles = [role for role in PeerRole if role in needed or certificate_file(directory, role).exists()]
    expires = min(load_identity(directory, role, now=now).expires for role in roles)
    detail = f"for {', '.join(roles)} until {expires:%Y-%m-%d}, {directory}"
    exposed = [path.name for path in sorted(directory.glob("*.key")) if path.stat().st_mode & 0o077]
    if expires - now < WARN_BEFORE:
        return Finding("certificates", "warn", detail, f"renew them soon: tandem certs {directory} --force")
    if exposed:
        return Finding("certificates", "warn", f"others may read {', '.join(exposed)}", f"chmod 600 {directory}/*.key")
    if (directory / AUTHORITY_KEY_FILE).exists():
        detail = f"{detail}; {AUTHORITY_KEY_FILE} lies there: whoever reads it is any role"
        return Finding("certificates", "warn", detail, "keep it off the nodes, see docs/security.md")
    return Finding("certificates", "ok", detail)
