"""The points of a request's life at which faults are injected lie where their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core import fault_points
from tandem.core.sampling import SamplingParams
from tests.support.scripted_router import Ask, Router
from tests.support.waiting import until
from tests.support.worker_pair import CONFIG, SHARED_LOOP, WorkerPair, prompt_of, running_pair

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


async def test_a_step_that_guesses_right_passes_a_point_before_it_gives_anything_out(
    worker_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held there, it has told of fewer tokens than it knows."""
    armed = fault_points._Armed(tmp_path)
    armed.process = "d"
    monkeypatch.setattr(fault_points, "_armed", armed)
    (tmp_path / "d.decode.guessed").write_text("hold")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=(5,))
    with running_pair(worker_model_dir, config={**CONFIG, "speculation": {"lookup_tokens": 5}}) as guessing:
        async with Router(guessing) as router:
            ask = await router.begin(Ask(prompt_of(40), params))
            await until(lambda: passed(tmp_path), "a guess that is right")
            (sequence,) = guessing.decode.parts.scheduler.running
            assert len(sequence.owner.state.output_ids) > sequence.num_output
            (tmp_path / "d.decode.guessed.go").touch()
            outcome = await router.finish(ask)
        await guessing.settled()
    assert outcome.ids() == [5] * 40


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
