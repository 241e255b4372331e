"""What `tandem serve` and the other commands say: styled on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections import Counter

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tandem.rpc.convert import ROLE_FROM_PROTO
from tandem.rpc.security import WARN_BEFORE, is_loopback
from tandem.rpc.v1 import common_pb2, control_pb2, supervisor_pb2

_LOG_WIDTH = 240
_MAX_NAMED = 8  # links of one worker, each with its rate
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "failed": "red", "stopping": "yellow"}


class Reporter:
    """Lines on standard output. On a terminal the present step shows below them until it is over.

    What cannot be written, as to a full disk or a terminal that has gone, is lost, and the command goes on: a cluster
    is not stopped because nobody can read of it.
    """

    def __init__(self) -> None:
        self.console = make_console()
        self._status: Status | None = None

    def line(self, text: str, style: str = "") -> None:
        with _if_it_can_be_written():
            self.console.print(text, style=style)

    def step(self, text: str) -> None:
        """Begin a step; the one before is over."""
        if not self.console.is_terminal:
            self.line(text)
            return
        with _if_it_can_be_written():
            if self._status is None:
                self._status = self.console.status(text)
                self._status.start()
            else:
                self._status.update(text)

    def end_steps(self) -> None:
        if self._status is not None:
            status, self._status = self._status, None
            with _if_it_can_be_written():
                status.stop()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_steps()


def _if_it_can_be_written() -> contextlib.suppress:
    """Rich ends the program, by `SystemExit`, where nobody reads the other end of a pipe any more."""
    return contextlib.suppress(OSError, SystemExit)


def make_console() -> Console:
    """Texts show as they are: what errors say may look like markup. Without a terminal there is no width to fit: lines
    in a log are not broken."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console


class ClusterNews:
    """Turns a series of `Cluster` messages into one line for each thing that changed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, ...]] = {}

    def lines(self, cluster: supervisor_pb2.Cluster) -> list[tuple[str, str]]:
        """(line, style) of what differs from the message before."""
        now: dict[str, tuple[str, ...]] = {}
        news = []
        for worker in cluster.workers:
            member = worker.member
            now[member.worker_id] = (member.incarnation, member.state, worker.detail)
            if self._seen.get(member.worker_id) != now[member.worker_id]:
                news.append((f"  {member.worker_id:<12}{_worker_line(worker)}", _STATE_STYLES.get(member.state, "")))
        for router in cluster.routers:
            now[router.name] = (router.incarnation, router.state)
            if self._seen.get(router.name) != now[router.name]:
                news.append((f"  {router.name:<12}{_router_line(router)}", _STATE_STYLES.get(router.state, "")))
        news += [(f"  {name:<12}stopped", "") for name in self._seen if name not in now]
        self._seen = now
        return news


class RequestNews:
    """Turns a series of `Cluster` messages into one line for what requests were refused or failed in between."""

    def __init__(self) -> None:
        # What each router had told when it was last seen, by its incarnation.
        self._seen: dict[str, Counter[tuple[int, str]]] = {}

    def lines(self, cluster: supervisor_pb2.Cluster) -> list[tuple[str, str]]:
        """(line, style), or nothing."""
        new, newest = Counter[tuple[int, str]](), common_pb2.Error()
        self._seen = {router.incarnation: self._seen.get(router.incarnation, Counter()) for router in cluster.routers}
        for router in cluster.routers:
            seen = self._seen[router.incarnation]
            told = Counter({(kind.http_status, kind.code): kind.count for kind in router.errors.counts})
            if more := told - seen:
                new += more
                newest = router.errors.newest
            seen |= told
        if not new:
            return []
        kinds = ", ".join(f"{count} × {status} {code}" for (status, code), count in sorted(new.items()))
        line = f"  {'requests':<12}refused or failed: {kinds}; the newest ({newest.request_id}): {newest.message}"
        return [(line, "red" if any(status >= 500 for status, _ in new) else "yellow")]


def cluster_table(cluster: supervisor_pb2.Cluster) -> Table:
    """The workers and routers of `tandem status`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "STATE", "PID", "NODE", "RUNNING", "QUEUED", "PAGES FREE", "FAILURES", "DETAIL"):
        table.add_column(title, justify="right" if title in ("RUNNING", "QUEUED", "PAGES FREE", "FAILURES") else "left")
    for worker in cluster.workers:
        member, load = worker.member, worker.load
        pages = load.pages
        total = pages.free + pages.used + pages.reserved + pages.cached + pages.quarantined
        known = worker.HasField("load")
        table.add_row(
            member.worker_id,
            Text(member.state, style=_STATE_STYLES.get(member.state, "white")),
            str(member.pid or "-"),
            member.node or "-",
            str(load.num_running) if known else "-",
            str(load.num_queued) if known else "-",
            f"{pages.free + pages.cached}/{total}" if known else "-",
            str(worker.failures),
            worker.detail,
        )
    for router in cluster.routers:
        table.add_row(
            router.name,
            Text(router.state, style=_STATE_STYLES.get(router.state, "white")),
            str(router.pid or "-"),
            router.node or "-",
            str(router.num_under_way),
            "-",
            "-",
            str(router.failures),
            router.url if router.state == "ready" else router.detail,
        )
    return table


def network_line(cluster: supervisor_pb2.Cluster) -> str:
    """`pages go by eth1: prefill-0 10.1.0.2, decode-0 10.1.0.3`; on several hosts also where nobody has said by which;
    empty on one."""
    by_interface: dict[str, list[str]] = {}
    for worker in cluster.workers:
        interface, _, address = worker.load.page_network.partition(" ")
        if interface:
            by_interface.setdefault(interface, []).append(f"{worker.member.worker_id} {address}")
    ways = "; ".join(f"{interface}: {', '.join(workers)}" for interface, workers in by_interface.items())
    if ways:
        return f"pages go by {ways}"
    has_hosts = len({worker.member.node for worker in cluster.workers if worker.member.node}) > 1
    return "pages go by the network that the transport chooses: transport.interface names none" if has_hosts else ""


def link_lines(cluster: supervisor_pb2.Cluster) -> list[str]:
    """`prefill-0: sends at 350 MB/s to decode-1, 1.2 GB/s to decode-0; its link to decode-2 is broken`: what it has
    learnt of its links to workers that live, which carry at least so much; of many the slowest and the fastest."""
    names = {worker.member.incarnation: worker.member.worker_id for worker in cluster.workers}
    lines = []
    for worker in cluster.workers:
        links = [(names[link.incarnation], link) for link in worker.load.links.links if link.incarnation in names]
        links.sort(key=lambda named: (named[1].bytes_per_s, named[0]))
        rates = [(name, link.bytes_per_s) for name, link in links if link.bytes_per_s and not link.is_broken]
        broken = [name for name, link in links if link.is_broken]
        said = [f"sends at {_rates(rates)}"] if rates else []
        said += [f"its link to {name} is broken" for name in broken]
        if said:
            lines.append(f"{worker.member.worker_id}: {'; '.join(said)}")
    return lines


def certificate_line(cluster: supervisor_pb2.Cluster, now_s: float) -> str:
    """`certificates of prefill-0, decode-0 end in 12 days; …`: those that end soon, the first one's end; else empty.

    Args:
        now_s: seconds since the epoch.
    """
    ends = {"supervisor": cluster.certificate_expires}
    ends |= {worker.member.worker_id: worker.load.certificate_expires for worker in cluster.workers}
    ends |= {router.name: router.certificate_expires for router in cluster.routers}
    soon = {name: end for name, end in ends.items() if end and end - now_s < WARN_BEFORE.total_seconds()}
    if not soon:
        return ""
    days = (min(soon.values()) - now_s) / 86400
    when = f"end in {days:.0f} days" if days >= 1 else "end today" if days > 0 else "have ended"
    return (
        f"certificates of {', '.join(soon)} {when}: new connections fail then; `tandem certs DIR --force` renews them, "
        "and processes read them when they are started again"
    )


def _rates(rates: list[tuple[str, float]]) -> str:
    if len(rates) <= _MAX_NAMED:
        return ", ".join(f"{_rate(bytes_per_s)} to {name}" for name, bytes_per_s in rates)
    (slowest, least), (_, most) = rates[0], rates[-1]
    return f"{_rate(least)} (to {slowest}) to {_rate(most)} to {len(rates)} decode workers"


def _rate(bytes_per_s: float) -> str:
    unit, scale = ("GB", 1e9) if bytes_per_s >= 1e9 else ("MB", 1e6)
    return f"{bytes_per_s / scale:.3g} {unit}/s"


def pools_line(cluster: supervisor_pb2.Cluster) -> str:
    """`prefill 1/1 ready, decode 1/2 ready (1 to 4 by its load)`, or `no prefill, decode 2/2 ready` where the cluster
    is colocated; and `routers 2/3 ready` unless one is there and wanted."""
    pools = [
        f"{ROLE_FROM_PROTO[pool.role]} {pool.ready}/{pool.wanted} ready{_range(pool)}"
        if pool.wanted or pool.ready
        else f"no {ROLE_FROM_PROTO[pool.role]}"
        for pool in cluster.pools
    ]
    if max(cluster.wanted_routers, len(cluster.routers)) > 1:
        num_ready = sum(router.state == "ready" for router in cluster.routers)
        pools.append(f"routers {num_ready}/{cluster.wanted_routers} ready")
    return ", ".join(pools)


def _range(pool: supervisor_pb2.Pool) -> str:
    return f" ({pool.least} to {pool.most} by its load)" if pool.most else ""


def why_lines(cluster: supervisor_pb2.Cluster) -> list[str]:
    """Of each pool why it has its size, by which figures, and how it came to it; the newest first."""
    lines = []
    for pool in cluster.pools:
        name = ROLE_FROM_PROTO[pool.role]
        if not pool.most:
            lines.append(f"{name}: {pool.wanted}, fixed; `tandem scale --{name} MIN:MAX` lets it follow its load")
            continue
        lines.append(f"{name}: {pool.wanted} of {pool.least} to {pool.most}")
        if not pool.HasField("latest"):
            lines.append("  no decision yet")
            continue
        lines += _decision_lines(pool.latest)
        lines += [line for decision in reversed(pool.changes) for line in _decision_lines(decision, brief=True)]
    return lines


def _decision_lines(decision: supervisor_pb2.Decision, *, brief: bool = False) -> list[str]:
    """When, what and why; unless it is to be `brief`, also from what."""
    is_change = decision.before != decision.wanted
    size = f"{decision.before} → {decision.wanted}" if is_change else f"stays {decision.wanted}"
    refused = f"; {decision.refused}" if decision.refused else ""
    line = f"  {decision.age_s:6.0f} s ago  {size}: {decision.why}{refused}"
    if brief:
        return [line]
    figures = ", ".join(f"{name.replace('_', ' ')} {value:,.4g}" for name, value in sorted(decision.inputs.items()))
    return [line, f"{'':15}{figures}"]


def _worker_line(worker: supervisor_pb2.ClusterWorker) -> str:
    member = worker.member
    where = f" ({_place(member)})" if member.pid else ""
    if member.state == "ready":
        return f"ready{where}"
    if member.state == "failed":
        return f"ended: {worker.detail}; starts again in {worker.retry_in_s:.1f} s"
    before = f"; before that {worker.last_error.message}" if member.state == "starting" and worker.failures else ""
    return f"{worker.detail or member.state}{where}{before}"


def _place(member: control_pb2.Member) -> str:
    """Its process, and its host where that is another than this one."""
    return f"pid {member.pid}" + ("" if not member.node or is_loopback(member.node) else f" on {member.node}")


def _router_line(router: supervisor_pb2.ClusterRouter) -> str:
    if router.state == "ready":
        return f"ready at {router.url}"
    return f"{router.state}; before that {router.detail}" if router.detail else router.state
