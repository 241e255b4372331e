"""`tandem bench advise` as it is called: real clusters, one after the other, of which none stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import CACHE_BYTES, ROOT

from benchmarks.autoscale.ray_hosts import MARK, marked
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:46.{n}00,{30 + n},{6 + n}\n" for n in range(8)
)


class Advise:
    """One `tandem bench advise` of a small trace in a directory of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.mark = uuid.uuid4().hex
        (directory / "trace.csv").write_text(TRACE)
        pool = {"threads": 1}
        tree = {"cache": {"memory_bytes": CACHE_BYTES}, "pools": {"prefill": pool, "decode": pool}}
        (directory / "tandem.yaml").write_text(json.dumps(tree))  # JSON is YAML
        given = ["--trace", "trace.csv", "--config", "tandem.yaml", "--logs", "logs", "--json", "advice.json", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem.cli", "bench", "advise", *given],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(directory)},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stderr is not None
        assert any(text in line for line in self.process.stderr), f"it ended without saying {text!r}"

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        printed, complained = self.process.communicate(timeout=200)
        return self.process.returncode, printed + complained


@pytest.fixture
def started() -> Iterator[list[Advise]]:
    all_started: list[Advise] = []
    yield all_started
    for advise in all_started:
        for process in marked(advise.mark):
            process.kill()
        advise.process.wait()


@pytest.mark.faults
def test_a_trace_on_a_colocated_cluster_and_on_a_split(started: list[Advise], tmp_path: Path) -> None:
    started.append(Advise(tmp_path, "--repetitions", "1", "--slo-ttft", "60s", "--slo-tpot", "10s"))
    code, said = started[0].end()
    assert code == 0, said
    assert "0+2 (colocated)" in said
    assert "One repetition cannot tell" in said
    content = json.loads((tmp_path / "advice.json").read_text())
    assert content["verdict"]["answer"] == "unclear"
    assert content["slo"] == {"ttft_s": 60.0, "tpot_s": 10.0}
    assert [(run["cluster"], run["repetition"]) for run in content["runs"]] == [("0+2", 1), ("1+1", 1)]
    for run in content["runs"]:
        figures = run["figures"]
        assert figures["num_failed"] == {}
        assert (figures["num_input_tokens"], figures["num_output_tokens"]) == (268, 76)
        assert figures["goodput"]["share"] == 1.0
    assert list(marked(started[0].mark)) == []


@pytest.mark.faults
def test_ctrl_c_ends_the_cluster_and_tells_what_was_measured(started: list[Advise], tmp_path: Path) -> None:
    started.append(Advise(tmp_path, "--repetitions", "1"))
    started[0].wait_for("run 2 of 2: 1+1")
    wait_until(lambda: len(list(marked(started[0].mark))) > 1, "a process of the split", 60)
    started[0].process.send_signal(signal.SIGINT)
    code, said = started[0].end()
    assert code == 130, said
    assert "No verdict" in said
    assert "partial" in said
    content = json.loads((tmp_path / "advice.json").read_text())
    assert content["was_interrupted"] is True
    assert [run["cluster"] for run in content["runs"]] == ["0+2"]
    assert list(marked(started[0].mark)) == []
