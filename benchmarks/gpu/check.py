"""All that a machine with a GPU can tell in one run: its tests, the figures, handoffs between two processes.

`tools/gpu_check.sh` calls it. Imports nothing that such a machine might lack: each part is a process of its own with a
time limit, and the failure of one does not stop the next. After each part the JSON is written anew, so that a run which
is cut off has left what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.code import Code

FORMAT = "tandem-gpu-check/1"
RESULT, LOG = "gpu_check.json", "gpu_check.log"

_ROOT = Path(__file__).parents[2]
_FIRST = ("test_gpu_attention", "test_gpu_engine", "test_gpu_handoff", "test_gpu_sampler")
#: Time for what a part was told to end to leave its results.
LAST_WORDS_S = 5.0
#: That run tests beside each other: each has a context of its own on the card.
_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        arguments: of Python.
        limit_s: after which it is ended.
        result: a file that it writes, JSON or JUnit's XML.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    result: str


def parts_of(out: Path, *, small: bool) -> tuple[Part, ...]:
    """In the order in which they run; their limits are 515 s together.

    Plugins of pytest that `pyproject.toml` names need not be there.
    """
    figures, handoff, tests = out / "figures.json", out / "handoff.json", out / "tests.xml"
    of_tests = ["-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rsfE", "--junitxml", str(tests)]
    if find_spec("xdist") is not None:  # most of a test's time a kernel is compiled, on one core
        of_tests += ["-n", str(min(_MOST_PROCESSES, os.cpu_count() or 1))]
    # What says most comes first. Those that compile for other cards say nothing of this one.
    files = [path for path in (_ROOT / "tests/gpu").glob("test_*.py") if path.stem != "test_gpu_compiles"]
    files.sort(key=lambda path: (path.stem not in _FIRST, path.stem))
    device = ("--device", "cpu") if small else ()
    models = ("--models", "tiny") if small else ("--models", "8b", "1b")
    kernels = ("--kernels", "torch") if small else ()
    return (
        Part("tests", (*of_tests, *(str(path.relative_to(_ROOT)) for path in files)), 205.0, str(tests)),
        Part("figures", ("-m", "benchmarks", "gpu", *device, *models, "--json", str(figures)), 225.0, str(figures)),
        Part(
            "handoff",
            ("-m", "benchmarks.gpu.handoff", *device, *kernels, "--json", str(handoff)),
            85.0,
            str(handoff),
        ),
    )


def run(parts: Sequence[Part], out: Path) -> int:
    """Run all; the number of those that did not pass. Leaves `RESULT` and `LOG` in `out`."""
    result: dict[str, Any] = {
        "format": FORMAT, "code": Code.of().as_json(), "python": sys.version.split()[0], "parts": {},
    }  # fmt: skip
    failed = 0
    with (out / LOG).open("wb") as log:
        for part in parts:
            _write(out, result | {"running": part.name})
            told = _run_part(part, log)
            result["parts"][part.name] = told
            failed += not told["passed"]
            _write(out, result)
            print(f"{part.name}: {told['ended']} after {told['seconds']} s", flush=True)
    return failed


def _run_part(part: Part, log: Any) -> dict[str, Any]:
    Path(part.result).unlink(missing_ok=True)
    log.write(f"\n===== {part.name}: python {' '.join(part.arguments)}\n".encode())
    log.flush()
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(_ROOT)] if os.environ.get("PYTHONPATH") else [str(_ROOT)])
    begin_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.arguments], cwd=_ROOT, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL,
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    is_late = False
    try:
        process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finally:
        _end_group(process.pid)
    ended = f"cut off at {part.limit_s:.0f} s" if is_late else f"exit code {process.returncode}"
    return {
        "passed": not is_late and process.returncode == 0,
        "ended": ended,
        "seconds": round(time.monotonic() - begin_s, 1),
        "result": _read(Path(part.result)),
    }


def _end_group(pid: int) -> None:
    """What a part has started and left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(path: Path) -> Any:
    """What a part has left; `None`: nothing that can be read."""
    try:
        return _read_tests(path) if path.suffix == ".xml" else json.loads(path.read_text())
    except (OSError, ValueError, xml.etree.ElementTree.ParseError):
        return None


def _read_tests(path: Path) -> dict[str, Any]:
    """Counts of pytest, the names of what failed, and the reasons of what was skipped."""
    suite = next(xml.etree.ElementTree.parse(path).iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed: list[str] = []
    reasons: dict[str, int] = {}
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        if (skipped := case.find("skipped")) is not None:
            reason = skipped.get("message", "")
            reasons[reason] = reasons.get(reason, 0) + 1
    return counts | {"failed": failed, "reasons_of_skips": reasons}


def _write(out: Path, result: dict[str, Any]) -> None:
    target = out / RESULT
    scratch = target.with_suffix(".new")
    scratch.write_text(json.dumps(result, indent=1) + "\n")
    scratch.replace(target)


def main(arguments: list[str] | None = None) -> int:
    """0: all parts passed; 1: some did not."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="on the CPU, with a tiny model: shows that it runs")
    options = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT") or "gpu-check").absolute()
    out.mkdir(parents=True, exist_ok=True)
    failed = run(parts_of(out, small=options.small), out)
    print(f"see {out / RESULT} and {out / LOG}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
