"""Which machine a process runs on, told from a file system of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.machine import HostBoot, this_boot

ID, OTHER_ID = "0123456789abcdef" * 2, "fedcba9876543210" * 2


class Disk:
    """What a machine says of itself in its files."""

    def __init__(self, root: Path, machine_id: str | None = ID, boot: str = "boot-1") -> None:
        self.root = root
        self.write("proc/sys/kernel/random/boot_id", boot)
        if machine_id is not None:
            self.write("etc/machine-id", machine_id)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def add_interface(self, name: str, address: str, *, hardware: bool) -> None:
        self.write(f"sys/class/net/{name}/address", address)
        if hardware:
            self.write(f"sys/class/net/{name}/device/vendor", "0x1af4")

    def boot(self, address: str = "10.0.0.1") -> HostBoot:
        return this_boot(address, self.root)


@pytest.fixture(autouse=True)
def _not_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path)
    disk.add_interface("eth0", "52:54:00:00:00:01", hardware=True)
    return disk


def test_another_boot_of_the_same_machine_proves_the_end_of_the_first(disk: Disk) -> None:
    before = disk.boot()
    assert not before.is_over(disk.boot())
    disk.write("proc/sys/kernel/random/boot_id", "boot-2")
    assert before.is_over(disk.boot())


def test_what_software_calls_a_network_card_may_change_with_each_boot(disk: Disk) -> None:
    disk.add_interface("veth0", "aa:aa:aa:aa:aa:aa", hardware=False)
    before = disk.boot()
    disk.write("proc/sys/kernel/random/boot_id", "boot-2")
    disk.add_interface("veth0", "bb:bb:bb:bb:bb:bb", hardware=False)
    assert before.is_over(disk.boot())


def test_a_copy_of_the_disk_in_another_machine_proves_nothing(disk: Disk) -> None:
    """It has the machine id, and by now the address: the first may be cut off and still write."""
    before = disk.boot()
    disk.write("proc/sys/kernel/random/boot_id", "boot-2")
    disk.add_interface("eth0", "52:54:00:00:00:02", hardware=True)
    assert not before.is_over(disk.boot())


def test_another_machine_at_the_address_and_the_machine_at_another_address_prove_nothing(disk: Disk) -> None:
    before = disk.boot()
    disk.write("proc/sys/kernel/random/boot_id", "boot-2")
    assert not before.is_over(disk.boot("10.0.0.2"))
    disk.write("etc/machine-id", OTHER_ID)
    assert not before.is_over(disk.boot())


@pytest.mark.parametrize("machine_id", [None, "", "uninitialized"])
def test_a_machine_without_an_id_proves_nothing(tmp_path: Path, machine_id: str | None) -> None:
    before = Disk(tmp_path, machine_id).boot()
    assert before.machine == ""
    assert not before.is_over(HostBoot("10.0.0.1", "", "boot-2"))


def test_in_a_container_nothing_tells_the_machine(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.boot().machine != ""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert disk.boot().machine == ""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    disk.write(".dockerenv", "")
    assert disk.boot().machine == ""


def test_the_machine_id_itself_does_not_travel(disk: Disk) -> None:
    assert ID not in disk.boot().machine


def test_this_machine_has_a_boot() -> None:
    assert this_boot("127.0.0.1") == this_boot("127.0.0.1")
    assert len(this_boot("127.0.0.1").boot) == 36
