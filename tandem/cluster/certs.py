"""`tandem certs DIR`: an authority for one cluster, and a certificate with its key for each role.

The directory goes to the hosts; the authority's key, which signs members, lies elsewhere and stays where it was made.
It is needed again only to renew: with it `--force` signs new certificates by the same authority, so that old and new
processes go on trusting each other; without it everything is made anew, and the whole cluster has to be stopped and
started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.core.errors import ConfigError
from tandem.rpc.identity import AUTHORITY_FILE, certificate_file, key_file, load_identity
from tandem.rpc.permissions import ROLE_URI, SERVER_NAME, PeerRole
from tandem.rpc.security import WARN_BEFORE

AUTHORITY_KEY_FILE: Final = "ca.key"

_AUTHORITY_LIFE = timedelta(days=3650)
# Hosts' clocks differ: a certificate made just now must be good on a node that is behind.
_BACKDATED = timedelta(minutes=10)


@dataclass(frozen=True)
class Made:
    """What `make_certificates` did; `renewed`: by the authority that was there."""

    directory: Path
    authority_key: Path
    expires: datetime
    renewed: bool


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def default_authority_key(directory: Path) -> Path:
    """Beside `directory`, never in it: what lies there is copied to hosts."""
    whole = directory.expanduser().absolute()
    return whole.parent / f"{whole.name}-ca" / AUTHORITY_KEY_FILE


def make_certificates(
    directory: Path, *, days: int, force: bool = False, authority_key: Path | None = None
) -> Made:
    """Write the certificates into `directory` and the authority's key elsewhere (directories 0700, files 0600), each
    file whole or not at all.

    Args:
        days: how long the roles' certificates are valid; the authority's own is for ten years.
        force: replace what an earlier run left there.
        authority_key: file of the authority's key (default: `default_authority_key`).

    Raises:
        ConfigError: the directory holds certificates and `force` is not set, `days` makes no sense or is longer than
            the authority lasts that is there, or the directory cannot be written.
    """
    now = datetime.now(UTC)
    if not 1 <= days <= _AUTHORITY_LIFE.days:
        raise ConfigError(f"--days is {days}, must be 1 to {_AUTHORITY_LIFE.days}", key="--days")
    if not force and directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; choose another directory, or replace it with --force", key="DIR")
    key = authority_key or default_authority_key(directory)
    _check_key(directory, key, force=force)
    try:
        for folder in (directory, key.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = _find_authority(directory, key, now)
        if found is not None:
            _check_outlives(found, directory, key, now, days)
        authority = found or _make_authority(now)
        files = _role_files(directory, authority, now, now + timedelta(days=days))
        if found is None:
            files[directory / AUTHORITY_FILE] = _certificate_pem(authority.certificate)
            files[key] = _key_pem(authority.key)
        for path, content in files.items():
            _write_private(path, content)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be written: {error.strerror}", key="DIR") from error
    expires = min(load_identity(directory, role).expires for role in PeerRole)
    return Made(directory, key, expires, renewed=found is not None)


def run(directory: Path, *, days: int, force: bool, authority_key: Path | None) -> int:
    """The command; returns the exit code."""
    made = make_certificates(directory, days=days, force=force, authority_key=authority_key)
    print(f"{'Renewed' if made.renewed else 'Made'} certificates for {', '.join(PeerRole)} in {directory}.")
    warn = f"`tandem doctor` and `tandem status` warn {WARN_BEFORE.days} days before."
    print(f"They expire on {made.expires:%Y-%m-%d}; {warn}")
    print(
        f"\n{made.authority_key} can sign members of this cluster. Keep it off the nodes; a renewal (--force) needs it"
        "\nagain. Whoever does not want to renew may delete it."
        "\n\nTo use them, copy ca.pem and each node's own ROLE.pem and ROLE.key to the same path on every node, and set"
        f"\n\n  security: {{certificates: {directory.resolve()}}}"
    )
    return 0


def _check_key(directory: Path, key: Path, *, force: bool) -> None:
    """Raises `ConfigError`: the file of the authority's key is taken, or another lies among the certificates."""
    if not force and key.exists():
        raise ConfigError(f"{key} is there already, an authority's key; replace it with --force", key="--ca-key")
    among = directory / AUTHORITY_KEY_FILE
    if among.exists() and among.absolute() != key.absolute():
        raise ConfigError(
            f"{among} lies among the certificates, which are copied to hosts; move it to {key}, or delete it to make a "
            "new authority",
            key="--ca-key",
        )


def _check_outlives(authority: _Authority, directory: Path, key: Path, now: datetime, days: int) -> None:
    """Raises `ConfigError`: what it signs for so long would outlast it."""
    ends = authority.certificate.not_valid_after_utc
    if now + timedelta(days=days) >= ends:
        raise ConfigError(
            f"--days is {days}, but the authority in {directory} ends on {ends:%Y-%m-%d}; give at most "
            f"{(ends - now - timedelta(seconds=1)).days}, or delete {key} to make a new authority, which members of "
            "the old one do not trust",
            key="--days",
        )


def _find_authority(directory: Path, key_path: Path, now: datetime) -> _Authority | None:
    """The one that an earlier run made, where its key is still there and it lasts for a day or more."""
    path = directory / AUTHORITY_FILE
    if not key_path.exists() or not path.exists():
        return None
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the authority in {directory} cannot be read: {error}; use another directory") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{key_path} is not the key of {path}; use another directory", key="DIR")
    return _Authority(certificate, key) if certificate.not_valid_after_utc > now + timedelta(days=1) else None


def _make_authority(now: datetime) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each authority has a name of its own: of two with the same name, a verifier may try the wrong key only.
    name = _name(f"Tandem cluster {x509.random_serial_number() >> 112:012x}")
    usage = _key_usage(signs_certificates=True)
    certificate = (
        _builder(name, name, key, now, now + _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate, key)


def _role_files(directory: Path, authority: _Authority, now: datetime, until: datetime) -> dict[Path, bytes]:
    files = {}
    for role in PeerRole:
        key = ec.generate_private_key(ec.SECP256R1())
        files[certificate_file(directory, role)] = _certificate_pem(_sign(role, key, authority, now, until))
        files[key_file(directory, role)] = _key_pem(key)
    return files


def _sign(
    role: PeerRole, key: ec.EllipticCurvePrivateKey, authority: _Authority, now: datetime, until: datetime
) -> x509.Certificate:
    names = [x509.DNSName(SERVER_NAME), x509.UniformResourceIdentifier(f"{ROLE_URI}{role}")]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role is not PeerRole.CLIENT:  # which never listens: whoever steals its key cannot pose as a worker
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    issuer = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder(_name(f"Tandem {role}"), authority.certificate.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(until)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask left
        file.write(content)
        os.fsync(descriptor)
    draft.replace(path)
