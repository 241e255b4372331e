"""Both halves of the handoff under schedules that nobody would think of, and proof that the checks can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from handoff_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.protocol import receiver_events as rx
from kvtransfer.protocol.attempts import SenderState
from kvtransfer.protocol.grants import GrantState
from kvtransfer.protocol.receiver import TRANSITIONS as RECEIVER_TRANSITIONS
from kvtransfer.protocol.receiver import ReceiverHandoffs
from kvtransfer.protocol.sender import TRANSITIONS as SENDER_TRANSITIONS
from kvtransfer.protocol.sender import SenderHandoff


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.integers(0, 2**20), min_size=10, max_size=150))
def test_no_schedule_breaks_an_invariant(choices: list[int]) -> None:
    World().run(choices)


def run_seed(seed: int, num_steps: int = 250) -> World:
    world = World()
    rng = random.Random(seed)
    world.run(rng.randrange(2**20) for _ in range(num_steps))
    return world


def test_long_random_schedules_hold_and_get_somewhere() -> None:
    num_admitted = sum(len(run_seed(seed).admitted) for seed in range(60))
    assert num_admitted >= 20, "the adversary never lets anything through: the schedules prove little"


def test_without_faults_every_attempt_is_admitted() -> None:
    world = World()
    for _ in range(3):
        world.new_attempt()
    world.settle()
    assert len(world.admitted) == 3


def find_violation(num_seeds: int = 150) -> str | None:
    """What the first schedule that breaks an invariant broke. The first 60 seeds are those that hold above."""
    for seed in range(num_seeds):
        try:
            run_seed(seed)
        except AssertionError as error:
            return str(error)
    return None


# ---- each guard, turned off, must be missed


def free_at_once(self: ReceiverHandoffs, record: Any, reason: Any, now_s: float) -> None:
    """No quarantine: a cancelled or expired grant frees its pages."""
    self._move(record, GrantState.REFUSED, now_s, reason)
    self._out.append(rx.FreePages(record.key, record.held.grant_id, record.held.pages))


def admit_anything(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """Digests are not looked at."""
    ReceiverHandoffs._verified(self, record, rx.DigestsVerified(event.grant_id), now_s, reason)


def failure_is_success(self: SenderHandoff, event: Any, now_s: float) -> None:
    """A failed write counts as written, so that its grant is committed."""
    SenderHandoff._completed(self, event, now_s)


def no_page_is_busy(self: SenderHandoff) -> set[int]:
    """Source pages are released under outstanding writes."""
    return set()


def idle_at_once(self: SenderHandoff) -> None:
    """The receiver is told that nothing is outstanding, without looking."""
    self._release(self._held - self._busy_pages())
    self._move(SenderState.DONE)
    if self.grant is not None:
        self._confirm_idle(self.grant.grant_id)


def free_while_read(self: ReceiverHandoffs, record: Any, event: Any, now_s: float, reason: Any) -> None:
    """A cancel frees pages whose digests are being read."""
    self._end(record, reason, now_s)


PATCHES: list[Callable[[pytest.MonkeyPatch], None]] = [
    lambda m: m.setattr(ReceiverHandoffs, "_stop", free_at_once),
    lambda m: m.setitem(RECEIVER_TRANSITIONS, (GrantState.VERIFYING, rx.DigestsVerified), admit_anything),
    lambda m: m.setitem(
        SENDER_TRANSITIONS,
        next(k for k in SENDER_TRANSITIONS if k[0] is SenderState.SENDING and k[1].__name__ == "WriteFailed"),
        failure_is_success,
    ),
    lambda m: m.setattr(SenderHandoff, "_busy_pages", no_page_is_busy),
    lambda m: m.setattr(SenderHandoff, "_drain", idle_at_once),
    lambda m: m.setitem(RECEIVER_TRANSITIONS, (GrantState.VERIFYING, rx.RequestCancelled), free_while_read),
]
GUARDS = ["quarantine", "digests", "failed write", "busy source pages", "idle", "pages being read"]
DAMAGE = ["", "admitted what was never sealed", "under a write", "under a write", "may still write it", "were read"]


@pytest.mark.parametrize(("turn_off", "damage"), list(zip(PATCHES, DAMAGE, strict=True)), ids=GUARDS)
def test_each_guard_matters(
    turn_off: Callable[[pytest.MonkeyPatch], None], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_off(monkeypatch)
    violation = find_violation()
    assert violation is not None
    assert damage in violation
