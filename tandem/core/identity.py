"""What a process of the cluster is for, and the name of one life of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Role(StrEnum):
    """What a process serves as; each role has a pool."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


#: The roles that hold a model. On the wire: `tandem.rpc.convert.ROLE_TO_PROTO`.
WORKER_ROLES: Final = (Role.PREFILL, Role.DECODE)


class WorkerKey(NamedTuple):
    """One life of a worker process."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"
