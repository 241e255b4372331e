"""Who may call what on the control plane: one table, read by the guard of every server. Pure.

Nobody may call a method that is not in the table. The role of a caller stands in its certificate, see
`tandem.rpc.identity`. Which grant a prefill worker may speak about is decided by the handoff protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final


class PeerRole(StrEnum):
    """What a process may call, as its certificate says.

    Not `tandem.core.identity.Role`, which says what a process serves as and has a pool: whoever only calls, as the
    supervisor and `tandem status` do, has a certificate too. Where both have a role it has the same name.
    """

    SUPERVISOR = "supervisor"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    CLIENT = "client"  # `tandem serve`, `status`, `scale`, `drain`, `stop`, and tools that look


SERVER_NAME: Final = "tandem.internal"
"""The DNS name in every certificate."""

ROLE_URI: Final = "tandem://role/"

_URI_PREFIX: Final = ROLE_URI.encode()
_ROLES: Final = {f"{ROLE_URI}{role}".encode(): role for role in PeerRole}


def _only(*roles: PeerRole) -> frozenset[PeerRole]:
    return frozenset(roles)


_SUPERVISOR, _ROUTER = _only(PeerRole.SUPERVISOR), _only(PeerRole.ROUTER)
_PREFILL, _DECODE, _CLIENT = _only(PeerRole.PREFILL), _only(PeerRole.DECODE), _only(PeerRole.CLIENT)
_LOOKS = _SUPERVISOR | _CLIENT  # reads, changes nothing

#: By gRPC's full method name. Every method of every service is here, and nothing else.
ALLOWED: Final[Mapping[str, frozenset[PeerRole]]] = {
    "/tandem.v1.PrefillService/Session": _ROUTER,
    "/tandem.v1.PrefillService/StopWrites": _DECODE,
    "/tandem.v1.DecodeService/Session": _ROUTER,
    "/tandem.v1.DecodeService/Pair": _PREFILL,
    "/tandem.v1.DecodeService/AwaitGreeting": _PREFILL,
    "/tandem.v1.DecodeService/Attach": _PREFILL,
    "/tandem.v1.DecodeService/Commits": _PREFILL,
    "/tandem.v1.DecodeService/ConfirmIdle": _PREFILL,
    "/tandem.v1.WorkerControl/Describe": _LOOKS,
    "/tandem.v1.WorkerControl/Status": _LOOKS,
    "/tandem.v1.WorkerControl/Drain": _SUPERVISOR,
    "/tandem.v1.WorkerControl/Stop": _SUPERVISOR,
    "/tandem.v1.WorkerControl/NoteEnded": _SUPERVISOR,
    "/tandem.v1.RouterControl/SetMembership": _SUPERVISOR,
    "/tandem.v1.RouterControl/DrainRouter": _SUPERVISOR,
    "/tandem.v1.RouterControl/StopRouter": _SUPERVISOR,
    "/tandem.v1.RouterControl/RouterStatus": _LOOKS,
    "/tandem.v1.RouterControl/AskRouter": _ROUTER,
    "/tandem.v1.SupervisorControl/GetCluster": _CLIENT,
    "/tandem.v1.SupervisorControl/WatchCluster": _CLIENT,
    "/tandem.v1.SupervisorControl/Scale": _CLIENT,
    "/tandem.v1.SupervisorControl/Drain": _CLIENT,
    "/tandem.v1.SupervisorControl/Upgrade": _CLIENT,
    "/tandem.v1.SupervisorControl/Shutdown": _CLIENT,
}


def may_call(role: PeerRole | None, method: str) -> bool:
    """Whether a peer of this role may call `method`; `None`: its certificate names no role."""
    return role is not None and role in ALLOWED.get(method, ())


def role_from_uris(uris: Iterable[bytes]) -> PeerRole | None:
    """The role that the URIs of a verified certificate name; `None` unless it is exactly one, and known."""
    claims = [uri for uri in uris if uri.startswith(_URI_PREFIX)]
    return _ROLES.get(claims[0]) if len(claims) == 1 else None
