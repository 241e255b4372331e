"""What a process shows to its peers: a certificate of the cluster's own authority, which names its role.

The directory that `tandem certs` makes (`security.certificates`) holds

    ca.pem        the authority's certificate: who signed all others
    ROLE.pem      one certificate a role (`PeerRole`), with its
    ROLE.key      private key

All certificates have the same DNS name, `SERVER_NAME`: the addresses of autoscaled nodes are not known when they are
made, so peers check that name whatever address they dialled. The role is a URI in the same extension,
`tandem://role/prefill`, because gRPC hands these names to a server for each call, already parsed; a subject's OU
would have to be parsed out of the certificate there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from tandem.core.errors import ConfigError
from tandem.rpc.permissions import SERVER_NAME, PeerRole, role_from_uris

AUTHORITY_FILE: Final = "ca.pem"


@dataclass(frozen=True)
class Identity:
    """One role's certificate with its key, and the authority that it trusts; all in PEM, checked against each other."""

    role: PeerRole
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    expires: datetime


def certificate_file(directory: Path, role: PeerRole) -> Path:
    return directory / f"{role}.pem"


def key_file(directory: Path, role: PeerRole) -> Path:
    return directory / f"{role}.key"


def load_identity(directory: Path, role: PeerRole, *, now: datetime | None = None) -> Identity:
    """Read and check what a process of `role` needs.

    Raises:
        ConfigError: a file is missing or unreadable, they do not belong together, or the certificate is not valid now.
    """
    paths = (directory / AUTHORITY_FILE, certificate_file(directory, role), key_file(directory, role))
    authority, certificate, key = (_read(path) for path in paths)
    try:
        authorities = x509.load_pem_x509_certificates(authority)
        own = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise _wrong(f"what lies in {directory} for {role} cannot be read: {error}") from error
    if private.public_key() != own.public_key():
        raise _wrong(f"{paths[2]} is not the key of {paths[1]}")
    if not any(_is_signed_by(own, each) for each in authorities):
        raise _wrong(f"{paths[1]} was not signed by {paths[0]}: they come from two runs of `tandem certs`")
    _check_names(own, role, paths[1])
    _check_time(own, paths[1], now or datetime.now(UTC))
    return Identity(role, authority, certificate, key, own.not_valid_after_utc)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _wrong(f"{path} cannot be read ({error.strerror})") from error


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_names(certificate: x509.Certificate, role: PeerRole, path: Path) -> None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound as error:
        raise _wrong(f"{path} names neither {SERVER_NAME} nor a role") from error
    uris = [uri.encode() for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
    if SERVER_NAME not in names.get_values_for_type(x509.DNSName) or role_from_uris(uris) is not role:
        raise _wrong(f"{path} is not a certificate of the role {role}")


def _check_time(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    if now >= certificate.not_valid_after_utc:
        raise _wrong(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}", "renew it: `tandem certs --force`"
        )
    if now < certificate.not_valid_before_utc:
        begin = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise _wrong(f"{path} is valid only from {begin} on", "set this host's clock")


def _wrong(
    text: str, remedy: str = "make certificates with `tandem certs` and give each node its roles'"
) -> ConfigError:
    return ConfigError(f"{text}; {remedy}", key="security.certificates")
