"""Routers of one host that share a port, as real processes: one is stopped, killed, drained, or has just started."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from router.http import siblings
from router.http.siblings import Siblings
from router.server import RouterServer
from tandem import cli
from tandem.core import config as configuration
from tandem.core.errors import ConfigError
from tandem.core.ports import free_port
from tandem.rpc.v1.control_pb2 import DrainRouterRequest
from tests.support.scripted_pool import ScriptedPool
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill
from tests.support.shared_port import BODY, SharedPort, SteadyLoad
from tests.support.stopping import stop_still
from tests.support.waiting import wait_until

ANSWER_S = 20.0
"""On a busy machine; a connection that is stranded would wait for ever."""


# -- the socket, without routers


def bound() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def never() -> socket.socket:
    raise AssertionError("the port is bound a second time")


@pytest.fixture
def sibling(tmp_path: Path) -> Iterator[Callable[[str], Siblings]]:
    made: list[Siblings] = []

    def make(name: str) -> Siblings:
        made.append(Siblings(tmp_path / "siblings", name))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_router_that_gets_the_socket_leaves_it_as_those_need_it_that_accept(
    sibling: Callable[[str], Siblings],
) -> None:
    """Whether an accept waits is the socket's own, for all copies: an event loop that accepts must never wait there."""
    serving, is_shared = sibling("router-0").take_listener(bound)
    with serving:
        assert not is_shared
        assert not os.get_blocking(serving.fileno())
        taken, is_shared = sibling("router-1").take_listener(never)
        with taken:
            assert is_shared
            assert not os.get_blocking(serving.fileno())
            with pytest.raises(BlockingIOError):
                serving.accept()


def test_the_first_binds_and_the_others_get_the_same_socket(sibling: Callable[[str], Siblings]) -> None:
    first, first_shares = sibling("router-0").take_listener(bound)
    second, second_shares = sibling("router-1").take_listener(never)
    assert (first_shares, second_shares) == (False, True)
    assert os.fstat(first.fileno()).st_ino == os.fstat(second.fileno()).st_ino
    assert not second.get_inheritable()
    first.close()
    with socket.create_connection(second.getsockname(), 5):
        second.accept()[0].close()
    second.close()


def test_it_is_to_be_had_as_long_as_one_has_it(sibling: Callable[[str], Siblings]) -> None:
    first, second = sibling("router-0"), sibling("router-1")
    first.take_listener(bound)[0].close()
    second.take_listener(never)[0].close()
    first.leave()
    third = sibling("router-2")
    third.take_listener(never)[0].close()
    for each in (second, third):
        each.leave()
    listener, is_shared = sibling("router-3").take_listener(bound)
    assert not is_shared
    listener.close()


def test_one_at_whose_door_too_many_wait_is_silent_and_not_taken_for_ended(
    tmp_path: Path, sibling: Callable[[str], Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and the others have asked it again and again."""

    def taken() -> socket.socket:
        raise ConfigError("the port is taken", key="--port")

    monkeypatch.setattr(siblings, "_ANSWER_S", 0.1)
    monkeypatch.setattr(siblings, "_PATIENCE_S", 0.0)
    starting, entry = sibling("router-0"), tmp_path / "siblings" / "router-1.77"
    with ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(str(entry))
        stopped.listen(0)
        is_full = False
        while not is_full:
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            is_full = other.connect_ex(str(entry)) == errno.EAGAIN
        with pytest.raises(ConfigError, match="the port is taken; router-1 may have it, and did not answer"):
            starting.take_listener(taken)
        assert entry.exists()


@pytest.mark.long
def test_one_that_is_still_for_a_while_is_asked_again(sibling: Callable[[str], Siblings]) -> None:
    """As on a host that starts everything at once: it has the port, and answers late."""
    busy, starting = sibling("router-0"), sibling("router-1")
    busy.take_listener(bound)[0].close()
    with ExitStack() as stack:
        stack.enter_context(busy._handing)  # so its thread stands still before the answer
        was_silent = False

        def refused() -> socket.socket:
            nonlocal was_silent
            was_silent = True
            stack.close()
            raise ConfigError("in use", key="http.port")

        listener, is_shared = starting.take_listener(refused)
        listener.close()
    assert is_shared
    assert was_silent


def test_of_many_that_start_together_one_binds(sibling: Callable[[str], Siblings]) -> None:
    routers = [sibling(f"router-{n}") for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda each: each.take_listener(bound), routers, timeout=20))
    assert sorted(is_shared for _, is_shared in taken) == [False] + [True] * 7
    assert len({os.fstat(listener.fileno()).st_ino for listener, _ in taken}) == 1
    for listener, _ in taken:
        listener.close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "siblings").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="others may enter"):
        Siblings(tmp_path / "siblings", "router-0")


# -- processes


@pytest.fixture
def shared(checkpoint: Path, tmp_path: Path) -> Iterator[SharedPort]:
    port = SharedPort(tmp_path, checkpoint)
    yield port
    port.close()


def stream_of(client: httpx.Client, outcome: list[str]) -> threading.Thread:
    """A stream that has begun; `outcome` gets its last line or why it broke."""
    begun = threading.Event()

    def read() -> None:
        try:
            with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 40, "stream": True}) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    last = line or last  # noqa: F821 - an empty line comes after the first
            outcome.append(last)
        except httpx.HTTPError as error:
            outcome.append(f"broken: {error!r}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(20)
    return thread


@pytest.mark.processes
def test_a_stopped_router_strands_only_the_connections_that_it_had_accepted(shared: SharedPort) -> None:
    first, second = shared.start("router-0"), shared.start("router-1")
    with shared.accepted_by(first, second) as own, shared.accepted_by(second, first) as stranded:
        stop_still(second.pid)
        for _ in range(20):
            assert httpx.post(f"{shared.url}/v1/completions", json=BODY, timeout=ANSWER_S).status_code == 200
        assert own.get("/health").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            stranded.get("/health", timeout=1.0)
        assert 'tandem_router_answers{router="router-1"} 0' in shared.metrics()
        psutil.Process(second.pid).resume()


@pytest.mark.processes
@pytest.mark.faults  # in `make test` one of a whole cluster does so, in tests/cluster/test_serve_routers.py
def test_a_killed_router_breaks_its_own_streams_and_its_successor_takes_connections(shared: SharedPort) -> None:
    first, second = shared.start("router-0"), shared.start("router-1")
    shared.decode.token_gap_s = 0.1
    goes_on, breaks = list[str](), list[str]()
    with shared.accepted_by(first, second) as own, shared.accepted_by(second, first) as other:
        streams = [stream_of(own, goes_on), stream_of(other, breaks)]
        second.end()
        for _ in range(10):
            assert httpx.get(f"{shared.url}/health", timeout=ANSWER_S).status_code == 200
        for stream in streams:
            stream.join(30)
    assert goes_on == ["data: [DONE]"]
    assert breaks[0].startswith("broken: ")
    successor = shared.start("router-1")
    with shared.accepted_by(successor, first) as client:
        assert client.post("/v1/completions", json={**BODY}).status_code == 200


@pytest.mark.processes
@pytest.mark.faults  # in `make test` one of a whole cluster does so, and seven of eight below
def test_a_router_that_leaves_under_load_fails_no_request_and_ends_its_streams(shared: SharedPort) -> None:
    first, second = shared.start("router-0"), shared.start("router-1")
    shared.decode.token_gap_s = 0.05
    ends: list[str] = []
    with SteadyLoad(shared.url, 6) as load, shared.accepted_by(second, first) as client:
        stream = stream_of(client, ends)
        load.wait_for(10)
        left = second.leave()
        wait_until(lambda: "the router leaves" in second.log.read_text(), "its leaving")
        load.wait_for(20)
        left.result(60)
        assert not second.ports()
        assert second.stop() == 0
        stream.join(30)
        load.wait_for(20)
    assert not load.failures
    assert ends == ["data: [DONE]"]


@pytest.mark.processes
def test_a_router_that_has_just_started_takes_no_connection_before_it_knows_the_workers(shared: SharedPort) -> None:
    shared.start("router-0")
    with SteadyLoad(shared.url, 4) as load:
        second = shared.start("router-1", told=False)
        load.wait_for(30)
        assert not second.ports()
        second.pool.workers.extend(shared.workers)
        shared.tell()
        wait_until(second.ports, "connections of the second router", 20)
        load.wait_for(10)
    assert not load.failures


@pytest.mark.processes
@pytest.mark.faults  # eight do so in `make test`
def test_one_port_grows_to_three_routers_and_shrinks_to_one_under_load(shared: SharedPort) -> None:
    first = shared.start("router-0")
    with SteadyLoad(shared.url, 6) as load:
        others = [shared.start(f"router-{n}") for n in (1, 2)]
        load.wait_for(20)
        for router in others:
            router.leave().result(60)
            assert router.stop() == 0
        load.wait_for(10)
    assert not load.failures
    assert first.popen.poll() is None


@pytest.mark.processes
def test_one_scrape_has_the_figures_of_all(shared: SharedPort) -> None:
    first, second = shared.start("router-0"), shared.start("router-1")
    with shared.accepted_by(first, second) as one, shared.accepted_by(second, first) as other:
        for client, num in ((one, 1), (other, 2)):
            for _ in range(num):
                assert client.post("/v1/completions", json=BODY).status_code == 200
        for client in (one, other):
            text = client.get("/metrics").text
            for number in (0, 1):
                line = f'tandem_requests_total{{outcome="finished",router="router-{number}"}} {number + 1}.0'
                assert line in text
                assert f'tandem_router_answers{{router="router-{number}"}} 1' in text
            assert text.count("# TYPE tandem_requests_total counter") == 1


@pytest.mark.processes
def test_one_page_shows_the_requests_of_all(shared: SharedPort, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = shared.start("router-0"), shared.start("router-1")
    with shared.accepted_by(first, second) as one, shared.accepted_by(second, first) as other:
        ids = [client.post("/v1/completions", json=BODY).headers["x-request-id"] for client in (one, other)]
        for client in (one, other):
            with client.stream("GET", "/v1/events") as events:
                told = json.loads(next(line for line in events.iter_lines() if line.startswith("data: "))[6:])
            assert [router["router"] for router in told["routers"]] == ["router-0", "router-1"]
            assert {row["id"].partition("#")[0] for row in told["ended"]} == set(ids)
    for asked, sibling in ((first, second), (second, first)):
        with shared.accepted_by(asked, sibling) as client:
            for number, name in enumerate(ids):
                of = f"router-{number}"
                (found,) = client.get(f"/v1/requests/{name}").json()["data"]
                assert (found["router"], found["state"], found["spans"][-1]["name"]) == (of, "finished", "send")
                (way,) = client.get(f"/v1/requests/{name}/explain").json()["data"]
                assert (way["router"], way["id"]) == (of, found["id"])
                (choice,) = way["attempts"]
                assert (choice["prefill"], choice["decode"], choice["why"]) == ("prefill-0", "decode-0", "load")
                assert {candidate["worker"] for candidate in choice["candidates"]} >= {"prefill-0"}
    # And by the command, whose connection any of the two accepts.
    for number, name in enumerate(ids):
        assert cli.main(["trace", name, "--url", f"http://127.0.0.1:{first.http_port}"]) == 0
        said = capsys.readouterr().out
        assert f"; router-{number}" in said
        assert "prefill-0 → decode-0 (load)" in said


@pytest.mark.processes
@pytest.mark.faults  # it is asked for as long as one may be busy; `make test` has what it is told by, above
def test_where_the_only_other_router_is_stopped_the_error_names_it(shared: SharedPort) -> None:
    first = shared.start("router-0")
    stop_still(first.pid)
    run = subprocess.run(
        shared.command("router-1", shared.directory / "never.json"), capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert "router-0 may have it, and did not answer" in run.stderr
    assert json.loads((shared.directory / "tandem.yaml").read_text())
    first.popen.send_signal(signal.SIGCONT)
    second = shared.start("router-1")
    with shared.accepted_by(second, first) as client:
        assert client.get("/health").status_code == 200


# -- many of them


@dataclass
class Routers:
    """Routers of one port in this process, each with a loop and a thread of its own, before two pairs of workers."""

    checkpoint: Path
    meeting_place: Path
    port: int = field(default_factory=free_port)
    servers: list[RouterServer] = field(default_factory=list)
    pools: list[ScriptedPool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = configuration.load(None, {"transport.lease_s": 30.0, "scheduling.mixed_pool": False})
        self.workers = [kind(f"{kind.kind}-{n}") for kind in (ScriptedPrefill, ScriptedDecode) for n in range(2)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, number: int) -> None:
        name = f"router-{number}"
        place = {"name": name, "siblings": self.meeting_place, "http_port": self.port}
        server = RouterServer(self.config, model_dir=self.checkpoint, **place)
        self.pools.append(ScriptedPool(server.start().control_address))
        self.pools[-1].num_routers = 8
        self.pools[-1].workers.extend(self.workers)
        self.servers.append(server)
        everyone = [pool.as_other(f"router-{number}") for number, pool in enumerate(self.pools)]
        for own, pool in zip(everyone, self.pools, strict=True):
            pool.others = [other for other in everyone if other is not own]
            pool.push()

    def drain(self, number: int) -> None:
        self.pools[number].control.DrainRouter(DrainRouterRequest(others_serve=True), timeout=60)
        self.servers[number].stop(drain_s=1.0)

    def close(self) -> None:
        for server in self.servers:
            server.stop(drain_s=0.2)
        for pool in self.pools:
            pool.workers = []
            pool.close()
        for worker in self.workers:
            worker.kill()


@pytest.mark.long
@pytest.mark.parametrize("num", [3, pytest.param(8, marks=pytest.mark.faults)])
def test_routers_serve_side_by_side_and_all_but_one_leave_under_load(
    checkpoint: Path, tmp_path: Path, num: int
) -> None:
    with closing(Routers(checkpoint, tmp_path / "siblings")) as routers:
        for number in range(num):
            routers.start(number)
        with SteadyLoad(routers.url, 16) as load:
            load.wait_for(200)
            text = httpx.get(f"{routers.url}/metrics", timeout=30).text
            assert len(re.findall(r'tandem_router_answers{router="router-\d"} 1', text)) == num
            served = re.findall(r'tandem_requests_total{outcome="finished",router="(router-\d)"} \d+', text)
            assert len(served) >= 2, "one router has taken all connections"
            for number in range(1, num):
                routers.drain(number)
                load.wait_for(5)
        assert not load.failures
        assert not any(server.has_failed for server in routers.servers)
