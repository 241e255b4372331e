"""The actor around the router."""

from __future__ import annotations

import dataclasses
import os

from tandem.cluster.ray.actor import ActorState, begin, model_dir_of, this_process
from tandem.cluster.spec import ClusterSpec
from tandem.rpc.permissions import PeerRole


class RouterActor:
    """One incarnation of the router.

    Args:
        key_digests: of the API keys in the environment of `tandem serve`; what stands in Ray's own counts for nothing.
    """

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes]) -> None:
        from router.server import RouterServer

        begin(spec, "router", PeerRole.ROUTER)  # its log's name: one router is wanted, as there is one `http.port`
        self._http, self._key_digests = spec.config.http, key_digests
        self._server = RouterServer(
            spec.config,
            model_dir=model_dir_of(spec),
            host=self._http.host,
            http_port=self._http.port,
            key_digests=key_digests,
        )
        self._address = self._url = ""

    def state(self) -> ActorState:
        return dataclasses.replace(this_process(), address=self._address, url=self._url)

    def start(self, _timeout_s: float) -> bool:
        """Listen, from the first call on. Raises what prevented it."""
        from router.http.auth import check_not_lost

        if not self._address:
            check_not_lost(self._http, self._key_digests, os.environ)
            info = self._server.start()
            self._address, self._url = info.control_address, info.http_url
        return True

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether it has stopped, after at most `timeout_s`."""
        return self._server.wait_closed(timeout_s)
