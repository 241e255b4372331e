"""The actor around the supervisor, and its start."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import threading
import time
from typing import Any

import ray

from tandem.cluster.ray.actor import begin, make_actor, pinned, this_process, worker_host
from tandem.cluster.ray.supervisor_process import serve_supervisor
from tandem.cluster.spec import SUPERVISOR_NAME, ClusterSpec, SupervisorFace
from tandem.core.addresses import join_address
from tandem.rpc.permissions import PeerRole


class SupervisorActor:
    """Runs `tandem.cluster.supervisor.supervisor` in an event loop of its own; Ray starts it again whenever it dies.

    No method is a coroutine: Ray would run its calls elsewhere than in the main thread.
    """

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes], cache_secret: bytes = b"") -> None:
        begin(spec, "supervisor", PeerRole.SUPERVISOR)
        address = join_address(worker_host(spec), spec.control_port)
        self._face = SupervisorFace(address, spec.config.security, os.getpid(), this_process().started)
        self._ready = threading.Event()
        threading.Thread(
            target=self._run, args=(spec, key_digests, cache_secret), name="supervisor", daemon=True
        ).start()

    def wait_ready(self) -> SupervisorFace:
        """Until it serves."""
        self._ready.wait()
        return self._face

    def rest(self, seconds: float) -> None:
        """Nothing; the supervisor asks for it all the time, so that Ray leaves the main thread alone."""
        time.sleep(seconds)

    def _run(self, spec: ClusterSpec, key_digests: frozenset[bytes], cache_secret: bytes) -> None:
        try:
            asyncio.run(serve_supervisor(spec, key_digests, self._face, self._ready.set, cache_secret))
        except BaseException:
            # Nothing here foresees it: end the process, and Ray starts the next supervisor, which adopts what runs.
            logging.getLogger(__name__).critical("the supervisor failed", exc_info=True)
            sys.stderr.flush()
            os._exit(1)


def start_supervisor(spec: ClusterSpec, key_digests: frozenset[bytes]) -> Any:
    """The supervisor's actor, on the node of the spec. Its own death never ends it: Ray starts it again.

    Args:
        key_digests: for the router. They stand in no spec, which every worker gets, and in no `runtime_env`, which
            Ray shows to whoever asks. The secret of the salts goes the same way, and outlives each supervisor there.
    """
    return make_actor(
        SupervisorActor,
        name=SUPERVISOR_NAME,
        max_restarts=-1,
        max_task_retries=-1,
        **pinned(spec.node_id, str(ray.util.get_node_ip_address())),
    ).remote(spec, key_digests, secrets.token_bytes(32))
