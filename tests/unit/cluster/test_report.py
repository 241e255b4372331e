"""What `tandem serve` tells of requests that were refused or failed."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest

from tandem.cluster.serve.report import (
    ClusterNews,
    Reporter,
    RequestNews,
    certificate_line,
    cluster_table,
    link_lines,
    network_line,
    pools_line,
    why_lines,
)
from tandem.rpc.v1 import common_pb2, supervisor_pb2


def router(incarnation: str, **counts: int) -> supervisor_pb2.ClusterRouter:
    statuses = {"overloaded": 429, "worker_lost": 502}
    errors = common_pb2.RequestErrors(
        counts=[common_pb2.ErrorCount(code=c, http_status=statuses[c], count=n) for c, n in counts.items()],
        newest=common_pb2.Error(code="overloaded", message="too many wait", request_id="r-1"),
    )
    return supervisor_pb2.ClusterRouter(name="router-0", incarnation=incarnation, errors=errors)


def cluster(incarnation: str, **counts: int) -> supervisor_pb2.Cluster:
    return supervisor_pb2.Cluster(routers=[router(incarnation, **counts)])


def test_one_line_for_what_is_new_by_kind() -> None:
    news = RequestNews()
    assert news.lines(cluster("a")) == []
    assert news.lines(cluster("a", overloaded=3)) == [
        ("  requests    refused or failed: 3 × 429 overloaded; the newest (r-1): too many wait", "yellow")
    ]
    assert news.lines(cluster("a", overloaded=3)) == []
    ((line, style),) = news.lines(cluster("a", overloaded=5, worker_lost=1))
    assert "2 × 429 overloaded, 1 × 502 worker_lost;" in line
    assert style == "red"


def test_a_new_supervisor_that_knows_nothing_yet_makes_nothing_new() -> None:
    news = RequestNews()
    news.lines(cluster("a", overloaded=3))
    news.lines(supervisor_pb2.Cluster(routers=[supervisor_pb2.ClusterRouter(incarnation="a")]))
    assert news.lines(cluster("a", overloaded=3)) == []


def test_a_new_router_counts_anew() -> None:
    news = RequestNews()
    news.lines(cluster("a", overloaded=3))
    ((line, _),) = news.lines(cluster("b", overloaded=1))
    assert "1 × 429" in line


def test_what_several_routers_tell_is_told_once_and_as_one() -> None:
    news = RequestNews()
    news.lines(supervisor_pb2.Cluster(routers=[router("a", overloaded=3), router("b", overloaded=2, worker_lost=1)]))
    restarted = supervisor_pb2.Cluster(routers=[router("c", worker_lost=1), router("b", overloaded=3, worker_lost=1)])
    ((line, _),) = news.lines(restarted)
    assert "refused or failed: 1 × 429 overloaded, 1 × 502 worker_lost;" in line


def test_what_looks_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    worker = supervisor_pb2.ClusterWorker(detail="no file [/models/x] for [bold] :bug:")
    worker.member.worker_id, worker.member.state = "prefill-0", "failed"
    reporter = Reporter()
    reporter.step("Joining Ray at [/a]")
    reporter.line(worker.detail)
    reporter.console.print(cluster_table(supervisor_pb2.Cluster(workers=[worker])))
    assert capsys.readouterr().out.count(worker.detail) == 2


@pytest.mark.parametrize(("node", "where"), [("10.0.0.7", "(pid 41 on 10.0.0.7)"), ("127.0.0.1", "(pid 41)")])
def test_a_worker_is_told_with_its_host_where_that_is_another(node: str, where: str) -> None:
    worker = supervisor_pb2.ClusterWorker(detail="loads the model")
    worker.member.worker_id, worker.member.state = "prefill-0", "starting"
    worker.member.node, worker.member.pid = node, 41
    ((line, _),) = ClusterNews().lines(supervisor_pb2.Cluster(workers=[worker]))
    assert line.endswith(f"loads the model {where}")


def worker_of(name: str, node: str = "10.0.0.1", **links: float) -> supervisor_pb2.ClusterWorker:
    """`links`: bytes per second by decode worker; below 0: broken."""
    worker = supervisor_pb2.ClusterWorker()
    worker.member.worker_id, worker.member.incarnation, worker.member.node = name, f"{name}-life", node
    for receiver, rate in links.items():
        receiver = receiver.replace("_", "-")
        link = worker.load.links.links.add(worker_id=receiver, incarnation=f"{receiver}-life")
        link.bytes_per_s, link.is_broken = abs(rate), rate < 0
    return worker


def test_what_was_learnt_of_links_is_told_of_workers_that_live() -> None:
    decodes = [worker_of(f"decode-{n}") for n in range(4)]
    first = worker_of("prefill-0", decode_0=1.25e9, decode_1=-9e9, decode_2=3.5e8, decode_3=0, decode_9=1e9)
    found = link_lines(supervisor_pb2.Cluster(workers=[first, worker_of("prefill-1", decode_3=0), *decodes]))
    assert found == [
        "prefill-0: sends at 350 MB/s to decode-2, 1.25 GB/s to decode-0; its link to decode-1 is broken"
    ]


def test_of_many_links_the_slowest_and_the_fastest_are_told() -> None:
    rates = {f"decode_{n}": 1e9 + n * 1e8 for n in range(20)}
    decodes = [worker_of(f"decode-{n}") for n in range(20)]
    found = link_lines(supervisor_pb2.Cluster(workers=[worker_of("prefill-0", **rates), *decodes]))
    assert found == ["prefill-0: sends at 1 GB/s (to decode-0) to 2.9 GB/s to 20 decode workers"]


def test_the_network_of_pages_is_told_on_several_hosts_also_where_nobody_has_named_it() -> None:
    one, other = worker_of("prefill-0"), worker_of("decode-0", node="10.0.0.2")
    assert network_line(supervisor_pb2.Cluster(workers=[one])) == ""
    assert "transport.interface names none" in network_line(supervisor_pb2.Cluster(workers=[one, other]))
    one.load.page_network, other.load.page_network = "eth1 10.1.0.1", "eth1 10.1.0.2"
    told = network_line(supervisor_pb2.Cluster(workers=[one, other]))
    assert told == "pages go by eth1: prefill-0 10.1.0.1, decode-0 10.1.0.2"


def test_why_a_pool_has_its_size_is_told_with_its_figures_and_its_last_changes() -> None:
    stays = supervisor_pb2.Decision(age_s=1.4, before=2, wanted=2, why="all is well", inputs={"load": 1.5, "mark": 0.7})
    grew = supervisor_pb2.Decision(age_s=60, before=1, wanted=2, why="prompts", inputs={"load": 3})
    refused = supervisor_pb2.Decision(age_s=30, before=2, wanted=2, why="prompts", refused="no memory is free")
    cluster = supervisor_pb2.Cluster(
        pools=[
            supervisor_pb2.Pool(
                role=common_pb2.ROLE_PREFILL, wanted=2, ready=2, least=1, most=4, latest=stays, changes=[grew, refused]
            ),
            supervisor_pb2.Pool(role=common_pb2.ROLE_DECODE, wanted=3, ready=3),
        ]
    )
    assert why_lines(cluster) == [
        "prefill: 2 of 1 to 4",
        "       1 s ago  stays 2: all is well",
        "               load 1.5, mark 0.7",
        "      30 s ago  stays 2: prompts; no memory is free",
        "      60 s ago  1 → 2: prompts",
        "decode: 3, fixed; `tandem scale --decode MIN:MAX` lets it follow its load",
    ]
    assert pools_line(cluster) == "prefill 2/2 ready (1 to 4 by its load), decode 3/3 ready"


def test_certificates_that_end_soon_are_told_with_the_processes_that_have_read_them() -> None:
    now_s, day_s = 1_800_000_000, 86400
    one, other = worker_of("prefill-0"), worker_of("decode-0")
    cluster = supervisor_pb2.Cluster(workers=[one, other])
    assert certificate_line(cluster, now_s) == "", "none is shown"
    cluster.workers[0].load.certificate_expires = now_s + 31 * day_s
    assert certificate_line(cluster, now_s) == ""
    cluster.routers.add(name="router-0", certificate_expires=now_s + 12 * day_s)
    cluster.certificate_expires = now_s + 29 * day_s
    assert certificate_line(cluster, now_s).startswith("certificates of supervisor, router-0 end in 12 days: ")
    cluster.workers[1].load.certificate_expires = now_s - day_s
    assert certificate_line(cluster, now_s).startswith("certificates of supervisor, decode-0, router-0 have ended: ")


@pytest.mark.parametrize("what", ["a full disk", "a pipe that nobody reads"])
def test_a_line_that_cannot_be_written_ends_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    with contextlib.ExitStack() as undo:
        undo.enter_context(contextlib.suppress(OSError))  # of what is left in the buffer
        if what == "a full disk":
            output = undo.enter_context(open("/dev/full", "w"))
        else:
            reading, writing = os.pipe()
            os.close(reading)
            output = undo.enter_context(os.fdopen(writing, "w"))
        monkeypatch.setattr(sys, "stdout", output)
        with Reporter() as reporter:
            reporter.step("Starting Ray")
            reporter.line("ready")
            reporter.line("ready")
            said.append("all of it")
    assert said == ["all of it"]
