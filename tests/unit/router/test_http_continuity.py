"""What a client reads is one text, wherever its request moved in the middle of it. Scripted workers, real HTTP.

Each text is that of an undisturbed run: the same request is sent to workers that live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.router_site import Site, frames, in_background
from tests.support.scripted_worker import ScriptedDecode

TEXT = "naïve ☃ 𝄞 END of it"
IDS = list(TEXT.encode())


def script(_: list[int], choice: int, index: int) -> int:
    """The text's bytes, one a token; other choices begin further on in it."""
    return IDS[(index + 2 * choice) % len(IDS)]


def cut_after(text: str) -> int:
    """How many tokens a client has when it has all of `text` but the last byte."""
    return TEXT.encode().index(text.encode()) + len(text.encode()) - 1


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "in a character of two bytes": (cut_after("ï"), {}),
    "in a character of three bytes": (cut_after("☃"), {}),
    "in a character of four bytes": (cut_after("𝄞") - 1, {}),
    "in a stop string": (cut_after("EN"), {"stop": ["END"]}),
    "in a stop string that begins with a split character": (cut_after("☃") - 1, {"stop": ["☃ 𝄞"]}),
    "in what looked like a stop string": (cut_after("END"), {"stop": ["END."]}),
    "in two choices": (cut_after("☃"), {"n": 2}),
    "in two choices with a stop string": (cut_after("E"), {"n": 2, "stop": ["END"]}),
}


def outcome(answer: Any, num_choices: int) -> list[tuple[str, list[int], str | None]]:
    """Text, token ids and reason for the end of each choice of a stream."""
    assert answer.text.endswith("data: [DONE]\n\n")
    choices = [frame["choices"][0] for frame in frames(answer)]
    return [
        (
            "".join(c["text"] for c in choices if c["index"] == n),
            [i for c in choices if c["index"] == n for i in c["token_ids"]],
            next(c["finish_reason"] for c in choices if c["index"] == n and c["finish_reason"]),
        )
        for n in range(num_choices)
    ]


FAULTS = ("decode dies", "decode drains", "prefill dies on the way")
#: `make test` has each place with one of the faults, in turn, and `make test-faults` all.
CASES_AND_FAULTS = [
    pytest.param(case, fault, marks=[] if number % len(FAULTS) == place % len(FAULTS) else pytest.mark.faults)
    for number, case in enumerate(CASES)
    for place, fault in enumerate(FAULTS)
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "fault"), CASES_AND_FAULTS)
def test_the_text_goes_on_where_it_was(make_site: Callable[..., Site], case: str, fault: str) -> None:
    site = make_site({"transport.lease_s": 10.0})
    num_given, options = CASES[case]
    site.prefill.script = site.decode.script = script
    body = {"stream": True, "max_tokens": len(IDS), "return_token_ids": True, "seed": 7, **options}
    num_choices = options.get("n", 1)
    undisturbed = outcome(site.post(prompt="x", **body), num_choices)
    site.decode.auto = False
    under_way = in_background(site, **body)
    give(site, num_given, num_choices)
    other = ScriptedDecode("decode-1")
    other.script, other.auto, other.num_missing_tokens = script, fault != "prefill dies on the way", 1
    site.add(other)
    if fault == "decode dies":
        site.decode.kill()
    else:
        site.drain(site.decode)
    again = other.wait_for("reserve")
    if fault == "prefill dies on the way":
        site.prefill.kill()
        again = other.wait_for("reserve", 2)
        other.compute_locally(again)
    assert outcome(under_way.result(), num_choices) == undisturbed
    metrics = site.metrics()
    assert metrics["tandem_journal_disagreements_total"] == 0
    assert [list(entry.token_ids) for entry in again.journal if not entry.finished] == [
        [script([], choice, index) for index in range(num_given)] for choice in range(num_choices)
    ]


def give(site: Site, num_tokens: int, num_choices: int) -> None:
    """The client is given the first tokens of each choice."""
    reserve = site.decode.wait_for("reserve", 2)
    site.decode.grant(reserve)
    site.decode.wait_for("attach", 2)
    site.decode.admit(reserve)
    before = site.metrics()["tandem_itl_seconds_count"]
    for index in range(1, num_tokens):
        tokens = [site.decode.token(reserve, choice, index) for choice in range(num_choices)]
        site.decode.emit_all([site.decode._event(token=token) for token in tokens])
    expected = before + (num_tokens - 1) * num_choices
    site.until_metric("tandem_itl_seconds_count", expected)


def test_all_that_shapes_the_tokens_goes_with_the_request(site: Site) -> None:
    site.decode.held_back.clear()
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"97": 3},
        "min_tokens": 2,
        "stop_token_ids": [5],
    }
    under_way = in_background(site, **sampling)
    first = site.decode.wait_for("reserve")
    site.decode.wait_for("attach")
    site.add(other := ScriptedDecode("decode-1"))
    site.decode.kill()
    under_way.result()
    again = other.wait_for("reserve")
    assert again.sampling == first.sampling == site.prefill.wait_for("start", 2).sampling
    assert again.sampling.seed, "one was drawn where the client gave none"
