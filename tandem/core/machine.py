"""Which machine this is, and which of its boots.

A machine that has booted anew runs none of the processes of the boot before: all of them have ended, whoever saw it or
not. That holds only for the very same machine. An address proves nothing, as another machine may have taken it while
the one that had it is merely cut off. Nor does `/etc/machine-id` alone, which images carry along when they are copied.
So a machine is told by its machine id and by the addresses of its network hardware, and a boot by the kernel's random
id.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

_CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLE = "KUBERNETES_SERVICE_HOST"


@dataclass(frozen=True)
class HostBoot:
    """One boot of one machine.

    Attributes:
        address: by which the cluster reaches it.
        machine: equal for all boots of a machine; empty where nothing tells it from others.
        boot: new with every boot.
    """

    address: str
    machine: str
    boot: str

    def is_over(self, later: HostBoot) -> bool:
        """Whether `later`, which was seen after this one, proves that this boot and all of its processes have ended."""
        is_same_machine = self.machine != "" and (self.machine, self.address) == (later.machine, later.address)
        return is_same_machine and self.boot != later.boot


def this_boot(address: str, root: Path = Path("/")) -> HostBoot:
    """Of the machine on which this runs. `root` stands for its file system."""
    boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return HostBoot(address, "" if _in_container(root) else _machine(root), boot)


def _in_container(root: Path) -> bool:
    """What an image holds says nothing of the machine below, and an address may go to a container elsewhere."""
    return _CONTAINER_VARIABLE in os.environ or any((root / mark).exists() for mark in _CONTAINER_MARKS)


def _machine(root: Path) -> str:
    """A digest, since a machine id should not travel as it is (`man machine-id`); empty where there is no such id."""
    try:
        machine_id = (root / "etc/machine-id").read_text().strip()
    except FileNotFoundError:
        return ""
    if len(machine_id) != 32:  # "uninitialized", or empty in an image
        return ""
    # Interfaces with a device are hardware, or a hypervisor's. What software makes gets a random address each time.
    interfaces = sorted((root / "sys/class/net").glob("*/device"))
    hardware = sorted((interface.parent / "address").read_text().strip() for interface in interfaces)
    return hashlib.sha256("\n".join(["tandem", machine_id, *hardware]).encode()).hexdigest()[:32]
