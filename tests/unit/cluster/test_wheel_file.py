"""A wheel is judged by what stands in it, before anything of it runs."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.wheel import Wheel, check_upgrade, read_wheel
from tandem.core.errors import ConfigError, IncompatibleError
from tandem.core.protocols import NEWEST, OLDEST, Protocols

FEW = settings(max_examples=200)
PROTOCOLS = f"OLDEST = {OLDEST}\nNEWEST = {NEWEST}\n"


def wheel(*needs: str, name: str = "tandem-serving", protocols: str = PROTOCOLS) -> bytes:
    fields = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 0.2.0", *(f"Requires-Dist: {need}" for need in needs)]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("tandem_serving-0.2.0.dist-info/METADATA", "\n".join(fields) + "\n\nA text.\n")
        archive.writestr("tandem/core/protocols.py", protocols)
    return content.getvalue()


def read(*needs: str, **how: str) -> Wheel:
    return read_wheel(wheel(*needs, **how))


def test_a_wheel_says_its_version_its_protocols_and_what_it_needs() -> None:
    told = read("numpy==1.0", 'matplotlib==3.0; extra == "bench"', protocols="OLDEST = 3\nNEWEST = 4\n")
    assert (told.version, told.protocols) == ("0.2.0", Protocols(3, 4))
    assert [str(each) for each in told.requirements] == ["numpy==1.0"]
    assert len(told.digest) == 64


@pytest.mark.parametrize("content", [b"", b"text", wheel()[:200]])
def test_what_is_no_wheel_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="no wheel"):
        read_wheel(content)


@pytest.mark.long
@FEW
@given(st.data())
def test_no_damage_is_anything_but_refused(data: st.DataObject) -> None:
    content = bytearray(wheel("numpy==1.0"))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[at] = data.draw(st.integers(0, 255))
    with suppress(ConfigError):  # or the damage changed nothing that counts
        read_wheel(bytes(content))


def test_a_wheel_of_something_else_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a wheel of tandem, not of tandem-serving"):
        read(name="tandem")


def test_the_next_number_of_the_protocol_can_take_over() -> None:
    check_upgrade(read(protocols=f"OLDEST = {NEWEST}\nNEWEST = {NEWEST + 1}\n"))


@pytest.mark.parametrize("protocols", [f"OLDEST = {NEWEST + 1}\nNEWEST = {NEWEST + 2}\n", ""])
def test_protocols_that_do_not_meet_are_refused(protocols: str) -> None:
    with pytest.raises(IncompatibleError, match=r"0\.2\.0 in the wheel"):
        check_upgrade(read(protocols=protocols))


def test_needs_that_are_not_installed_are_refused_by_name() -> None:
    check_upgrade(read("numpy>=1.0"))
    with pytest.raises(ConfigError, match=r"needs numpy<1\.0, no-such-thing==1\.0, which is not installed"):
        check_upgrade(read("numpy<1.0", "no-such-thing==1.0", "grpcio"))
