"""What `tandem status`, `scale`, `drain`, `upgrade`, `stop` and `doctor` do. Each returns the exit code."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from tandem.cluster import statefile
from tandem.cluster.client import TIMEOUT_S, Target, Where, find_cluster, find_started, supervisor
from tandem.cluster.following import Following, node_advice, unfinished
from tandem.cluster.plain import plain
from tandem.cluster.serve.processes import wait_for_exit
from tandem.cluster.serve.report import (
    Reporter,
    certificate_line,
    cluster_table,
    link_lines,
    make_console,
    network_line,
    pools_line,
    why_lines,
)
from tandem.cluster.statefile import Stage
from tandem.cluster.waits import check_wait
from tandem.cluster.wheel import read_wheel
from tandem.core.arguments import PoolSizes
from tandem.core.config import Config
from tandem.core.errors import ConfigError, NoWorkerError, WorkerLostError
from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.v1 import supervisor_pb2

SETTLE_TIMEOUT_S = 600.0
"""How long `tandem scale` waits for models to load and requests to end."""

UPGRADE_TIMEOUT_S = 24 * 3600.0
"""How long `tandem upgrade` waits for all to be replaced, one after the other. It goes on when nobody waits."""

UPLOAD_TIMEOUT_S = 120.0
"""How long a wheel may take to the supervisor and into Ray's control store."""

NODE_WAIT_S = 20.0
"""After this time `tandem scale` says what to do about workers without a node; Ray takes a moment to start one."""

SERVE_END_TIMEOUT_S = 30.0
"""How long `tandem serve` may take to end its Ray once the cluster has stopped."""

RESTART_S = 10.0
"""How long Ray may take to start a supervisor again that has ended."""

LOOK_S = 0.2
"""Between two looks whether it listens, which is no event."""

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def status(where: Where, *, as_json: bool, why: bool = False) -> int:
    target = find_cluster(where)
    cluster = _ask(target)
    state, detail = _state(target, cluster)
    if as_json:
        serve = asdict(target.file) if target.file else None
        print(json.dumps({"state": state, **plain(cluster or supervisor_pb2.Cluster()), "serve": serve}, indent=2))
        return 0
    console = make_console()
    if cluster is None:
        console.print(detail)
        return 0
    console.print(f"Tandem {cluster.version}, {cluster.model}: {detail}; {pools_line(cluster)}")
    urls = dict.fromkeys(router.url for router in cluster.routers if router.url)  # on one node they share it
    console.print(f"requests go to {' or '.join(urls) or '-'}; Ray at {cluster.ray_address}")
    if cluster.log_directory:
        console.print(f"logs in {cluster.log_directory}")
    if ways := network_line(cluster):
        console.print(ways)
    console.print(cluster_table(cluster))
    for line in link_lines(cluster):
        console.print(line)
    if ending := certificate_line(cluster, time.time()):
        console.print(ending, style="red")
    for line in why_lines(cluster) if why else ():
        console.print(line)
    return 0


def _ask(target: Target) -> supervisor_pb2.Cluster | None:
    """`None` while there is no supervisor to ask: not yet, or no more."""
    try:
        with supervisor(target) as stub:
            cluster: supervisor_pb2.Cluster = stub.GetCluster(supervisor_pb2.GetClusterRequest(), timeout=TIMEOUT_S)
            return cluster
    except WorkerLostError:
        if target.stage in (Stage.STARTING, Stage.STOPPING):
            return None
        raise


def _state(target: Target, cluster: supervisor_pb2.Cluster | None) -> tuple[str, str]:
    """The state in one word, and in a sentence for people."""
    if cluster is not None and cluster.stopping:
        num = sum(router.num_under_way for router in cluster.routers)
        return "stopping", f"stopping: {num} request{'' if num == 1 else 's'} under way"
    if target.file and target.stage in (Stage.STARTING, Stage.STOPPING):
        return target.file.stage, target.file.describe()
    assert cluster is not None
    state = "ready" if cluster.settled else "changing"
    return state, state


def _check_ranges(cluster: supervisor_pb2.Cluster, most: Mapping[str, int]) -> None:
    """A supervisor of an older version takes no ranges. Raises `ConfigError`."""
    known = {f"{ROLE_FROM_PROTO[pool.role]}_most": pool.most for pool in cluster.pools}
    for name, wanted in most.items():
        if known.get(name) != wanted:
            role = name.removesuffix("_most")
            raise ConfigError(
                f"the supervisor is of version {cluster.version} and knows no ranges: the {role} pool has a fixed size "
                f"now; give it the one that it needs (--{role} N), or start the cluster again, and it can follow",
                key=f"--{role}",
            )


def scale(
    where: Where, *, prefill: PoolSizes | None, decode: PoolSizes | None, routers: int | None, wait: bool
) -> int:
    if prefill is None and decode is None and routers is None:
        raise ConfigError("say how many workers or routers: --prefill N, --decode N, --routers N, or several of them")
    target = find_started(where)
    with Reporter() as reporter, supervisor(target) as stub:
        pools = {"prefill": prefill, "decode": decode}
        sizes = {role: given.least for role, given in pools.items() if given is not None}
        most = {f"{role}_most": given.most for role, given in pools.items() if given and given.least < given.most}
        request = supervisor_pb2.ScaleRequest(**sizes, **most, router=routers)
        reply = stub.Scale(request, timeout=TIMEOUT_S)
        if reply.HasField("error"):
            raise ConfigError(reply.error.message, key=reply.error.field)
        _check_ranges(reply.cluster, most)
        if not wait:
            reporter.line(f"Wanted: {pools_line(reply.cluster)}")
            return 0
        reporter.step("Scaling")
        following = Following(stub, reporter)
        if not following.until(lambda cluster: cluster.settled, NODE_WAIT_S):
            is_local = target.file is not None and target.file.local  # its Ray has room for any number
            for line in [] if is_local else node_advice(following.cluster, str(where)):
                reporter.line(line)
            if not following.until(lambda cluster: cluster.settled, SETTLE_TIMEOUT_S):
                raise NoWorkerError(_not_yet(following.cluster, NODE_WAIT_S + SETTLE_TIMEOUT_S))
        reporter.end_steps()
        reporter.line(f"Done: {pools_line(following.cluster)}")
    return 0


def drain(where: Where, worker_id: str, *, replace_first: bool, timeout_s: float, wait: bool) -> int:
    check_wait(timeout_s, "--timeout", least_s=1e-3)
    target = find_started(where)
    request = supervisor_pb2.DrainRequest(worker_id=worker_id, replace_first=replace_first, timeout_s=timeout_s)
    with Reporter() as reporter, supervisor(target) as stub:
        reply = stub.Drain(request, timeout=TIMEOUT_S)
        if reply.HasField("error"):
            raise ConfigError(reply.error.message, key=reply.error.field)
        incarnation, _, _ = _find(reply.cluster, worker_id)
        if not wait:
            reporter.line(f"{worker_id} is being replaced; `tandem status` shows its progress.")
            return 0
        reporter.step(f"Draining {worker_id}")
        limit_s = timeout_s + SETTLE_TIMEOUT_S

        def is_replaced(cluster: supervisor_pb2.Cluster) -> bool:
            present, is_leaving, detail = _find(cluster, worker_id)
            if present == incarnation and not is_leaving:
                raise WorkerLostError(f"{worker_id} was not drained; {detail}")
            return present != incarnation and cluster.settled

        following = Following(stub, reporter)
        if not following.until(is_replaced, limit_s):
            raise NoWorkerError(_not_yet(following.cluster, limit_s))
        reporter.end_steps()
        reporter.line(f"Done: {worker_id} has been replaced; {pools_line(following.cluster)}")
    return 0


def upgrade(where: Where, wheel: Path, *, wait: bool) -> int:
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {wheel}: {error.strerror}; make a wheel with `make wheel`") from error
    wanted = read_wheel(content)
    target = find_started(where)
    with Reporter() as reporter, supervisor(target) as stub:
        reply = stub.Upgrade(supervisor_pb2.UpgradeRequest(wheel=content), timeout=UPLOAD_TIMEOUT_S)
        if reply.HasField("error"):
            raise ConfigError(reply.error.message, key=reply.error.field)
        if not wait:
            reporter.line(f"The cluster changes to {wanted.version}; `tandem status` shows its progress.")
            return 0
        reporter.step(f"Upgrading to {wanted.version}")
        following = Following(stub, reporter)

        def is_upgraded(cluster: supervisor_pb2.Cluster) -> bool:
            if cluster.build.digest != wanted.digest and cluster.build_note:
                raise WorkerLostError(f"{cluster.build_note}; everything goes on with {cluster.build.version}")
            builds = [worker.build for worker in cluster.workers] + [router.build for router in cluster.routers]
            return cluster.settled and all(build.digest == wanted.digest for build in builds)

        if not following.until(is_upgraded, UPGRADE_TIMEOUT_S):
            raise NoWorkerError(_not_yet(following.cluster, UPGRADE_TIMEOUT_S))
        reporter.end_steps()
        reporter.line(f"Done: all workers and routers run {wanted.version}; {pools_line(following.cluster)}")
    return 0


def stop(where: Where, *, now: bool, grace_s: float) -> int:
    check_wait(grace_s, "--grace")
    target = find_cluster(where)
    reporter = Reporter()
    if target.stage is Stage.STARTING:
        reporter.line("Stopping what has been started.")
        _interrupt_serve(target)
    else:
        reporter.line("Stopping at once." if now else "Stopping: requests under way finish first.")
        _shut_down(target, reporter, now=now, grace_s=0.0 if now else grace_s)
    _wait_for_serve(target)
    reporter.line("Stopped.")
    return 0


def doctor(config: Config, *, address: str | None) -> int:
    from tandem.cluster.doctor import examine  # it needs more than all other commands together

    findings = examine(config, address=address)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark, style = _MARKS[finding.status]
        table.add_row(Text(mark, style=style), finding.check, finding.detail)
        if finding.remedy:
            table.add_row("", "", f"→ {finding.remedy}")
    make_console().print(table)
    num_failed = sum(finding.status == "fail" for finding in findings)
    if num_failed:
        print(f"{num_failed} of {len(findings)} checks failed: `tandem serve` would not start.")
        return 1
    print("`tandem serve` can start.")
    return 0


def _not_yet(cluster: supervisor_pb2.Cluster, waited_s: float) -> str:
    return (
        f"after {waited_s:g} s the cluster has not reached its wanted state: {unfinished(cluster)}. It keeps trying, "
        "and everything else goes on; `tandem status` shows its progress, `tandem scale` takes a size back"
    )


def _find(cluster: supervisor_pb2.Cluster, name: str) -> tuple[str, bool, str]:
    """Incarnation of a worker or router, whether it is leaving, and its detail; empty when there is none."""
    workers = ((w.member.worker_id, (w.member.incarnation, w.leaving, w.detail)) for w in cluster.workers)
    routers = ((r.name, (r.incarnation, r.leaving, r.detail)) for r in cluster.routers)
    return {**dict(workers), **dict(routers)}.get(name, ("", False, ""))


def _shut_down(target: Target, reporter: Reporter, *, now: bool, grace_s: float) -> None:
    """Ask the supervisor. Where none answers, `tandem serve` ends its cluster, or is doing so already.

    Raises:
        WorkerLostError: nobody ends it.
    """
    try:
        _ask_to_stop(target, grace_s)
    except WorkerLostError as error:
        reporter.line(_without_advice(error) + ".")
        if target.file is not None and target.stage is None:
            _stop_without_serve(target, grace_s)
            return
        if target.file is None or (target.stage is not Stage.STOPPING and not now):
            raise
        if now:
            _interrupt_serve(target)


def _ask_to_stop(target: Target, grace_s: float) -> None:
    with supervisor(target) as stub:
        stub.Shutdown(supervisor_pb2.ShutdownRequest(grace_s=grace_s), timeout=grace_s + 20.0)


def _stop_without_serve(target: Target, grace_s: float) -> None:
    """In a joined Ray, which starts a supervisor that has ended again, at the same port. Where nobody comes to listen
    there, that Ray has ended, and the cluster with it."""
    deadline_s = time.monotonic() + RESTART_S
    while not statefile.listens(target.control_address):
        if time.monotonic() >= deadline_s:
            return
        time.sleep(LOOK_S)
    try:
        _ask_to_stop(target, grace_s)
    except WorkerLostError as error:
        raise WorkerLostError(
            f"{_without_advice(error)}; the cluster may go on: call this again, or end its Ray with `ray stop` on "
            "every node"
        ) from error


def _without_advice(error: WorkerLostError) -> str:
    return error.message.partition(";")[0]


def _interrupt_serve(target: Target) -> None:
    """As Ctrl-C does. Not by SIGTERM, which is Ray's while Ray starts."""
    if target.file and (process := target.file.serve_process):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            process.send_signal(signal.SIGINT)


def _wait_for_serve(target: Target) -> None:
    """`tandem serve` ends after its supervisor, and once it has ended nothing of the cluster is left."""
    if target.file is None:
        return
    process = target.file.serve_process
    if process and not wait_for_exit(process, SERVE_END_TIMEOUT_S):
        raise WorkerLostError(
            f"`tandem serve` (pid {process.pid}) still runs {SERVE_END_TIMEOUT_S:.0f} s after its cluster has stopped; "
            f"end it with kill -9 {process.pid}"
        )
    statefile.forget(target.file)
