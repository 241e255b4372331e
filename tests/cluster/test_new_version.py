"""A cluster changes to the next version under load: no request fails, and no token differs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tandem.core.protocols import NEWEST
from tests.cluster.serving import ROOT, Serve
from tests.scenarios.client import Answer, ask
from tests.support.waiting import wait_until

PROMPTS = ["Once upon a time", "The dog ran to", "One day, a little girl"]
NOW, LATER = "0.1.0", "0.2.0"

pytestmark = [pytest.mark.timeout(900), pytest.mark.faults]


def build_wheel(folder: Path, *, number: str, newest: int) -> Path:
    """The wheel of this tree, as if its version had this number and spoke protocols up to `newest`."""
    source = folder / "source"
    unwanted = (".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    for name, old, new in (
        ("pyproject.toml", r'^version = ".*"$', f'version = "{number}"'),
        ("tandem/core/protocols.py", r"^NEWEST = \d+$", f"NEWEST = {newest}"),
    ):
        text, changed = re.subn(old, new, (source / name).read_text(), flags=re.MULTILINE)
        assert changed == 1, name
        (source / name).write_text(text)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """This version's, and that of one which speaks the next number of the protocol."""
    now = build_wheel(tmp_path_factory.mktemp("now"), number=NOW, newest=NEWEST)
    return now, build_wheel(tmp_path_factory.mktemp("later"), number=LATER, newest=NEWEST + 1)


@pytest.fixture(scope="module")
def serve(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A cluster that runs from the first wheel."""
    directory = tmp_path_factory.mktemp("serve")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(directory / "installed")
    serve = Serve(
        directory, "--prefill", "1", "--decode", "1",
        env={"PYTHONPATH": str(directory / "installed")},
        logging={"directory": str(directory / "logs")},
        transport={"lease_s": 30.0},
    )  # fmt: skip
    try:
        serve.wait_for("Ready: ", timeout_s=300)  # where this checkout has compiled no kernels, it compiles them
        yield serve
    finally:
        serve.clean_up()


def story(url: str, prompt: str) -> Answer:
    return ask(url, prompt, streamed=True, model="tandem-tiny", max_tokens=24, ignore_eos=True)


@dataclass
class Load:
    """Streams without a pause, one after the other for each prompt, for a `with` block."""

    url: str
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {prompt: [] for prompt in PROMPTS})

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(prompt,)) for prompt in PROMPTS]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, prompt: str) -> None:
        while not self._over.is_set():
            self.answers[prompt].append(story(self.url, prompt))


def versions(serve: Serve) -> dict[str, set[str]]:
    cluster = httpx.get(f"{serve.url}/v1/cluster", timeout=30).json()
    return {pool: {worker["version"] for worker in cluster[pool]} for pool in ("prefill", "decode")}


def test_no_request_fails_and_no_token_differs_while_all_change_to_the_next_version(
    serve: Serve, wheels: tuple[Path, Path]
) -> None:
    wait_until(lambda: versions(serve), "versions", 30, wanted=lambda found: found == {pool: {NOW} for pool in found})
    expected = {prompt: story(serve.url, prompt) for prompt in PROMPTS}
    assert all(answer.done for answer in expected.values())
    with Load(serve.url) as load:
        done = serve.tandem("upgrade", str(wheels[1]), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr + serve.output
    assert f"all workers and routers run {LATER}" in done.stdout
    for prompt, answers in load.answers.items():
        assert answers
        for answer in answers:
            assert (answer.status, answer.error, answer.broken, answer.done) == (200, None, "", True), answer
            assert answer.token_ids == expected[prompt].token_ids
    assert versions(serve) == {"prefill": {LATER}, "decode": {LATER}}
    status = serve.status()
    assert {process["build"]["version"] for process in status["workers"] + status["routers"]} == {LATER}
    spoken = re.findall(r"paired with \S+ \(\S+\) by protocol (\d)", logs_of(serve, "prefill"))
    assert {spoken[0], spoken[-1]} == {str(NEWEST), str(NEWEST + 1)}


def logs_of(serve: Serve, role: str) -> str:
    folder = Path(serve.env["XDG_RUNTIME_DIR"]) / "logs"
    return "".join(path.read_text() for path in sorted(folder.glob(f"{role}-*.log")))


def test_what_is_no_wheel_of_tandem_changes_nothing(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "no.whl").write_bytes(b"no wheel")
    done = serve.tandem("upgrade", str(tmp_path / "no.whl"))
    assert done.returncode == 1
    assert "no wheel" in done.stderr
