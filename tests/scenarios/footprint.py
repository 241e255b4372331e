"""What a process holds of its host: descriptors by kind, threads, children, shared memory."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

_KIND = re.compile(r"^(socket|pipe|anon_inode):")

# Threads of gRPC's own pool: 4 to 16, as the machine has cores, and for a while more when much comes at once, as to a
# process that was stopped. So many are no request's.
_POOL_OF_GRPC, _MOST_OF_POOL = "event_engine", 16
# Threads that compute beside the first one, made when cores are lent to the process for the first time: no more than
# the workers of a site could lend.
_LENT, _MOST_LENT = re.compile("^kernel-"), 4


@dataclass(frozen=True)
class Footprint:
    """Counts of one process.

    Attributes:
        num_threads: but for the first ones of gRPC's pool, and of those that compute on lent cores.
        descriptors: by kind: `socket`, `pipe`, `anon_inode:[eventpoll]`, `/dev/shm`, `file`.
    """

    descriptors: dict[str, int] = field(default_factory=dict)
    num_threads: int = 0
    num_children: int = 0
    rss_bytes: int = 0

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Raises `psutil.NoSuchProcess` when it has ended."""
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(
                dict(_descriptors(pid)),
                _num_threads(pid),
                len(process.children(recursive=True)),
                process.memory_info().rss,
            )

    def beyond(self, baseline: Footprint) -> dict[str, int]:
        """What there is more than in `baseline`; memory apart."""
        now = {**self.descriptors, "threads": self.num_threads, "children": self.num_children}
        then = {**baseline.descriptors, "threads": baseline.num_threads, "children": baseline.num_children}
        return {kind: count - then.get(kind, 0) for kind, count in now.items() if count > then.get(kind, 0)}

    def plus(self, descriptors: dict[str, int]) -> Footprint:
        """With so many descriptors more."""
        return replace(self, descriptors=dict(Counter(self.descriptors) + Counter(descriptors)))

    def joined(self, other: Footprint) -> Footprint:
        """The larger of each count."""
        kinds = self.descriptors.keys() | other.descriptors.keys()
        return Footprint(
            {kind: max(self.descriptors.get(kind, 0), other.descriptors.get(kind, 0)) for kind in kinds},
            max(self.num_threads, other.num_threads),
            max(self.num_children, other.num_children),
            max(self.rss_bytes, other.rss_bytes),
        )


def shared_memory() -> set[str]:
    """Names of all segments in `/dev/shm`."""
    return {entry.name for entry in os.scandir("/dev/shm")}


def connections(pid: int, names: dict[str, str]) -> list[str]:
    """TCP connections of a process: own port, peer's port (by name where `names` has it), state."""

    def name(port: int) -> str:
        return names.get(str(port), str(port))

    return [
        f"{name(c.laddr.port)}>{name(c.raddr.port)} {c.status}"
        for c in psutil.Process(pid).net_connections("tcp")
        if c.raddr
    ]


def _descriptors(pid: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # closed meanwhile
            continue
        counts[_kind(target)] += 1
    return counts


def _num_threads(pid: int) -> int:
    names: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    num_lent = sum(num for name, num in names.items() if _LENT.match(name))
    return names.total() - min(names[_POOL_OF_GRPC], _MOST_OF_POOL) - min(num_lent, _MOST_LENT)


def _kind(target: str) -> str:
    if match := _KIND.match(target):
        return target if match[1] == "anon_inode" else match[1]
    return "/dev/shm" if target.startswith("/dev/shm") else "file"
