"""`tandem certs`: what it writes, what it refuses, and what a process finds wrong with a directory."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tandem import cli
from tandem.cluster.certs import AUTHORITY_KEY_FILE, default_authority_key, make_certificates
from tandem.cluster.checks.certificates import check_certificates, examine_certificates
from tandem.cluster.checks.finding import Finding
from tandem.cluster.checks.host import Host
from tandem.cluster.checks.preflight import Preflight
from tandem.core.config import Config, SecurityConfig
from tandem.core.errors import ConfigError
from tandem.rpc.identity import AUTHORITY_FILE, certificate_file, key_file, load_identity
from tandem.rpc.permissions import SERVER_NAME, PeerRole

ALL_FILES = {AUTHORITY_FILE} | {f"{role}.{kind}" for role in PeerRole for kind in ("pem", "key")}


@pytest.fixture
def copy(certificates: Path, tmp_path: Path) -> Path:
    """A directory to spoil, with its authority."""
    shutil.copytree(default_authority_key(certificates).parent, tmp_path / "copy-ca")
    return Path(shutil.copytree(certificates, tmp_path / "copy"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def certificate(directory: Path, role: PeerRole) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate_file(directory, role).read_bytes())


# -- what is written


def test_every_role_gets_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    old = os.umask(0)  # even then
    try:
        made = make_certificates(tmp_path / "a" / "certs", days=1)
    finally:
        os.umask(old)
    assert set(contents(made.directory)) == ALL_FILES
    files = [made.authority_key, *made.directory.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.parent.stat().st_mode & 0o777 for path in files} == {0o700}


def test_the_authoritys_key_lies_outside_of_what_is_copied_to_hosts(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certs", days=1)
    assert made.authority_key == tmp_path / "certs-ca" / "ca.key"
    assert list(made.directory.rglob("ca.key")) == []
    elsewhere = make_certificates(tmp_path / "other", days=1, authority_key=tmp_path / "safe" / "our.key")
    assert elsewhere.authority_key.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"certs", "certs-ca", "other", "safe"}


def test_an_authoritys_key_that_is_there_is_not_overwritten(copy: Path) -> None:
    before = default_authority_key(copy).read_bytes()
    shutil.rmtree(copy)
    with pytest.raises(ConfigError, match="is there already"):
        make_certificates(copy, days=90)
    assert default_authority_key(copy).read_bytes() == before


def test_a_key_among_the_certificates_is_not_taken_for_granted(copy: Path) -> None:
    default_authority_key(copy).rename(copy / AUTHORITY_KEY_FILE)
    with pytest.raises(ConfigError, match="copied to hosts"):
        make_certificates(copy, days=90, force=True)
    assert make_certificates(copy, days=90, force=True, authority_key=copy / AUTHORITY_KEY_FILE).renewed


@pytest.mark.parametrize("role", PeerRole)
def test_a_certificate_names_the_cluster_its_role_and_its_end(certificates: Path, role: PeerRole) -> None:
    own = certificate(certificates, role)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"tandem://role/{role}"]
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) == (role is not PeerRole.CLIENT)
    left = load_identity(certificates, role).expires - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90)


def test_what_is_there_is_not_overwritten(certificates: Path) -> None:
    before = contents(certificates)
    with pytest.raises(ConfigError, match="--force"):
        make_certificates(certificates, days=90)
    assert contents(certificates) == before


def test_a_directory_with_anything_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ConfigError, match="is not empty"):
        make_certificates(tmp_path, days=90)
    assert set(contents(tmp_path)) == {"thesis.tex"}


def test_a_file_in_place_of_the_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file cannot be written: File exists"):
        make_certificates(tmp_path / "file", days=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_renewed_by_the_same_authority_old_and_new_trust_each_other(copy: Path) -> None:
    before = contents(copy)
    assert make_certificates(copy, days=200, force=True).renewed
    after = contents(copy)
    assert after[AUTHORITY_FILE] == before[AUTHORITY_FILE]
    assert all(after[f"{role}.key"] != before[f"{role}.key"] for role in PeerRole)
    for role in PeerRole:
        load_identity(copy, role).expires.date()
    (copy / "router.pem").write_bytes(before["router.pem"])
    (copy / "router.key").write_bytes(before["router.key"])
    load_identity(copy, PeerRole.ROUTER)


def test_a_renewal_that_would_outlast_the_authority_is_refused(copy: Path) -> None:
    """Another one in its place would not be trusted by what runs."""
    before = contents(copy)
    with pytest.raises(ConfigError, match=r"--days is 3650, .* give at most 3649, or delete .*ca\.key"):
        make_certificates(copy, days=3650, force=True)
    assert contents(copy) == before
    assert make_certificates(copy, days=3649, force=True).renewed


def test_without_the_authoritys_key_a_new_authority_is_made(copy: Path) -> None:
    before = contents(copy)
    default_authority_key(copy).unlink()
    assert not make_certificates(copy, days=90, force=True).renewed
    assert contents(copy)[AUTHORITY_FILE] != before[AUTHORITY_FILE]
    assert set(contents(copy)) == ALL_FILES
    (copy / "router.pem").write_bytes(before["router.pem"])
    (copy / "router.key").write_bytes(before["router.key"])
    with pytest.raises(ConfigError, match="was not signed by"):
        load_identity(copy, PeerRole.ROUTER)


@pytest.mark.parametrize("days", [0, -1, 100_000])
def test_an_impossible_life_is_refused(tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match="--days"):
        make_certificates(tmp_path / "certs", days=days)
    assert not (tmp_path / "certs").exists()


def test_the_command_says_when_they_end_and_what_to_do_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["certs", str(tmp_path / "certs"), "--days", "10"]) == 0
    said = capsys.readouterr().out
    assert f"{datetime.now(UTC) + timedelta(days=10):%Y-%m-%d}" in said
    assert "Keep it off the nodes" in said
    assert cli.main(["certs", str(tmp_path / "certs")]) == 1
    assert "--force" in capsys.readouterr().err


# -- what a process finds wrong


def swap_keys(directory: Path) -> None:
    key_file(directory, PeerRole.PREFILL).write_bytes(key_file(directory, PeerRole.DECODE).read_bytes())


def swap_roles(directory: Path) -> None:
    for kind in ("pem", "key"):
        (directory / f"prefill.{kind}").write_bytes((directory / f"decode.{kind}").read_bytes())


SPOILED = {
    "no key": (lambda d: key_file(d, PeerRole.PREFILL).unlink(), "cannot be read"),
    "no certificate": (lambda d: certificate_file(d, PeerRole.PREFILL).unlink(), "cannot be read"),
    "no authority": (lambda d: (d / AUTHORITY_FILE).unlink(), "cannot be read"),
    "garbage": (lambda d: key_file(d, PeerRole.PREFILL).write_bytes(b"\x00\xff"), "cannot be read"),
    "empty": (lambda d: certificate_file(d, PeerRole.PREFILL).write_bytes(b""), "cannot be read"),
    "another's key": (swap_keys, "is not the key of"),
    "another's role": (swap_roles, "not a certificate of the role prefill"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_is_said(copy: Path, case: str) -> None:
    spoil, text = SPOILED[case]
    spoil(copy)
    with pytest.raises(ConfigError, match=text) as caught:
        load_identity(copy, PeerRole.PREFILL)
    assert caught.value.key == "security.certificates"
    load_identity(copy, PeerRole.DECODE) if case != "no authority" else None


def test_an_expired_certificate_and_one_of_tomorrow_are_refused(certificates: Path) -> None:
    now = datetime.now(UTC)
    with pytest.raises(ConfigError, match="expired on"):
        load_identity(certificates, PeerRole.ROUTER, now=now + timedelta(days=91))
    with pytest.raises(ConfigError, match="valid only from"):
        load_identity(certificates, PeerRole.ROUTER, now=now - timedelta(days=1))


# -- what `tandem doctor` makes of it


def test_doctor_warns_thirty_days_before(copy: Path) -> None:
    now = datetime.now(UTC)
    assert examine_certificates(copy, set(PeerRole), now=now).status == "ok"
    assert examine_certificates(copy, set(PeerRole), now=now + timedelta(days=59)).status == "ok"
    soon = examine_certificates(copy, set(PeerRole), now=now + timedelta(days=61))
    assert soon.status == "warn"
    assert "--force" in soon.remedy
    with pytest.raises(ConfigError, match="expired"):
        examine_certificates(copy, set(PeerRole), now=now + timedelta(days=91))


def test_doctor_warns_of_the_authoritys_key_and_of_open_files(copy: Path) -> None:
    shutil.copy(default_authority_key(copy), copy)
    assert "off the nodes" in examine_certificates(copy, set(PeerRole)).remedy
    (copy / AUTHORITY_KEY_FILE).unlink()
    key_file(copy, PeerRole.ROUTER).chmod(0o644)
    assert "chmod 600" in examine_certificates(copy, set(PeerRole)).remedy


def test_doctor_wants_the_roles_of_this_host_only(copy: Path) -> None:
    key_file(copy, PeerRole.DECODE).unlink()
    certificate_file(copy, PeerRole.DECODE).unlink()
    assert examine_certificates(copy, {PeerRole.ROUTER}).status == "ok"
    with pytest.raises(ConfigError, match="decode"):
        examine_certificates(copy, set(PeerRole))


# -- what `tandem serve` wants before it starts


def check(tls: str, certificates: Path | str = "", *, local: bool = True) -> Finding:
    return check_certificates(SecurityConfig(tls, str(certificates)), local=local)


def test_a_cluster_of_one_host_needs_none_unless_told_so(certificates: Path) -> None:
    assert check("auto").status == "ok"
    with pytest.raises(ConfigError, match="tandem certs"):
        check("on")
    assert "until" in check("on", certificates).detail


def test_a_cluster_of_many_hosts_is_warned_and_checked(certificates: Path, tmp_path: Path) -> None:
    assert check("auto", local=False).status == "warn"
    assert check("off", local=False).status == "warn"
    assert "until" in check("auto", certificates, local=False).detail
    with pytest.raises(ConfigError, match="absolute path"):
        check("auto", "certs", local=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        check("auto", tmp_path, local=False)


def test_a_relative_path_holds_for_the_processes_of_this_host_too(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certificates.parent)
    config = Config(security=SecurityConfig("on", certificates.name))
    preflight = Preflight(config, Host(available_bytes=1 << 34, num_cores=2, num_gpus=0))
    assert preflight._security.certificates == str(certificates)
    (finding,) = [check() for name, check in preflight.checks() if name == "certificates"]
    assert "until" in finding.detail
