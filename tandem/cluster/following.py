"""How `tandem scale` and `drain` follow a cluster to its wanted state, and what they say where that takes long."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from tandem.cluster.serve.report import ClusterNews, Reporter
from tandem.core.errors import WorkerLostError
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc


class Following:
    """Watches a cluster, and reports what changes. `cluster` is its last known state."""

    def __init__(self, stub: supervisor_pb2_grpc.SupervisorControlStub, reporter: Reporter) -> None:
        self.cluster = supervisor_pb2.Cluster()
        self._stub, self._reporter, self._news = stub, reporter, ClusterNews()

    def until(self, is_done: Callable[[supervisor_pb2.Cluster], bool], limit_s: float) -> bool:
        """Report what changes; whether `is_done` held within `limit_s`.

        Raises:
            WorkerLostError: the cluster has stopped.
            grpc.RpcError: the supervisor does not answer.
        """
        try:
            for cluster in self._stub.WatchCluster(supervisor_pb2.WatchClusterRequest(), timeout=limit_s):
                self.cluster = cluster
                for line, style in self._news.lines(cluster):
                    self._reporter.line(line, style)
                if is_done(cluster):
                    return True
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or not self.cluster.version:
                raise
            return False
        raise WorkerLostError("the cluster stopped before it reached its wanted state")


def unfinished(cluster: supervisor_pb2.Cluster) -> str:
    """What is not in its wanted state, and why."""
    late = [worker for worker in cluster.workers if worker.member.state != "ready" or worker.leaving]
    said = [f"{worker.member.worker_id} {worker.detail or worker.member.state}" for worker in late]
    routers = [router for router in cluster.routers if router.state != "ready" or router.leaving]
    return ", ".join(said + [f"{router.name} {router.state}" for router in routers])


def node_advice(cluster: supervisor_pb2.Cluster, target: str) -> list[str]:
    """What to do while workers wait for a node; nothing where none does.

    Args:
        target: the options that name the cluster.
    """
    starting = [worker for worker in cluster.workers if worker.member.state == "starting"]
    waiting = [worker for worker in starting if not worker.member.pid and not worker.awaits]
    if not waiting:
        return []
    counts = {pool.role: sum(worker.member.role == pool.role for worker in waiting) for pool in cluster.pools}
    lacking = ", ".join(f'"{ROLE_FROM_PROTO[role]}": {count}' for role, count in counts.items() if count)
    missed = [p for p in cluster.pools if 0 < counts[p.role] < p.wanted]
    names = ", ".join(worker.member.worker_id for worker in waiting)
    lines = [
        f"Ray has no free node for {names}. Everything else goes on; what waits starts when a node comes.",
        f"  add a node     on a new machine: ray start --address={cluster.ray_address} --resources='{{{lacking}}}'"
        " (an autoscaler adds one by itself, up to its limit)",
    ]
    if missed:
        sizes = "".join(f" --{ROLE_FROM_PROTO[p.role]} {_without(p, counts[p.role])}" for p in missed)
        lines.append(f"  take it back   tandem scale{target}{sizes}")
    return lines


def _without(pool: supervisor_pb2.Pool, num: int) -> str:
    """The size of a pool that has `num` workers less; of one that follows its load the bounds."""
    size = pool.wanted - num
    return f"{min(pool.least, size)}:{size}" if pool.most and pool.least < size else str(size)
