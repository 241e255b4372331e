"""The actor around the supervisor, and its start."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import sys
import threading
import time
from typing import Any, NoReturn

import ray

from tandem.cluster.ray.actor import begin, make_actor, pinned, this_process, worker_host
from tandem.cluster.ray.supervisor_process import serve_supervisor
from tandem.cluster.spec import SUPERVISOR_NAME, ClusterSpec, NotStarted, SupervisorFace
from tandem.core.addresses import join_address
from tandem.core.errors import TandemError
from tandem.rpc.permissions import PeerRole

_log = logging.getLogger(__name__)

# Between two starts in one process.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0


class SupervisorActor:
    """Runs `tandem.cluster.supervisor.supervisor` in an event loop of its own; Ray starts it again whenever it dies.

    No method is a coroutine: Ray would run its calls elsewhere than in the main thread.
    """

    def __init__(self, spec: ClusterSpec, key_digests: frozenset[bytes], cache_secret: bytes = b"") -> None:
        """It never raises: Ray would start no further one."""
        # What came of starts that nobody has been told yet: in the end the face of who serves.
        self._told: queue.SimpleQueue[SupervisorFace | NotStarted] = queue.SimpleQueue()
        self._face: SupervisorFace | None = None
        threading.Thread(
            target=self._run, args=(spec, key_digests, cache_secret), name="supervisor", daemon=True
        ).start()

    def wait_ready(self) -> SupervisorFace | NotStarted:
        """Until it serves, or a start has failed; it tries again then."""
        if self._face is None:
            found = self._told.get()
            if isinstance(found, NotStarted):
                return found
            self._face = found
        return self._face

    def rest(self, seconds: float) -> None:
        """Nothing; the supervisor asks for it all the time, so that Ray leaves the main thread alone."""
        time.sleep(seconds)

    def _run(self, spec: ClusterSpec, key_digests: frozenset[bytes], cache_secret: bytes) -> None:
        pause_s, serves, has_begun = _FIRST_PAUSE_S, threading.Event(), False
        while True:
            try:
                if not has_begun:
                    begin(spec, "supervisor", PeerRole.SUPERVISOR)
                    has_begun = True
                address = join_address(worker_host(spec), spec.control_port)
                face = SupervisorFace(address, spec.config.security, os.getpid(), this_process().started)

                def on_listening(face: SupervisorFace = face) -> None:
                    serves.set()
                    self._told.put(face)

                asyncio.run(serve_supervisor(spec, key_digests, face, on_listening, cache_secret))
                return
            except BaseException as error:  # noqa: BLE001 - it is told, or ends the process
                if serves.is_set() or not isinstance(error, Exception):
                    _end_by(error)
                _log.warning("the supervisor cannot start, and tries again in %g s", pause_s, exc_info=True)
                self._told.put(_not_started(error))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _not_started(error: Exception) -> NotStarted:
    if isinstance(error, TandemError):
        return NotStarted(error.message, error.code)
    return NotStarted(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}", "")


def _end_by(error: BaseException) -> NoReturn:
    """Nothing here foresees it: end the process, and Ray starts the next supervisor, which adopts what runs."""
    _log.critical("the supervisor failed", exc_info=error)
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
