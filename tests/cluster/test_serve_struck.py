"""What happens to a cluster when one of its processes is killed or stopped while requests run.

The tests leave it as they found it: 1 prefill, 1 decode, one router, nothing held; the last one ends it.
What takes long is left to `make test-faults`.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Load, Serve, Stream, rare

from tandem.core.config import TransportConfig
from tests.support.stopping import stop_still
from tests.support.waiting import SLACK, nothing, wait_until

pytestmark = pytest.mark.timeout(240)

LEASE_S = TransportConfig().lease_s


@pytest.fixture(autouse=True)
def _one_router(serve: Serve) -> None:
    if len(serve.status()["routers"]) != 1:
        assert serve.tandem("scale", "--routers", "1").returncode == 0


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(serve: Serve) -> Iterator[None]:
    yield
    if serve.process.poll() is not None:
        return
    serve.until(lambda cluster: cluster.get("settled", False))
    wait_until(lambda: pages_held(serve), "no page held", 4 * LEASE_S, wanted=nothing, every_s=0.2)


def pages_held(serve: Serve) -> dict[str, dict[str, int]]:
    """Pages that are neither free nor cached, by worker; one that the supervisor has not heard yet may hold some."""
    held = {}
    for worker in serve.status()["workers"]:
        told = worker["load"]["pages"] if worker["load"] is not None else {"unknown": 1}
        pages = {state: n for state, n in told.items() if n and state not in ("free", "cached")}
        if pages:
            held[worker["member"]["worker_id"]] = pages
    return held


def actor(serve: Serve, kind: str) -> psutil.Process:
    (process,) = [p for p in serve.processes() if f"ray::{kind}" in " ".join(p.cmdline())]
    return process


def hit(process: psutil.Process, number: int) -> float:
    """Send the signal; when that was."""
    process.send_signal(number)
    return time.monotonic()


def answers_within(serve: Serve, bound_s: float, since: float) -> None:
    """A request is answered with 200 at most `SLACK * bound_s` after `since`."""

    def ask() -> str:
        try:
            response = serve.complete(timeout_s=SLACK * bound_s)
        except httpx.HTTPError as error:
            return repr(error)
        return "" if response.status_code == 200 else f"{response.status_code}: {response.text[:200]}"

    left_s = since + SLACK * bound_s - time.monotonic()
    wait_until(ask, "an answer", left_s, wanted=nothing, every_s=0.05)
    took_s = time.monotonic() - since
    print(f"answered again after {took_s:.2f} s")
    assert took_s < SLACK * bound_s


@contextmanager
def undisturbed(serve: Serve, max_tokens: int = 200) -> Iterator[Stream]:
    """A stream that runs while the block does its worst, and ends as if nothing had happened."""
    expected = serve.complete(max_tokens=max_tokens).json()["choices"][0]["text"]
    stream = Stream(serve, max_tokens=max_tokens)
    stream.wait_for_token()
    yield stream
    stream.join()
    assert stream.error is None
    assert (stream.text, stream.finish) == (expected, "length")


@pytest.mark.parametrize("number", [signal.SIGKILL, rare(signal.SIGSTOP)])
def test_the_router_is_replaced_and_its_address_answers_again(serve: Serve, number: int) -> None:
    router = actor(serve, "RouterActor")
    before = serve.status()["router"]["incarnation"]
    with Load(serve, num_clients=4) as load:
        load.wait_for(4)
        since = hit(router, number)
        # Killed: Ray, or the watcher, tells at once. Stopped: after the lease. Then a process must start.
        answers_within(serve, (1.0 if number == signal.SIGKILL else LEASE_S) + 5.0, since)
    assert all(r.status_code in (200, 503) for r in load.responses), load.failures
    assert not router.is_running() or router.status() == psutil.STATUS_ZOMBIE
    after = serve.status()["router"]
    assert after["incarnation"] != before
    assert after["url"] == serve.url
    if number == signal.SIGSTOP:
        assert "it answered no heartbeat" in after["detail"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_while_the_supervisor_is_away(serve: Serve, number: int) -> None:
    pid = serve.status()["pid"]
    lives = {name: member["incarnation"] for name, member in serve.members().items()}
    with undisturbed(serve):
        since = hit(psutil.Process(pid), number)
        cluster = serve.until(lambda c: c["pid"] != pid and c.get("settled", False))
        bound_s = (1.0 if number == signal.SIGKILL else LEASE_S) + 5.0
        assert time.monotonic() - since < SLACK * bound_s
    assert {w["member"]["worker_id"]: w["member"]["incarnation"] for w in cluster["workers"]} == lives


def test_a_later_supervisor_goes_on_with_a_drain_and_keeps_the_sizes(serve: Serve) -> None:
    pid = serve.status()["pid"]
    ((name, old),) = ((n, m["incarnation"]) for n, m in serve.members().items() if n.startswith("decode"))
    assert serve.tandem("drain", name, "--no-wait").returncode == 0
    psutil.Process(pid).kill()
    cluster = serve.until(
        lambda c: (
            c["pid"] != pid and c.get("settled", False) and all(w["member"]["incarnation"] != old for w in c["workers"])
        )
    )
    assert sorted(pool["wanted"] for pool in cluster["pools"]) == [1, 1]
    assert len(cluster["workers"]) == 2


@pytest.mark.faults
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_stopped_under_load_is_killed_and_replaced(serve: Serve, role: str) -> None:
    """What it had reserved, written or read comes back on the other side: the fixture looks."""
    before = next(m for name, m in serve.members().items() if name.startswith(role))
    with Load(serve, num_clients=4) as load:
        load.wait_for(4)
        process = psutil.Process(before["pid"])
        stop_still(process.pid)
        serve.until(lambda c: all(w["member"]["incarnation"] != before["incarnation"] for w in c["workers"]))
        serve.until(lambda c: c.get("settled", False))
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not load.errors
    for response in load.responses:  # answered, or a typed error
        assert response.status_code == 200 or response.json()["error"]["code"], response.text


@pytest.mark.faults
def test_what_ends_while_the_supervisor_is_away_is_proved_by_the_next(serve: Serve) -> None:
    """Both are killed at once: nobody sees the worker end, and pages may wait for the proof."""
    cluster = serve.status()
    (before,) = [member for name, member in serve.members().items() if name.startswith("prefill")]
    psutil.Process(cluster["pid"]).kill()
    psutil.Process(before["pid"]).kill()
    serve.until(
        lambda c: (
            c["pid"] != cluster["pid"]
            and c.get("settled", False)
            and all(w["member"]["incarnation"] != before["incarnation"] for w in c["workers"])
        )
    )
    log = (Path(cluster["log_directory"]) / "supervisor.log").read_text()
    assert f"ProcessEnded(incarnation='{before['incarnation']}')" in log


@pytest.mark.faults
def test_a_rolling_restart_of_every_worker_under_load_has_no_errors(serve: Serve) -> None:
    before = {member["incarnation"] for member in serve.members().values()}
    with Load(serve, num_clients=4) as load:
        for worker_id in list(serve.members()):
            run = serve.tandem("drain", worker_id)
            assert run.returncode == 0, run.stderr + run.stdout
            assert f"Done: {worker_id} has been replaced" in run.stdout
    assert load.failures == []
    assert len(load.responses) > 8
    assert before.isdisjoint(member["incarnation"] for member in serve.members().values())


@pytest.mark.faults
def test_a_drain_without_room_for_both_goes_one_after_the_other(serve: Serve) -> None:
    (name,) = [name for name in serve.members() if name.startswith("decode")]
    run = serve.tandem("drain", name, "--no-replace-first")
    assert run.returncode == 0, run.stderr + run.stdout
    assert serve.complete().status_code == 200


def test_a_drain_of_nobody_names_those_that_are_there(serve: Serve) -> None:
    run = serve.tandem("drain", "decode-77")
    assert run.returncode == 1
    assert "there is no worker decode-77; there are decode-" in run.stderr


def test_ctrl_c_waits_for_requests_says_so_and_leaves_no_process(serve: Serve) -> None:
    """The last test: it ends the cluster."""
    family = serve.processes()
    assert len(family) > 5
    stream = Stream(serve, max_tokens=2000)
    stream.wait_for_token()
    serve.process.send_signal(signal.SIGINT)
    cluster = serve.until(lambda c: c.get("stopping", False))
    assert not cluster.get("settled", False)
    assert cluster["router"]["state"] == "draining"
    run = serve.tandem("status")
    assert re.search(r": stopping: [01] requests? under way;", run.stdout)  # as of the router's last heartbeat
    stream.join()
    begun = time.monotonic()
    assert stream.finish == "length"
    assert serve.process.wait(timeout=60) == 0
    assert time.monotonic() - begun < 15
    assert serve.processes() == []
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    assert serve.lines[-1] == "Stopped."
    assert serve.tandem("status").returncode == 3
