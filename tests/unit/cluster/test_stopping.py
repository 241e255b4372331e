"""What `tandem serve` says of a cluster's end is true, whatever its supervisor does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from state_files import cluster_file

from tandem import cli
from tandem.cluster import statefile
from tandem.cluster.checks.preflight import Plan
from tandem.cluster.serve import serve, stopping
from tandem.cluster.serve.report import Reporter
from tandem.cluster.serve.serve import Serving
from tandem.cluster.serve.stopping import stop_cluster
from tandem.cluster.spec import ClusterSpec, NotStarted, SupervisorFace
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.service import SupervisorService
from tandem.cluster.supervisor.slots import Policy
from tandem.cluster.supervisor.supervisor import Supervisor
from tandem.core.config import Config, SecurityConfig
from tandem.core.errors import ForbiddenError, TandemError, WorkerLostError
from tandem.rpc.channel import make_channel
from tandem.rpc.v1 import supervisor_pb2, supervisor_pb2_grpc
from tests.support.grpc_server import serving

ADD = supervisor_pb2_grpc.add_SupervisorControlServicer_to_server


class Face(supervisor_pb2_grpc.SupervisorControlServicer):
    """A supervisor that answers as it is told to. `code`: of its refusals; `None`: it stops everything."""

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self.code = code
        self.graces: list[float] = []
        self.num_watches = 0

    async def Shutdown(self, request: supervisor_pb2.ShutdownRequest, context: Any) -> supervisor_pb2.ShutdownReply:
        self.graces.append(request.grace_s)
        if self.code is not None:
            await context.abort(self.code, "no")
        return supervisor_pb2.ShutdownReply()

    async def WatchCluster(self, request: Any, context: Any) -> AsyncIterator[supervisor_pb2.Cluster]:
        self.num_watches += 1
        await context.abort(self.code or grpc.StatusCode.INTERNAL, "no")
        yield supervisor_pb2.Cluster()  # makes it a stream


@pytest.fixture
async def dead_and_alive() -> AsyncIterator[tuple[tuple[Face, str], tuple[Face, str]]]:
    """Two supervisors, one after the other; the first is about to end."""
    faces = (Face(grpc.StatusCode.UNAVAILABLE), Face())
    async with serving(ADD, faces[0]) as first, serving(ADD, faces[1]) as second:
        yield (faces[0], f"127.0.0.1:{first}"), (faces[1], f"127.0.0.1:{second}")


@pytest.mark.long
async def test_the_next_supervisor_is_asked_when_the_first_one_ends_meanwhile(dead_and_alive: Any) -> None:
    (dead, address), (alive, next_address) = dead_and_alive

    async def find() -> str:
        return str(next_address)

    await stop_cluster(address, 3.0, find)
    assert (dead.graces, alive.graces) == ([3.0], [3.0])


async def test_an_unknown_address_is_asked_for_first(dead_and_alive: Any) -> None:
    _, (alive, next_address) = dead_and_alive

    async def find() -> str:
        return str(next_address)

    await stop_cluster("", 0.0, find)
    assert alive.graces == [0.0]


@pytest.mark.long
async def test_a_refusal_or_silence_is_not_an_end(dead_and_alive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "STOP_S", 0.2)
    (dead, address), _ = dead_and_alive
    dead.code = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(WorkerLostError, match="PERMISSION_DENIED"):
        await stop_cluster(address, 0.0, asyncio.Future)
    dead.code = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(WorkerLostError, match="did not answer within"):
        await stop_cluster(address, 0.0, asyncio.Future)


class FakeActor:
    """The supervisor's actor, which lives all the time.

    Attributes:
        failures: of its start, to be told before it serves.
    """

    def __init__(self, address: str) -> None:
        self.wait_ready = self
        self.failures: list[NotStarted] = []
        self._address = address

    async def remote(self) -> SupervisorFace | NotStarted:
        return self.failures.pop(0) if self.failures else SupervisorFace(self._address, SecurityConfig(), 0, 0)


@pytest.fixture
def reporter() -> Reporter:
    return Reporter()


def serving_of(address: str, reporter: Reporter) -> Serving:
    """Of a cluster in a joined Ray, whose supervisor listens there."""
    serving = Serving(Config(), "10.0.0.1:6379", reporter)
    serving._supervisor = FakeActor(address)
    return serving


TAKEN = NotStarted("cannot listen on 127.0.0.1:7000", "")
WRONG = NotStarted("Ray knows this node by one that leads nowhere", "config")


@pytest.mark.parametrize(
    ("has_served", "meanwhile"), [(False, "nothing else starts before it"), (True, "requests go on")]
)
async def test_what_keeps_a_supervisor_from_starting_for_a_moment_is_waited_out_and_told_once(
    has_served: bool, meanwhile: str, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = serving_of("127.0.0.1:7000", reporter)
    serving._supervisor.failures = [TAKEN] * 5
    serving._was_ready, serving._control_address = has_served, "127.0.0.1:7000" if has_served else ""
    assert (await serving._find_supervisor()).address == "127.0.0.1:7000"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("cannot start yet: cannot listen on 127.0.0.1:7000; it tries again") == 1
    assert meanwhile in said


@pytest.mark.parametrize(("failure", "patience_s"), [(TAKEN, 0.0), (WRONG, 60.0)])
async def test_a_supervisor_that_has_never_served_and_cannot_is_given_up_and_ended(
    failure: NotStarted, patience_s: float, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = list[Any]()
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr(serve, "FIRST_START_S", patience_s)
    serving = serving_of("127.0.0.1:7000", reporter)
    serving._supervisor.failures = [failure] * 2
    with pytest.raises(TandemError, match=f"the supervisor cannot start: {failure.message}"):
        await serving._find_supervisor()
    assert killed == [serving._supervisor]


async def test_one_that_has_served_is_awaited_whatever_it_says(reporter: Reporter) -> None:
    serving = serving_of("127.0.0.1:7000", reporter)
    serving._supervisor.failures = [WRONG] * 3
    serving._was_ready, serving._control_address = True, "127.0.0.1:7000"
    assert (await serving._find_supervisor()).address == "127.0.0.1:7000"


async def test_what_may_live_on_in_a_joined_ray_is_said(
    dead_and_alive: Any, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    (dead, address), _ = dead_and_alive
    dead.code = grpc.StatusCode.INTERNAL
    serving = serving_of(address, reporter)
    await serving._shut_down(0.0)
    assert serving.left_running
    said = " ".join(capsys.readouterr().out.split())
    assert "Nobody has confirmed that everything stopped" in said
    assert "tandem stop --now --address 10.0.0.1:6379" in said


async def test_a_supervisor_whose_address_is_not_known_yet_is_stopped_too(
    dead_and_alive: Any, reporter: Reporter
) -> None:
    _, (alive, address) = dead_and_alive
    serving = serving_of(address, reporter)
    await serving._shut_down(0.0)
    await serving._shut_down(0.0)
    assert alive.graces == [0.0]
    assert not serving.left_running


@pytest.mark.long
async def test_a_supervisor_that_fails_every_call_is_not_asked_without_a_pause(
    dead_and_alive: Any, reporter: Reporter
) -> None:
    (face, address), _ = dead_and_alive
    face.code = grpc.StatusCode.INTERNAL
    watching = asyncio.create_task(serving_of(address, reporter)._watch(cast(Plan, None)))
    await asyncio.sleep(5 * serve._FIRST_RETRY_S)
    watching.cancel()
    assert 1 <= face.num_watches <= 3  # at 0, 0.2 and 0.6 s


async def test_a_supervisor_that_does_not_know_us_is_not_asked_again(dead_and_alive: Any, reporter: Reporter) -> None:
    (face, address), _ = dead_and_alive
    face.code = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(ForbiddenError, match=address):
        await asyncio.wait_for(serving_of(address, reporter)._watch(cast(Plan, None)), 60)
    assert face.num_watches == 1


class Opened:
    """A supervisor that shows itself and of which nothing may be asked."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.cluster = PoolState(Policy(), new_incarnation=str)
        self.loads: dict[str, Any] = {}
        self.routers: dict[str, Any] = {}
        self.follower = SimpleNamespace(pools={})
        self.now = 0.0


@pytest.mark.parametrize("grace_s", [float("nan"), float("inf"), -1.0])
async def test_a_time_that_is_none_is_refused(grace_s: float, spec: ClusterSpec) -> None:
    service = SupervisorService(cast(Supervisor, Opened()), spec)
    async with serving(ADD, service) as port, make_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = supervisor_pb2_grpc.SupervisorControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Shutdown(supervisor_pb2.ShutdownRequest(grace_s=grace_s), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        reply = await stub.Drain(supervisor_pb2.DrainRequest(worker_id="decode-0", timeout_s=grace_s), timeout=10)
        assert "--timeout is " in reply.error.message


class Reborn(Face):
    """Ends while it stops its cluster; the next one, at the same address, goes on with it."""

    async def Shutdown(self, request: supervisor_pb2.ShutdownRequest, context: Any) -> supervisor_pb2.ShutdownReply:
        self.code = None if self.graces else grpc.StatusCode.UNAVAILABLE
        return await super().Shutdown(request, context)


@pytest.mark.parametrize("options", [[], ["--now"]])
@pytest.mark.parametrize("stops", [True, False])
async def test_a_cluster_in_a_joined_ray_has_stopped_only_when_its_supervisor_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], stops: bool
) -> None:
    """Its `tandem serve` has been killed: nobody else would end it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    face = Reborn() if stops else Face(grpc.StatusCode.INTERNAL)
    async with serving(ADD, face) as port:
        statefile.write(cluster_file(started=1, local=False, control_address=f"127.0.0.1:{port}"))
        code = await asyncio.to_thread(cli.main, ["stop", *options])
    said = capsys.readouterr()
    assert code == (0 if stops else 1)
    assert ("Stopped." in said.out) == stops
    assert bool(statefile.running()) != stops
    assert len(face.graces) == 2


@pytest.mark.parametrize("line", [["drain", "decode-0"], ["scale", "--decode", "2"], ["status"]])
async def test_nobody_is_told_to_end_a_cluster_whose_version_does_not_know_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with serving(ADD, Face()) as port:  # which does not know these
        statefile.write(cluster_file(local=False, control_address=f"127.0.0.1:{port}"))
        assert await asyncio.to_thread(cli.main, line) == 1
    said = capsys.readouterr().err
    assert "is of a version that does not know this" in said
    assert "stop" not in said
