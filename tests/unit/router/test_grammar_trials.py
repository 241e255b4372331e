"""Grammars tried in a process that the kernel bounds."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from router.http import grammar_trials
from router.http.grammar_trials import GrammarTrials, TrialEnd
from router.openai.grammar import of_choices, of_grammar, of_lark, of_regex, of_schema
from tandem.core.config import LimitsConfig
from tandem.core.errors import CancelledError, InternalError, InvalidRequestError
from tandem.core.model_path import resolve_model
from tandem.core.slices import take_short_slices
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import description
from tests.support.slices import in_a_thread, needs_slices, slice_ns
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.processes
LIMITS = LimitsConfig()
PAIRS = [a + b for a in string.ascii_lowercase[:12] for b in string.ascii_lowercase]


def opened() -> contextlib.closing[GrammarTrials]:
    tokenizer = Tokenizer.from_dir(resolve_model("embedded"))
    return contextlib.closing(GrammarTrials(description(tokenizer, (2,), tokenizer.vocab_size), max_s=0.1))


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    with opened() as found:
        yield found


def test_what_can_be_followed_and_what_cannot_is_told(trials: GrammarTrials) -> None:
    assert trials.try_out(of_regex("a+", "f", LIMITS).text).refusal == ""
    assert "not" in trials.try_out(of_schema({"not": {}}, "f", LIMITS).text).refusal


#: Each takes seconds, some a quarter of a minute; none of llguidance's own bounds ends it.
ENDLESS = {
    "classes": of_regex(r"\w?" * 4000, "f", LIMITS),
    "patterns": of_schema({"patternProperties": {f"^{pair}": {"type": "string"} for pair in PAIRS}}, "f", LIMITS),
    "intersection": of_grammar("start: T\nT: " + " & ".join(f"/(?s:.*){pair}(?s:.*)/" for pair in PAIRS), "f", LIMITS),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_takes_too_long_is_ended_and_told_so(trials: GrammarTrials, name: str) -> None:
    verdict = trials.try_out(ENDLESS[name].text)
    assert verdict.refusal.startswith("takes more than 0.1 s of computation (limits.max_grammar_compile_s)")
    assert verdict.cpu_s == 0.1
    assert trials.try_out(of_regex("b+", "f", LIMITS).text).refusal == "", "others are tried on"


def test_a_trial_may_take_long_where_the_configuration_says_so(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.try_out(of_regex("e", "f", LIMITS).text)
    monkeypatch.setattr(grammar_trials, "_MAX_WAIT_S", 0.01)
    assert trials.try_out(ENDLESS["classes"].text).refusal.startswith("takes more than 0.1 s")


def test_an_expression_that_makes_each_mask_slow_is_refused() -> None:
    tokenizer = Tokenizer.from_dir(resolve_model("embedded"))
    trials = GrammarTrials(description(tokenizer, (2,), tokenizer.vocab_size), max_s=30)
    with contextlib.closing(trials):
        verdict = trials.try_out(of_regex("x" * 60_000, "f", LIMITS).text)
    assert "ms to choose, and may take 10: it has" in verdict.refusal


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("is_begun", [True, False], ids=["under way", "before it begins"])
def test_a_trial_that_nobody_waits_for_is_ended(is_begun: bool) -> None:
    tokenizer = Tokenizer.from_dir(resolve_model("embedded"))
    trials = GrammarTrials(description(tokenizer, (2,), tokenizer.vocab_size), max_s=60)
    with contextlib.closing(trials), ThreadPoolExecutor(1) as pool:
        trials.try_out(of_regex("f", "f", LIMITS).text)
        process, end = trials._process, TrialEnd()
        assert process is not None
        if not is_begun:
            end.end()
        trial = pool.submit(trials.try_out, ENDLESS["classes"].text, end)
        if is_begun:
            wait_until(lambda: children(process.pid) != [], "its fork", LONG_S)
            end.end()
        with pytest.raises(CancelledError, match="nobody waits"):
            trial.result(LONG_S)
        wait_until(lambda: children(process.pid) == [], "its end", LONG_S)
        assert trials.try_out(of_regex("g", "f", LIMITS).text).refusal == "", "others are tried on"


def test_a_process_that_ends_is_started_again(trials: GrammarTrials) -> None:
    assert trials.try_out(of_regex("c", "f", LIMITS).text).refusal == ""
    process = trials._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert trials.try_out(of_regex("c", "f", LIMITS).text).refusal == ""


def test_closing_ends_the_process_for_good() -> None:
    with opened() as trials:
        trials.try_out(of_regex("c", "f", LIMITS).text)
        process = trials._process
        assert process is not None
        trials.close()
        assert process.returncode is not None
        with pytest.raises(InternalError, match="the router ends"):
            trials.try_out(of_regex("c", "f", LIMITS).text)
        assert trials._process is None


def test_what_fails_in_a_trial_is_no_refusal(trials: GrammarTrials) -> None:
    with pytest.raises(InternalError, match="could not be checked: AttributeError"):
        trials.try_out(cast(str, 7))


def test_a_limit_that_the_router_was_started_under_holds_for_trials_too() -> None:
    with opened() as trials:
        assert trials.try_out(of_regex("d", "f", LIMITS).text).refusal == ""
        process = trials._process
        assert process is not None
        num_pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
        most = num_pages * resource.getpagesize() + (512 << 20)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
        assert trials.try_out(of_regex("d+", "f", LIMITS).text).refusal == ""


def test_where_a_host_has_no_memory_left_the_kernel_ends_the_trial_and_not_a_worker() -> None:
    bound = "from router.http.grammar_trial_process import _bound; _bound(9, 9)"
    tell = "print(open('/proc/self/oom_score_adj').read())"
    assert subprocess.check_output([sys.executable, "-c", f"{bound}; {tell}"]).split() == [b"1000"]


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        (lambda text: of_choices(["a", text], "f", LIMITS), r"f\[1\] has a text of 9000 bytes"),
        (lambda text: of_lark(f'start: "{text}"', "f", LIMITS), "f has a text or expression of 9000 bytes"),
        (lambda text: of_lark(f"start: /{text}/", "f", LIMITS), "f has a text or expression of 9000 bytes"),
        (lambda text: of_lark(f"start: /{text[:2000]}\n{text[2001:]}/", "f", LIMITS), "f has a text or expr"),
        (lambda text: of_schema({"items": {"enum": [text]}}, "f", LIMITS), r"f.items.enum\[0\] has a text of 9000"),
        (lambda text: of_schema({"properties": {text: {}}}, "f", LIMITS), "f.properties has a text of 9000 bytes"),
        (lambda text: of_schema({"properties": {"title": {"const": text}}}, "f", LIMITS), "f.properties.title.const"),
        (lambda text: of_schema({"const": {"title": text}}, "f", LIMITS), "f.const.title has a text of 9000 bytes"),
        (lambda text: of_schema({"default": {"const": text}, "$ref": "#/default"}, "f", LIMITS), "f.default.const has"),
        (lambda text: of_schema({"items": {"default": text, "const": text}}, "f", LIMITS), "f.items.const has a text"),
    ],
)
def test_a_long_text_is_refused_and_named(made_of: Callable[[str], object], said: str) -> None:
    """A mask takes a time that grows with it, and nobody can write it to its end."""
    with pytest.raises(InvalidRequestError, match=said):
        made_of("x" * 9000)
    made_of("x" * 8000)


def test_what_is_quoted_in_a_comment_is_no_text_of_a_grammar() -> None:
    rules = "\n".join(f'r{number}: "a"  # of 3/4 "' for number in range(500))
    assert len(rules) > 9000
    of_lark(f'// a/b "\n{rules}\nstart: "a"', "f", LIMITS)


def test_a_long_description_is_no_text_of_a_grammar() -> None:
    text = "x" * 9000
    of_schema({"type": "object", "description": text}, "f", LIMITS)
    of_schema({"properties": {"title": {"title": text, "examples": [{"title": text}]}}}, "f", LIMITS)
    of_schema({"$defs": {"a": {"description": text}}, "anyOf": [{"$ref": "#/$defs/a"}]}, "f", LIMITS)


@needs_slices
def test_what_is_tried_takes_the_usual_slices_where_a_loop_with_short_ones_asks(trials: GrammarTrials) -> None:
    def told() -> int:
        take_short_slices()
        trials.try_out(of_regex("a+", "f", LIMITS).text)
        assert trials._process is not None
        return slice_ns(trials._process.pid)

    assert in_a_thread(told) == in_a_thread(slice_ns)
