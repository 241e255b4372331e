"""When `tandem serve` gives up a cluster that was never ready."""

from __future__ import annotations

from tandem.core.errors import WorkerLostError, error_class
from tandem.rpc.v1 import supervisor_pb2

HOPELESS_AFTER = 3
"""Deaths in a row of one process, after which `tandem serve` gives up."""


def raise_if_hopeless(cluster: supervisor_pb2.Cluster) -> None:
    """A first start that cannot succeed ends `tandem serve` instead of going on for ever."""
    lives = [(w.member.worker_id, w.last_error, w.failures) for w in cluster.workers]
    lives += [(router.name, router.last_error, router.failures) for router in cluster.routers]
    for name, error, failures in lives:
        refused = failures > 0 and error.code != WorkerLostError.code  # it said why, and will say so again
        if refused or failures >= HOPELESS_AFTER:
            logs = f"; logs are in {cluster.log_directory}" if cluster.log_directory else ""
            raise error_class(error.code)(f"{name} cannot start: {error.message}{logs}")
