"""What `tandem up` makes where it is missing, before anything starts: Ray's token, certificates, wheel, an API key."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from router.http.auth import KEYS_VARIABLE, ApiKeys, digests_of_variable
from tandem.cluster.certs import AUTHORITY_KEY_FILE, make_certificates
from tandem.cluster.launch.launch_file import LaunchFile, Mount
from tandem.core.clock import MonotonicClock
from tandem.core.config import HttpConfig
from tandem.core.errors import ConfigError
from tandem.rpc.identity import load_identity
from tandem.rpc.permissions import PeerRole
from tandem.rpc.security import is_loopback

WHEEL_NAME_FILE = "wheel.txt"
"""In `dist/`: the name of the wheel that hosts install. Older ones may lie beside it on a host: rsync removes none."""

_CERTIFICATE_DAYS = 365

Say = Callable[[str], None]


def prepare_mounts(file: LaunchFile, say: Say) -> None:
    """Make what can be made of the mounts.

    Raises:
        ConfigError: a mount's source is missing, or what lies there cannot be used.
    """
    makers = {"auth_token": _token, "tandem-certs": _certificates, "dist": _wheel}
    for name, make in makers.items():
        if (mount := file.mount(name)) is not None:
            make(mount, say)
    for mount in file.mounts():
        if not mount.source.exists():
            raise ConfigError(
                f"{file.path} copies {mount.source} to the hosts, and it does not exist; start where it is "
                "(as a rule in a checkout of Tandem), or change file_mounts",
                key="file_mounts",
            )


def prepare_keys(
    http: HttpConfig, given: Path | None, default: Path, environment: Mapping[str, str], say: Say
) -> Path | None:
    """The file of API keys that goes to the head; `None`: none is needed, or the head has its own.

    Args:
        http: as `tandem serve` will have it.
        given: the file that the user named.
        default: where one is made if keys are needed and nobody has named any.

    Raises:
        ConfigError: the keys cannot be used.
    """
    if digests_of_variable(environment):
        raise ConfigError(
            f"{KEYS_VARIABLE} is set here, and does not reach the hosts; write the keys into a file, one a line, and "
            "name it with --api-keys-file",
            key="--api-keys-file",
        )
    needed = not (is_loopback(http.host) or http.allow_anonymous or http.api_keys_file)
    if given is None and not needed:
        return None
    file = given or default
    if given is None and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
            target.write(secrets.token_hex(32) + "\n")
        say(f"  API key       made {file}")
    ApiKeys(HttpConfig(api_keys_file=str(file)), frozenset(), MonotonicClock())
    return file


def _token(mount: Mount, say: Say) -> None:
    if mount.source.exists():
        return
    mount.source.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(mount.source, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(secrets.token_hex(32))
    say(f"  Ray's token   made {mount.source}")


def _certificates(mount: Mount, say: Say) -> None:
    if not mount.source.exists():
        made = make_certificates(mount.source, days=_CERTIFICATE_DAYS)
        say(f"  certificates  made {made.directory}, until {made.expires:%Y-%m-%d}; {made.authority_key} signs more")
    if (key := mount.source / AUTHORITY_KEY_FILE).exists():
        raise ConfigError(
            f"{key} signs certificates and must reach no host, where {mount.source} goes whole: move it out of there",
            key="file_mounts",
        )
    for role in PeerRole:
        load_identity(mount.source, role)


def _wheel(mount: Mount, say: Say) -> None:
    named = mount.source / WHEEL_NAME_FILE
    if not named.exists() and not list(mount.source.glob("*.whl")):
        _build(mount.source, say)
    if not named.exists():
        wheels = sorted(path.name for path in mount.source.glob("*.whl"))
        if len(wheels) != 1:
            raise ConfigError(
                f"{mount.source} holds {len(wheels)} wheels and no {WHEEL_NAME_FILE} that says which one hosts install;"
                " `make wheel` makes both",
                key="file_mounts",
            )
        named.write_text(f"{wheels[0]}\n")
    wheel = mount.source / named.read_text().strip()
    if not wheel.is_file():
        raise ConfigError(f"{named} names {wheel.name}, which is not there; `make wheel` makes both", key="file_mounts")
    say(f"  wheel         {wheel}")


def _build(dist: Path, say: Say) -> None:
    checkout = dist.absolute().parent
    if not (checkout / "pyproject.toml").is_file():
        raise ConfigError(
            f"there is no wheel in {dist}, and {checkout} is no checkout of Tandem to build one from; start in one, or "
            "put the wheel there",
            key="file_mounts",
        )
    say(f"  wheel         building it into {dist}")
    shutil.rmtree(checkout / "build", ignore_errors=True)  # what an earlier build left would get in
    line = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(checkout)]
    built = subprocess.run(line, capture_output=True, text=True, check=False)
    if built.returncode:
        last = (built.stderr.strip() or built.stdout.strip()).splitlines()[-1:]
        raise ConfigError(f"the wheel could not be built ({''.join(last)}); `make wheel` shows why", key="file_mounts")
