"""A worker ends while it changes its role, or the supervisor does; that one does so in order is in test_serve.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import CACHE_BYTES, Load, Serve

from tandem.core import fault_points
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    (tmp_path / "points").mkdir()
    pool = {"threads": 1}
    serve = Serve(
        tmp_path,
        "--prefill", "1", "--decode", "2",
        env={fault_points.VARIABLE: str(tmp_path / "points")},
        pools={"prefill": pool, "decode": pool, "flexible": 1},
        cache={"memory_bytes": CACHE_BYTES},
        transport={"lease_s": 3.0},
        logging={"directory": str(tmp_path / "logs")},
    )  # fmt: skip
    try:
        yield serve.wait_ready()
    finally:
        serve.clean_up()


def num_loaded(tmp_path: Path) -> int:
    """How often the model was loaded, by any worker."""
    logs = [file.read_text() for file in (tmp_path / "logs").glob("*.log") if file.name[0] in "pd"]
    return sum(" attention, " in line and "loaded " in line for log in logs for line in log.splitlines())


def pids(cluster: dict[str, Any]) -> dict[str, int]:
    return {each["member"]["worker_id"]: each["member"]["pid"] for each in cluster["workers"]}


def scale(serve: Serve, prefill: int, decode: int) -> dict[str, Any]:
    """The cluster when it has these sizes."""
    before = serve.status()
    run = serve.tandem("scale", "--prefill", str(prefill), "--decode", str(decode))
    assert run.returncode == 0, run.stderr

    def is_done(cluster: dict[str, Any]) -> bool:
        sizes = {each["role"]: each["ready"] for each in cluster["pools"]}
        return bool(cluster["settled"]) and (sizes["prefill"], sizes["decode"]) == (prefill, decode)

    assert not is_done(before)
    return serve.until(is_done)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_one_that_ends_in_the_middle_loses_no_request_and_a_new_process_takes_its_place(
    serve: Serve, tmp_path: Path, fault: str
) -> None:
    before = pids(serve.status())
    (tmp_path / "points" / "worker.change_role").write_text(fault)
    with Load(serve, 3) as load:
        load.wait_for(6)
        after = scale(serve, 2, 1)
        load.wait_for(len(load.responses) + 6)
    assert list((tmp_path / "points").glob("*.worker.change_role.hit"))
    assert pids(after)["prefill-1"] not in before.values()
    assert not load.failures
    assert num_loaded(tmp_path) == 4


def test_the_next_supervisor_knows_it_in_its_new_role(serve: Serve, tmp_path: Path) -> None:
    changed = scale(serve, 2, 1)
    supervisor = next(each for each in serve.processes() if "SupervisorActor" in " ".join(each.cmdline()))
    supervisor.send_signal(signal.SIGKILL)
    wait_until(lambda: supervisor.is_running(), "the supervisor is gone", 30, wanted=lambda lives: not lives)
    after = serve.until(lambda cluster: bool(cluster["settled"]), 120)
    assert pids(after) == pids(changed)
    # It dies, and one is started in the role that it had.
    name = "prefill-1"
    os.kill(pids(after)[name], signal.SIGKILL)
    again = serve.until(
        lambda cluster: bool(cluster["settled"]) and pids(cluster).get(name) not in (None, pids(after)[name]), 120
    )
    assert set(pids(again)) == set(pids(after))
    assert not psutil.pid_exists(pids(after)[name])
    assert serve.complete().status_code == 200
    assert num_loaded(tmp_path) == 4
