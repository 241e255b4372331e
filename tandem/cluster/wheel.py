"""What a wheel of Tandem is, by what stands in it; nothing of it is run."""

from __future__ import annotations

import ast
import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from email.parser import Parser
from importlib import metadata

from packaging.requirements import Requirement

from tandem.core.errors import ConfigError
from tandem.core.protocols import Protocols, agree
from tandem.core.version import DISTRIBUTION, version

_PROTOCOLS = "tandem/core/protocols.py"

_MAX_TEXT_BYTES = 1 << 20

# What reading a file that is damaged, or something else, may raise. A requirement that is none is a `ValueError`.
_BROKEN = (
    zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, SyntaxError,
)  # fmt: skip

MAX_BYTES = 60 << 20
"""Of a wheel: it travels in one message."""


@dataclass(frozen=True)
class Wheel:
    """Of this distribution.

    Attributes:
        digest: of its bytes, SHA-256 in hexadecimal.
        requirements: other distributions that it needs, without those of its extras.
    """

    digest: str
    version: str
    protocols: Protocols
    requirements: tuple[Requirement, ...]


def read_wheel(content: bytes) -> Wheel:
    """What these bytes are.

    Raises:
        ConfigError: no wheel of this distribution that a running cluster could change to.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"the wheel has {len(content)} bytes; more than {MAX_BYTES} cannot be sent to a cluster")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            (described,) = (n for n in names if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
            fields = Parser().parsestr(_text(archive, described), headersonly=True)
            protocols = _protocols_in(_text(archive, _PROTOCOLS) if _PROTOCOLS in names else "")
        requirements = map(Requirement, fields.get_all("Requires-Dist", []))
        needed = tuple(each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""}))
    except _BROKEN as error:
        raise ConfigError(f"this is no wheel ({error}); make one with `make wheel`") from error
    if fields["Name"] != DISTRIBUTION:
        raise ConfigError(f"this is a wheel of {fields['Name']}, not of {DISTRIBUTION}")
    return Wheel(hashlib.sha256(content).hexdigest(), fields["Version"], protocols, needed)


def check_upgrade(wheel: Wheel) -> None:
    """Whether processes of this wheel can take the places of those of the version that runs here.

    Raises:
        ConfigError: its needs are not installed here.
        IncompatibleError: the two would not speak with each other.
    """
    agree(Protocols(), f"version {version()}, which runs,", wheel.protocols, f"{wheel.version} in the wheel")
    if lacking := [str(each) for each in wheel.requirements if not _is_installed(each)]:
        raise ConfigError(
            f"version {wheel.version} needs {', '.join(lacking)}, which is not installed where the supervisor runs; "
            "install it on all nodes first, or stop the cluster and start it from the new wheel"
        )


def _is_installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _text(archive: zipfile.ZipFile, name: str) -> str:
    if archive.getinfo(name).file_size > _MAX_TEXT_BYTES:
        raise ValueError(f"{name} is too long")
    return archive.read(name).decode()


def _protocols_in(source: str) -> Protocols:
    """The numbers that `tandem.core.protocols` states; zeros for a version that states none."""
    stated = {
        target.id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, int)
    }
    return Protocols(stated.get("OLDEST", 0), stated.get("NEWEST", 0))
