"""The kill matrix as data: which process gets which signal at which point of which kind of request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast

import pytest

Role = Literal["prefill", "decode", "router", "supervisor"]
Signal = Literal["kill", "stop"]

#: Which time the process comes to the point, where the first is not the telling one: a later chunk, a later token.
_NTH = {"prefill.chunk": 3, "decode.step": 10, "decode.guessed": 3, "router.token": 10}
#: With guesses there are fewer steps.
_GUESSED_STEPS = 4

POINTS: dict[Role, tuple[str, ...]] = {
    "prefill": ("queued", "chunk", "attached", "sending", "written", "committed", "acked"),
    "decode": ("queued", "granted", "attached", "commit", "verified", "admitted", "step"),
    "router": ("placed", "sent", "granted", "first_token", "token"),
    "supervisor": ("publish", "start_worker"),
}
#: Of a decode worker that guesses: in the midst of a step, some guesses are found right and nothing is given out.
_GUESSED = "guessed"

SIGNALS: tuple[Signal, ...] = ("kill", "stop")

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4, "repetition_penalty": 1.1},
}

#: Taken in turn, so that each point meets each.
EXTRAS: dict[str, dict[str, Any]] = {"one": {}, "n2": {"n": 2}, "stop": {"stop": ["\n\n", " zz"]}}


_ANIMAL = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 100, "maximum": 999}, "k": {"enum": ["cat", "bird", "snail"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
_JSON = {"structured_outputs": {"json": _ANIMAL, "disable_any_whitespace": True}}
#: Outputs by a grammar: complete before `MAX_TOKENS`, and longer than the telling points are late.
FORMS: dict[str, dict[str, Any]] = {"json": _JSON, "json-n2": {**_JSON, "n": 2}}
#: Outputs of two tokens, which repeat themselves: steps take several of them at once.
GUESSED: dict[str, dict[str, Any]] = {"guesses": {"allowed_token_ids": [262, 300], "ignore_eos": True}}
#: Outputs for which a draft model proposes tokens: long enough for it to read the prompt, and to go on elsewhere.
DRAFTED: dict[str, dict[str, Any]] = {"drafts": {}, "drafts-n2": {"n": 2}}
_DRAFTED_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 11},
}
_DRAFTED_TOKENS = 96


@dataclass(frozen=True)
class Case:
    """One request and one fault.

    Attributes:
        role: of the process that is struck. Which one of its pool it is the router says that places the request.
        point: with its role, e.g. `prefill.chunk`.
        signal: SIGKILL; or SIGSTOP, and SIGCONT once the lease is over.
        nth: which time the process comes to the point.
    """

    role: Role
    point: str
    signal: Signal
    streamed: bool
    sampling: str
    extra: str

    @property
    def nth(self) -> int:
        num = nth_of(self.point)
        return min(num, _GUESSED_STEPS) if self.extra in GUESSED else num

    @property
    def fields(self) -> dict[str, Any]:
        """Of the request, beside prompt and `max_tokens`."""
        if (given := DRAFTED.get(self.extra)) is not None:
            sampling = _DRAFTED_SAMPLINGS[self.sampling]
            return {**sampling, **given, "logprobs": 1, "ignore_eos": True, "max_tokens": _DRAFTED_TOKENS}
        if (given := FORMS.get(self.extra) or GUESSED.get(self.extra)) is not None:
            return {**SAMPLINGS[self.sampling], **given, "logprobs": 1}
        return {**SAMPLINGS[self.sampling], **EXTRAS[self.extra], "logprobs": 1, "ignore_eos": True}

    def __str__(self) -> str:
        mode = "streamed" if self.streamed else "whole"
        return "-".join((self.point, self.signal, mode, self.sampling, self.extra))


def nth_of(point: str) -> int:
    """Which time a process comes to `point` tells most."""
    return _NTH.get(point, 1)


def role_of(point: str) -> Role:
    return cast(Role, point.partition(".")[0])


def _all() -> list[Case]:
    cases = []
    for role, names in POINTS.items():
        for name, signal, streamed, sampling in product(names, SIGNALS, (True, False), SAMPLINGS):
            extra = tuple(EXTRAS)[len(cases) % len(EXTRAS)]
            cases.append(Case(role, f"{role}.{name}", signal, streamed, sampling, extra))
    return cases


CASES = _all()


def of_json() -> list[Case]:
    """Each point of the workers and each signal, under a grammar."""
    found = []
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        for name, signal, form in product(POINTS[role], SIGNALS, FORMS):
            streamed, sampling = len(found) % 3 != 0, tuple(SAMPLINGS)[len(found) // 2 % 2]
            found.append(Case(role, f"{role}.{name}", signal, streamed, sampling, form))
    return found


def of_guesses() -> list[Case]:
    """Each point of a decode worker and each signal, while it guesses."""
    points = product((*POINTS["decode"], _GUESSED), SIGNALS)
    return [
        Case("decode", f"decode.{name}", signal, number % 3 != 0, "greedy", "guesses")
        for number, (name, signal) in enumerate(points)
    ]


def of_drafts() -> list[Case]:
    """Each point of a decode worker and each signal, while a draft model proposes."""
    points = product((_GUESSED, *POINTS["decode"]), SIGNALS, DRAFTED, _DRAFTED_SAMPLINGS)
    return [
        Case("decode", f"decode.{name}", signal, number % 3 != 0, sampling, extra)
        for number, (name, signal, extra, sampling) in enumerate(points)
        if name == _GUESSED or extra == "drafts"
    ]


def of(*roles: Role, signal: Signal | None = None) -> list[Case]:
    """The cases that strike one of these roles."""
    return [case for case in CASES if case.role in roles and signal in (None, case.signal)]


def matrix(found: list[Case]) -> pytest.MarkDecorator:
    """Parametrise a test by cases; `make test` runs the representative ones only."""
    parameters = [
        pytest.param(case, id=str(case), marks=() if is_representative(case) else pytest.mark.faults) for case in found
    ]
    return pytest.mark.parametrize("case", parameters)


def is_representative(case: Case) -> bool:
    """Whether `make test` runs it: one case for each point, with signals and kinds of request in turn; under a grammar,
    those that are killed while they send and while they generate; with lookup the latter, and with a draft model the
    seeded one that is killed while it finds guesses right."""
    if case.extra in DRAFTED:
        kind = (case.signal, case.extra, case.point, case.sampling)
        return kind == ("kill", "drafts", f"decode.{_GUESSED}", "seeded")
    if case.extra in GUESSED:
        return case.signal == "kill" and case.point == "decode.step"
    if case.extra in FORMS:
        return case.signal == "kill" and case.extra == "json-n2" and case.point in ("prefill.sending", "decode.step")
    kinds = list(product(SIGNALS, (True, False), SAMPLINGS))
    place = POINTS[case.role].index(case.point.partition(".")[2])
    return (case.signal, case.streamed, case.sampling) == kinds[5 * place % len(kinds)]
