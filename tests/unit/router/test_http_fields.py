"""Fields that change what is generated or shown, from the body to the workers and back; against scripted workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.router_site import BOS, EOS, Site, frames

MESSAGES = [{"role": "user", "content": "x"}]


def text_of(site: Site, **body: Any) -> str:
    response = site.post(prompt="x", **body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def script(site: Site, *tokens: int) -> None:
    site.prefill.script = site.decode.script = lambda prompt, choice, index: tokens[index]


def test_bounds_on_what_is_chosen_reach_both_workers(site: Site) -> None:
    site.post(prompt="x", max_tokens=2, allowed_token_ids=[97, 98], bad_words=["ab", "c"])
    for command in (site.prefill.wait_for("start"), site.decode.wait_for("reserve")):
        assert list(command.sampling.allowed_token_ids) == [97, 98]
        words = [list(word.token_ids) for word in command.sampling.bad_words]
        assert words == [[*b"ab"], [*b"c"]], "after a space a word is a token longer here, and is masked as it is"


def test_a_salt_reaches_both_workers(site: Site) -> None:
    site.post(prompt="x", max_tokens=2, cache_salt="pepper")
    assert site.prefill.wait_for("start").cache_salt == site.decode.wait_for("reserve").cache_salt == "pepper"


def test_special_tokens_are_shown_on_demand(site: Site) -> None:
    script(site, 104, BOS, 105)
    assert text_of(site, max_tokens=3) == "hi"
    assert text_of(site, max_tokens=3, skip_special_tokens=False) == "h<s>i"
    assert text_of(site, max_tokens=3, skip_special_tokens=False, spaces_between_special_tokens=False) == "h<s>i"


def test_what_stopped_a_choice_is_shown_on_demand(site: Site) -> None:
    assert text_of(site, max_tokens=9, stop=["cd"]) == "ab"
    assert text_of(site, max_tokens=9, stop=["cd"], include_stop_str_in_output=True) == "abcd"
    script(site, 104, 105, EOS)
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert text_of(site, max_tokens=9, include_stop_str_in_output=True) == "hi"
    assert text_of(site, max_tokens=9, **shown) == "hi</s>"
    assert text_of(site, max_tokens=9, skip_special_tokens=False) == "hi"


def test_the_best_of_several_are_those_with_the_highest_log_probability_per_token(site: Site) -> None:
    """Choice 2 is the best, then choice 0; choice 1 has one token, with a sum above both."""
    of_choice = {0: -2.0, 1: -3.0, 2: -1.0}
    for worker in (site.prefill, site.decode):
        plain = worker.token
        worker.script = lambda prompt, choice, index: EOS if (choice, index) == (1, 0) else 97 + choice + index

        def token(start: Any, choice: int, index: int, token_id: int | None = None, plain: Any = plain) -> Any:
            given = plain(start, choice, index, token_id)
            given.logprob = of_choice[choice]
            return given

        worker.token = token  # type: ignore[method-assign]
    response = site.post(prompt="x", max_tokens=4, n=2, best_of=3).json()
    shown = [(c["index"], c["text"], c["logprobs"]) for c in response["choices"]]
    assert shown == [(0, "cdef", None), (1, "abcd", None)]
    assert response["usage"]["completion_tokens"] == 9, "all that was generated"
    start = site.prefill.wait_for("start")
    assert (start.num_choices, start.sampling.num_logprobs) == (3, 0)


def test_the_best_of_several_are_chosen_at_their_end_and_of_enough(site: Site) -> None:
    for body in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        response = site.post(prompt="x", **body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "best_of"
    assert site.post(prompt="x", max_tokens=1, n=2, best_of=2, stream=True).status_code == 200


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_event_says_what_its_choice_has_used(site: Site, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    body = {"prompt": "xyz", "n": 2, "max_tokens": 3, "stream": True, "stream_options": options}
    events = frames(site.post(**body))
    for index in (0, 1):
        used = [f["usage"] for f in events if f["choices"] and f["choices"][0]["index"] == index]
        assert [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in used] == [
            (3, 1, 4), (3, 2, 5), (3, 3, 6)
        ]  # fmt: skip
    last = [f for f in events if not f["choices"]]
    assert [f["usage"]["completion_tokens"] for f in last] == ([6] if include_usage else [])


def test_suffixes_are_refused_by_name(site: Site) -> None:
    error = site.post(prompt="x", suffix="y").json()["error"]
    assert (error["param"], "suffix" in error["message"]) == ("suffix", True)
