"""The actor around a router."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.ray.actor import ActorState, begin, model_dir_of, this_process, worker_host
from tandem.cluster.ray.home import session_directory
from tandem.cluster.spec import ClusterSpec
from tandem.core import garbage
from tandem.core.addresses import ANY_HOST, join_address
from tandem.core.pidfd import host_id
from tandem.rpc.permissions import PeerRole

if TYPE_CHECKING:
    from router.server import RouterServer


class RouterActor:
    """One incarnation of a router.

    Args:
        name: of its slot, `router-0`.
        key_digests: of the API keys in the environment of `tandem serve`; what stands in Ray's own counts for nothing.
    """

    def __init__(self, spec: ClusterSpec, name: str, key_digests: frozenset[bytes]) -> None:
        begin(spec, name, PeerRole.ROUTER)
        self._spec, self._name, self._key_digests = spec, name, key_digests
        self._server: RouterServer | None = None  # once it listens
        self._address = self._url = ""

    def state(self) -> ActorState:
        draining = self._server is not None and self._server.is_leaving
        return dataclasses.replace(this_process(), address=self._address, url=self._url, draining=draining)

    def start(self, _timeout_s: float) -> bool:
        """Listen, from the first call on. Raises what prevented it."""
        from router.http.auth import check_exposure, check_not_lost
        from router.server import RouterServer

        if self._server is None:
            spec, http = self._spec, self._spec.config.http
            check_not_lost(http, self._key_digests, os.environ)
            check_exposure(http, http.host, self._key_digests)
            server = RouterServer(
                spec.config,
                model_dir=model_dir_of(spec),
                host=http.host,
                http_port=http.port,
                control_host=worker_host(spec),
                key_digests=self._key_digests,
                name=self._name,
                siblings=_meeting_place(spec),
            )
            info = server.start()
            garbage.settle()
            self._address, self._url = info.control_address, _url_of(spec, info.http_url)
            self._server = server
        return True

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`. To be called when it has started."""
        assert self._server is not None
        return self._server.wait_closed(timeout_s)


def _meeting_place(spec: ClusterSpec) -> Path:
    """Where the routers of this cluster on this host find each other. A session's directory, in which Ray has sockets
    of its own, may be shared by hosts, and by several clusters one after the other."""
    return session_directory() / f"tandem-routers-{host_id().replace('/', '-')}-{spec.control_port}"


def _url_of(spec: ClusterSpec, url: str) -> str:
    """Where clients of other hosts go too, if it takes them."""
    if spec.local or spec.config.http.host not in ANY_HOST:
        return url
    return f"http://{join_address(worker_host(spec), spec.config.http.port)}"
