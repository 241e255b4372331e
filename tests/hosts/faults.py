"""What is wrong with the network of the test hosts, and the rules that make it so: nftables at the switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Faults:
    """Which hosts, by number, hear nothing or not each other, and how much of what they send is lost."""

    cut: set[int] = field(default_factory=set)
    parted: set[tuple[int, int]] = field(default_factory=set)
    lost: dict[int, float] = field(default_factory=dict)
    """Percent."""

    def part(self, one: int, other: int) -> None:
        self.parted.add((min(one, other), max(one, other)))

    def heal(self) -> None:
        """Undo every cut and partition."""
        self.cut.clear()
        self.parted.clear()

    def rules(self) -> str:
        """For `nft -f -`: all of it, in place of what was there, at once."""
        lines = ["table bridge faults", "delete table bridge faults", "table bridge faults {"]
        lines.append("chain passing { type filter hook forward priority 0; policy accept;")
        for host in sorted(self.cut):
            lines += [f"{side} {_ports(host)} drop" for side in ("iifname", "oifname")]
        for one, other in sorted(self.parted):
            lines += [f"iifname {_ports(a)} oifname {_ports(b)} drop" for a, b in ((one, other), (other, one))]
        for host, percent in sorted(self.lost.items()):
            lines.append(f"iifname {_ports(host)} numgen random mod 10000 < {round(percent * 100)} drop")
        return "\n".join([*lines, "}", "}", ""])

    def as_json(self) -> dict[str, Any]:
        return {"cut": sorted(self.cut), "parted": sorted(self.parted), "lost": sorted(self.lost.items())}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Faults:
        return cls(set(tree["cut"]), {(a, b) for a, b in tree["parted"]}, dict(tree["lost"]))


def _ports(host: int) -> str:
    """Of the switch, where the host's cables end: one for each network."""
    return f'{{ "port{host}", "port{host}b" }}'
