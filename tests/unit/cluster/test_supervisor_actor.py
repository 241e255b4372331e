"""The actor around the supervisor starts it until it serves. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.cluster.ray import supervisor_actor as module
from tandem.cluster.ray.supervisor_actor import SupervisorActor
from tandem.cluster.ray.supervisor_process import make_policy
from tandem.cluster.spec import ClusterSpec, NotStarted, SupervisorFace
from tandem.core.config import from_dict
from tandem.core.errors import ConfigError


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> ClusterSpec:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "begin", lambda *_: None)
    monkeypatch.setattr(module, "this_process", lambda: SimpleNamespace(started=7))
    return ClusterSpec(from_dict({}), "m", "", {}, {}, True, 7000, "", "", "")


def started(spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> SupervisorActor:
    async def serve(_spec: Any, _keys: Any, _face: Any, on_listening: Callable[[], None], _secret: bytes) -> None:
        if failures:
            raise failures.pop(0)
        on_listening()

    monkeypatch.setattr(module, "serve_supervisor", serve)
    return SupervisorActor(spec, frozenset())


def test_failures_of_a_start_are_told_one_by_one_and_it_is_started_again(
    spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError("the port is taken"), ConfigError("a wrong key", key="x"), ValueError("a defect")]
    actor = started(spec, monkeypatch, list(failures))
    told = [cast(NotStarted, actor.wait_ready()) for _ in failures]
    assert [each.message for each in told] == ["the port is taken", str(failures[1]), "ValueError: a defect"]
    assert [bool(each.code) for each in told] == [False, True, False]
    face = actor.wait_ready()
    assert isinstance(face, SupervisorFace)
    assert actor.wait_ready() == face, "whoever asks later is told the same"


def test_what_fails_before_the_supervisor_is_made_fails_no_constructor(
    spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts an actor again whose process ends, and never one whose constructor raises."""
    left = [OSError("no space left on device")]

    def begin(*_: Any) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(module, "begin", begin)
    actor = started(spec, monkeypatch, [])
    assert actor.wait_ready() == NotStarted("no space left on device", "")
    assert isinstance(actor.wait_ready(), SupervisorFace)


@pytest.mark.parametrize("lease_s", [1.0, 10.0, 600.0])
def test_whoever_loads_is_asked_several_times_before_its_silence_ends_it(lease_s: float) -> None:
    config = from_dict({"transport": {"lease_s": lease_s}})
    assert make_policy(config).loading_silence_s >= max(60.0, 3 * config.transport.heartbeat_s)
