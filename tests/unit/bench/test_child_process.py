"""Processes that a measurement starts end with it, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tandem.bench.child_process import log_tail, start_child, stop_child
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

CHILD = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
MEASUREMENT = """
import asyncio, pathlib, sys
from tandem.bench.child_process import start_child

async def measure():
    here = pathlib.Path(sys.argv[1])
    child = await start_child([sys.executable, "-c", sys.argv[2], str(here / "runs")], here / "log", {})
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(measure())
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_what_a_measurement_has_started_ends_when_it_is_killed(number: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", MEASUREMENT, str(tmp_path), CHILD]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        child = psutil.Process(int(measurement.stdout.readline()))
        wait_until((tmp_path / "runs").exists, "the start of the child", 20)
        assert child.cmdline()[:2] == [sys.executable, "-c"], "it is the program itself, under the number that is known"
        (measurement.terminate if number == "SIGTERM" else measurement.kill)()
        measurement.wait(20)
    gone, alive = psutil.wait_procs([child], timeout=20)
    for process in alive:  # red without it: nobody else would end it
        process.kill()
    assert gone == [child]


async def test_a_program_that_is_not_there_is_said_in_its_log(tmp_path: Path) -> None:
    child = await start_child([str(tmp_path / "none")], tmp_path / "log", {})
    assert await child.wait() == 1
    await stop_child(child)
    assert "none cannot be started: No such file or directory" in log_tail(tmp_path / "log")


@pytest.mark.parametrize("own_session", [True, False])
async def test_each_leads_a_group_by_which_all_of_it_is_ended(own_session: bool, tmp_path: Path) -> None:
    runs, heir = tmp_path / "runs", tmp_path / "heir"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    program = "import os, pathlib, sys; pathlib.Path(sys.argv[2]).write_text(str(os.getpid()));" + CHILD
    child = await start_child(
        [sys.executable, "-c", parent, program, str(runs), str(heir)], tmp_path / "log", {}, own_session=own_session
    )
    wait_until(runs.exists, "the start of the child", 20)
    assert os.getpgid(child.pid) == child.pid
    assert (os.getsid(child.pid) == os.getsid(0)) is not own_session
    left = psutil.Process(int(heir.read_text()))
    await stop_child(child)
    psutil.wait_procs([left], timeout=20)
    assert not left.is_running()
