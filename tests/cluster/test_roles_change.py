"""A worker that changes its role, on one host under Ray: it drains, keeps its weights, and serves in the other pool."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import CACHE_BYTES, Load, Serve, rare

from tandem.core import fault_points
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]


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


def changes_s(tmp_path: Path) -> list[float]:
    """Of each change, what the next life took to be ready: first those of decode."""
    found = []
    for file in sorted((tmp_path / "logs").glob("[pd]*.log")):
        for log in file.read_text().split(" goes on as ")[1:]:
            name = log.partition(" ")[0].strip('"},').splitlines()[0]
            told = (tmp_path / "logs" / f"{name}.log").read_text()
            found += re.findall(rf"worker ready: {name} at \S+ after ([\d.]+) s", told)[-1:]
    return [float(seconds) for seconds in found]


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


def test_a_worker_goes_to_the_other_pool_and_back_with_its_weights_under_load(serve: Serve, tmp_path: Path) -> None:
    first = pids(serve.status())
    assert set(first) == {"prefill-0", "decode-0", "decode-1"}
    assert num_loaded(tmp_path) == 3
    expected = serve.complete().text.partition('"text"')[2].partition(",")[0]
    with Load(serve, 3) as load:
        load.wait_for(6)
        changed = scale(serve, 2, 1)
        load.wait_for(len(load.responses) + 6)
        back = scale(serve, 1, 2)
        load.wait_for(len(load.responses) + 6)
    seconds = changes_s(tmp_path)
    print("each life was ready after", seconds)
    assert len(seconds) == 2
    assert max(seconds) < 5
    assert not load.failures
    assert set(pids(changed).values()) == set(pids(back).values()) == set(first.values())
    assert {name.partition("-")[0] for name in pids(changed)} == {"prefill", "decode"}
    assert num_loaded(tmp_path) == 3
    assert serve.complete().text.partition('"text"')[2].partition(",")[0] == expected
    assert serve.interrupt() == 0, serve.output


@pytest.mark.parametrize("fault", [rare("kill"), rare("stop")])
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


@pytest.mark.faults
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
