"""`tandem scale`, `drain` and `status` against a supervisor that says what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from state_files import cluster_file

from tandem import cli
from tandem.cluster import commands, statefile
from tandem.core.errors import ConfigError
from tandem.rpc.v1 import common_pb2, control_pb2, supervisor_pb2, supervisor_pb2_grpc

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def worker(worker_id: str, state: str, detail: str = "", pid: int = 7, **more: Any) -> supervisor_pb2.ClusterWorker:
    role = PREFILL if worker_id.startswith("prefill") else DECODE
    member = control_pb2.Member(worker_id=worker_id, incarnation=f"{worker_id}-a", role=role, state=state, pid=pid)
    return supervisor_pb2.ClusterWorker(member=member, detail=detail, **more)


def router(name: str, state: str = "ready", **more: Any) -> supervisor_pb2.ClusterRouter:
    url = "http://127.0.0.1:8000"
    return supervisor_pb2.ClusterRouter(name=name, state=state, incarnation=f"{name}-a", url=url, **more)


def cluster(
    *workers: supervisor_pb2.ClusterWorker,
    routers: Sequence[supervisor_pb2.ClusterRouter] = (router("router-0"),),
    wanted_routers: int = 1,
    settled: bool = False,
) -> supervisor_pb2.Cluster:
    pools = []
    for role in (PREFILL, DECODE):
        own = [w for w in workers if w.member.role == role]
        ready = sum(w.member.state == "ready" for w in own)
        pools.append(supervisor_pb2.Pool(role=role, wanted=len(own), ready=ready))
    return supervisor_pb2.Cluster(
        version="1",
        model="m",
        pools=pools,
        workers=workers,
        router=routers[0],
        routers=routers,
        wanted_routers=wanted_routers,
        settled=settled,
        ray_address="10.0.0.1:6379",
    )


WAITING = cluster(
    worker("prefill-0", "ready"),
    worker("decode-0", "ready"),
    worker("decode-1", "starting", "waits for a node with a free `decode` in Ray", pid=0),
)
GROWN = cluster(worker("prefill-0", "ready"), worker("decode-0", "ready"), worker("decode-1", "ready"), settled=True)


class Scripted(supervisor_pb2_grpc.SupervisorControlServicer):
    """Tells `told`; to who watches, `later` too once it is asked for the `num_watches`-th time."""

    told, later, num_watches = WAITING, GROWN, 99

    def __init__(self) -> None:
        self._over = threading.Event()
        self._watches = 0
        self.asked = supervisor_pb2.ScaleRequest()

    def GetCluster(self, request: Any, context: Any) -> supervisor_pb2.Cluster:
        return self.told

    def Scale(self, request: supervisor_pb2.ScaleRequest, context: Any) -> supervisor_pb2.ScaleReply:
        self.asked = request
        return supervisor_pb2.ScaleReply(cluster=self.told)

    def Drain(self, request: Any, context: Any) -> supervisor_pb2.DrainReply:
        return supervisor_pb2.DrainReply(cluster=self.told)

    def WatchCluster(self, request: Any, context: Any) -> Iterator[supervisor_pb2.Cluster]:
        self._watches += 1
        yield self.told
        if self._watches >= self.num_watches:
            yield self.later
        self._over.wait()

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """The one cluster of this user, in a Ray that was joined; patience is short."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(commands, "NODE_WAIT_S", 0.5)
    monkeypatch.setattr(commands, "SETTLE_TIMEOUT_S", 0.5)
    supervisor = Scripted()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    supervisor_pb2_grpc.add_SupervisorControlServicer_to_server(supervisor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    statefile.write(cluster_file(local=False, control_address=f"127.0.0.1:{port}"))
    yield supervisor
    supervisor.end()
    server.stop(None)


@pytest.mark.long
def test_scale_says_what_it_waits_for_and_what_to_do(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.num_watches = 2
    assert cli.main(["scale", "--decode", "2", "--port", "8000"]) == 0
    said = capsys.readouterr().out
    assert "Ray has no free node for decode-1. Everything else goes on; what waits starts when a node comes." in said
    assert """ray start --address=10.0.0.1:6379 --resources='{"decode": 1}'""" in said
    assert "tandem scale --port 8000 --decode 1\n" in said
    assert said.endswith("Done: prefill 1/1 ready, decode 2/2 ready\n")


@pytest.mark.long
def test_scale_that_gives_up_waiting_leaves_the_cluster_alone(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", "--decode", "2"]) == 1
    error = capsys.readouterr().err
    says = "the cluster has not reached its wanted state: decode-1 waits for a node with a free `decode` in Ray."
    assert f"after 1 s {says}" in error
    assert "everything else goes on" in error
    assert "tandem stop" not in error


@pytest.mark.long
def test_a_range_is_asked_for_and_its_way_back_is_a_range_too(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.told = cluster(
        worker("prefill-0", "ready"),
        *(worker(f"decode-{number}", "ready") for number in range(2)),
        worker("decode-2", "starting", "waits for a node with a free `decode` in Ray", pid=0),
    )
    scripted.told.pools[1].least, scripted.told.pools[1].most = 1, 4
    assert cli.main(["scale", "--decode", "1:4"]) == 1
    asked = scripted.asked
    assert (asked.decode, asked.decode_most) == (1, 4)
    assert not asked.HasField("prefill")
    assert not asked.HasField("prefill_most")
    said = capsys.readouterr().out
    assert "tandem scale --decode 1:2\n" in said
    assert cli.main(["scale", "--decode", "3", "--no-wait"]) == 0
    assert (scripted.asked.decode, scripted.asked.HasField("decode_most")) == (3, False)


def test_status_says_why_where_it_is_asked_to(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "fixed" not in capsys.readouterr().out
    assert cli.main(["status", "--why"]) == 0
    assert "decode: 2, fixed; `tandem scale --decode MIN:MAX`" in capsys.readouterr().out


@pytest.mark.long
def test_a_pool_of_which_nobody_has_a_node_cannot_be_taken_back(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.told = cluster(worker("prefill-0", "starting", pid=0), worker("decode-0", "starting", pid=0))
    assert cli.main(["scale", "--decode", "1"]) == 1
    said = capsys.readouterr().out
    assert """--resources='{"prefill": 1, "decode": 1}'""" in said
    assert "take it back" not in said


@pytest.mark.long
def test_no_node_is_asked_for_where_a_worker_only_loads(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.told = cluster(worker("prefill-0", "ready"), worker("decode-0", "starting", "loads the model"))
    assert cli.main(["scale", "--decode", "1"]) == 1
    captured = capsys.readouterr()
    assert "add a node" not in captured.out
    assert "decode-0 loads the model" in captured.err


@pytest.mark.long
def test_a_drain_that_takes_too_long_says_what_is_left(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    leaving = worker("decode-0", "ready", "drains when decode-1 is ready", leaving=True)
    scripted.told = cluster(worker("prefill-0", "ready"), leaving)
    assert cli.main(["drain", "decode-0", "--timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert "after 1 s the cluster has not reached its wanted state: decode-0 drains when decode-1 is ready." in error


PAIR = worker("prefill-0", "ready"), worker("decode-0", "ready")
TWO_ROUTERS = router("router-0", num_under_way=3, node="10.0.0.1", pid=11), router("router-1", "starting")


def test_status_shows_every_router(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.told = cluster(*PAIR, routers=TWO_ROUTERS, wanted_routers=2)
    assert cli.main(["status"]) == 0
    said = capsys.readouterr().out
    assert "decode 1/1 ready, routers 1/2 ready" in said
    assert "requests go to http://127.0.0.1:8000; Ray at" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("router-")]
    assert [row[:5] for row in rows] == [
        ["router-0", "ready", "11", "10.0.0.1", "3"],
        ["router-1", "starting", "-", "-", "0"],
    ]
    assert cli.main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["routers"]] == ["router-0", "router-1"]
    assert told["router"] == told["routers"][0]
    assert (told["wanted_routers"], told["router"]["num_under_way"]) == (2, 3)


@pytest.mark.long
def test_scale_of_routers_says_who_is_late(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.told = cluster(*PAIR, routers=TWO_ROUTERS, wanted_routers=2)
    assert cli.main(["scale", "--routers", "2"]) == 1
    assert "has not reached its wanted state: router-1 starting." in capsys.readouterr().err
    assert scripted.asked.router == 2
    assert not scripted.asked.HasField("prefill")


def test_a_router_is_drained_like_a_worker(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    leaving = router("router-0", "draining", leaving=True)
    scripted.told = cluster(*PAIR, routers=[leaving, router("router-1")])
    scripted.later = cluster(*PAIR, routers=[router("router-1")], settled=True)
    scripted.num_watches = 1
    assert cli.main(["drain", "router-0"]) == 0
    assert "Done: router-0 has been replaced; prefill 1/1 ready, decode 1/1 ready" in capsys.readouterr().out


def test_a_router_whose_successor_cannot_start_stays_and_says_why(
    scripted: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.told = cluster(*PAIR, routers=[router("router-0", detail="it stays: no file")])
    assert cli.main(["drain", "router-0"]) == 1
    assert "router-0 was not drained; it stays: no file" in capsys.readouterr().err


def test_status_as_json_is_plain(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [pool["role"] for pool in told["pools"]] == ["prefill", "decode"]
    assert (told["membership_version"], told["stopping"], told["workers"][0]["load"]) == (0, False, None)


def test_a_supervisor_that_knows_no_ranges_is_told_of() -> None:
    pools = [supervisor_pb2.Pool(role=common_pb2.ROLE_PREFILL, wanted=1)]
    old = supervisor_pb2.Cluster(version="0.1.0", pools=pools)
    with pytest.raises(ConfigError, match=r"is of version 0\.1\.0 and knows no ranges"):
        commands._check_ranges(old, {"prefill_most": 4})
    pools[0].most = 4
    commands._check_ranges(supervisor_pb2.Cluster(pools=pools), {"prefill_most": 4})
    commands._check_ranges(old, {})
