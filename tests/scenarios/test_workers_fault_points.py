"""The points of a request's life at which faults are injected lie where their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core import fault_points
from tests.support.scripted_router import Ask, Router
from tests.support.worker_pair import SHARED_LOOP, WorkerPair, prompt_of

pytest_plugins = ["tests.support.worker_pair"]
pytestmark = SHARED_LOOP

PREFILL = ("queued", "chunk", "attached", "sending", "written", "committed", "acked")


DECODE = ("queued", "granted", "attached", "commit", "verified", "admitted", "step")
DECODE_ALONE = ("queued", "admitted", "step")  # it computes the prompt by itself


def passed(directory: Path) -> set[str]:
    return {file.name for file in directory.glob("*.hit")}


async def test_a_request_passes_all_points_of_prefill(
    pair: WorkerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is armed to hold, and may go on at once: whoever passed it leaves a mark."""
    armed = fault_points._Armed(tmp_path)
    armed.process = "p"
    monkeypatch.setattr(fault_points, "_armed", armed)
    for name in PREFILL:
        (tmp_path / f"p.prefill.{name}").write_text("hold")
        (tmp_path / f"p.prefill.{name}.go").touch()
    async with Router(pair) as router:
        ask = Ask(prompt_of(40))
        await router.ask(ask)
        await router.heard(ask, "prefill.handoff_done")
    await pair.settled()
    assert passed(tmp_path) == {f"p.prefill.{name}.hit" for name in PREFILL}


@pytest.mark.parametrize(("local", "expected"), [(0, DECODE), (40, DECODE_ALONE)])
async def test_a_request_passes_all_points_of_decode(
    pair: WorkerPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: int, expected: tuple[str, ...]
) -> None:
    armed = fault_points._Armed(tmp_path)
    armed.process = "d"
    monkeypatch.setattr(fault_points, "_armed", armed)
    for name in DECODE:
        (tmp_path / f"d.decode.{name}").write_text("hold")
        (tmp_path / f"d.decode.{name}.go").touch()
    async with Router(pair) as router:
        await router.ask(Ask(prompt_of(40), local=local))
    await pair.settled()
    assert passed(tmp_path) == {f"d.decode.{name}.hit" for name in expected}
