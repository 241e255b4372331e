"""Forms of output over HTTP: what travels to the workers, what is refused and with which words, what is remembered."""

from __future__ import annotations

import string
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http import grammars
from router.http.exchange import Exchange
from router.http.grammar_trials import GrammarTrials, TrialEnd, Verdict
from router.openai.grammar import AskedGrammar
from tandem.core.errors import InvalidRequestError
from tests.support.router_site import Site, opened_site, write_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def site(checkpoint: Path) -> Iterator[Site]:
    with opened_site(checkpoint) as site:
        yield site


def by_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def post(site: Site, chat: bool = False, **fields: Any) -> httpx.Response:
    if chat:
        return site.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=3, **fields)
    return site.post(prompt="x", max_tokens=3, **fields)


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    by_schema({"type": "object"}),
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"json": '{"type": "object"}'}},
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"structured_outputs": {"grammar": 'root ::= "a"'}},
]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_grammar_travels_to_both_workers(site: Site, form: dict[str, Any], chat: bool) -> None:
    before = site.prefill.count("start")
    assert post(site, chat, **form).status_code == 200
    start, reserve = (w.wait_for(kind, before + 1) for w, kind in ((site.prefill, "start"), (site.decode, "reserve")))
    assert start.sampling.grammar == reserve.sampling.grammar
    assert start.sampling.grammar != ""
    assert "::=" not in start.sampling.grammar


def test_without_a_form_nothing_travels(site: Site) -> None:
    before = site.prefill.count("start")
    assert post(site, response_format={"type": "text"}).status_code == 200
    assert site.prefill.wait_for("start", before + 1).sampling.grammar == ""


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"not": {"type": "string"}}}}
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {"list": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}}},
    "$defs": {"x": {"type": "object", "properties": {"when": {"type": "string", "format": "moon phase"}}}},
}
_SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (by_schema(PERSON), f"{_SCHEMA}.properties.age: ", "not"),
    (by_schema(DEEP), f"{_SCHEMA}.$defs.x.properties.when: ", "moon phase"),
    (by_schema({"type": "array", "prefixItems": [{}, {"uniqueItems": True}]}), f"{_SCHEMA}.prefixItems[1]: ", "unique"),
    (by_schema({"type": "heap"}), f"{_SCHEMA}: ", "heap"),
    (by_schema({"$ref": "https://example.com"}), f"{_SCHEMA}: ", ""),
    (by_schema(False), f"{_SCHEMA}: ", ""),
    ({"structured_outputs": {"json": PERSON}}, "structured_outputs.json.properties.age: ", "not"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex: ", "regex"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar: ", "missing"),
    ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar", "looks like GBNF"),
]


@pytest.mark.parametrize(("form", "beginning", "word"), REFUSED)
def test_what_cannot_be_followed_is_refused_with_the_part_that_is_meant(
    site: Site, form: dict[str, Any], beginning: str, word: str
) -> None:
    for _ in range(2):  # the second one is remembered
        answer = post(site, **form)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(beginning)
        assert word in error["message"]
        assert beginning.startswith(error["param"])


def test_refusals_are_counted_those_that_are_remembered_too(site: Site) -> None:
    before = site.metrics()["tandem_grammars_refused_total"]
    for _ in range(2):
        assert post(site, structured_outputs={"regex": "(of this test"}).status_code == 400
    assert site.metrics()["tandem_grammars_refused_total"] == before + 2


def test_a_grammar_is_compiled_once(site: Site) -> None:
    name = "tandem_grammar_compile_seconds_count"
    before = site.metrics()[name]
    form = by_schema({"type": "object", "properties": {"of this test alone": {"type": "null"}}})
    for chat in (False, True, False):
        assert post(site, chat, **form).status_code == 200
    assert site.metrics()[name] == before + 1


def test_who_asks_for_what_is_remembered_waits_for_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wait = list[str](), Exchange._while_wanted

    async def while_wanted(self: Exchange, check: Any, receive: Any, request: Any) -> str:
        waited.append(request.request_id)
        return await wait(self, check, receive, request)

    monkeypatch.setattr(Exchange, "_while_wanted", while_wanted)
    for form, status in (({"regex": "of this test alo+ne"}, 200), ({"regex": "(of this test alone"}, 400)):
        waited.clear()
        assert [post(site, structured_outputs=form).status_code for _ in range(3)] == [status] * 3
        assert len(waited) == 1, "the first one"


class Held:
    """Trials that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go, self.begun = threading.Event(), list[str]()
        try_out = GrammarTrials.try_out

        def held(trials: GrammarTrials, text: str, end: TrialEnd) -> Verdict:
            self.begun.append(text)
            while not self.may_go.wait(0.01):
                end.check()
            return try_out(trials, text, end)

        monkeypatch.setattr(GrammarTrials, "try_out", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.may_go.set()


def test_who_asks_for_too_many_new_grammars_is_told_to_wait_and_others_are_served(site: Site, held: Held) -> None:
    """A trial holds neither the loop nor other requests, and a client's trials not those of another."""
    most = grammars._MAX_OF_ONE
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with ThreadPoolExecutor(most + 2) as pool, httpx.Client(transport=transport) as other:
        asked = [pool.submit(post, site, structured_outputs={"regex": f"a{{{n}}}"}) for n in range(most + 1)]
        wait_until(lambda: any(one.done() for one in asked), "one too many", 10)
        assert post(site).status_code == 200, "who asks for none is served meanwhile"
        assert len(held.begun) == 1, "one of a client at a time"
        body = {"model": "toy", "prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "of another client"}}
        asked.append(pool.submit(other.post, f"{site.url}/v1/completions", json=body, timeout=30))
        wait_until(lambda: len(held.begun) == 2, "another client's turn", 10)
        assert "of another client" in held.begun[1]
        held.may_go.set()
        statuses = sorted(one.result().status_code for one in asked)
    assert statuses == [200] * (most + 1) + [429]


def test_a_time_out_ends_the_wait_for_a_grammar_as_any_other(site: Site, held: Held) -> None:
    answer = post(site, structured_outputs={"regex": "of a time-out"}, timeout=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    assert answer.json()["error"]["message"] == "the deadline of 0.05 s passed"


def test_clients_that_go_away_give_up_their_places_and_what_is_tried_for_them(site: Site, held: Held) -> None:
    most = grammars._MAX_OF_ONE
    body = {"model": "toy", "prompt": "x", "max_tokens": 3}

    def ask_and_go(number: int) -> None:
        form = {"structured_outputs": {"regex": f"gone{number}"}}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{site.url}/v1/completions", json=body | form, timeout=0.5)

    with ThreadPoolExecutor(most) as pool:
        list(pool.map(ask_and_go, range(most)))
    wait_until(lambda: site.metrics()['tandem_requests_total{outcome="cancelled"}'] >= most, "their ends", 10)
    with ThreadPoolExecutor(most) as pool:
        asked = [pool.submit(post, site, structured_outputs={"regex": f"c{{{n}}}"}) for n in range(1, most + 1)]
        wait_until(lambda: any("c{" in text for text in held.begun), "a turn", 10)
        held.may_go.set()
        assert [one.result().status_code for one in asked] == [200] * most


def test_many_requests_at_once_with_the_same_new_grammar_wait_for_one_trial(
    site: Site, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    come, check = list[AskedGrammar](), grammars.GrammarCheck.check

    async def counted(self: grammars.GrammarCheck, asked: AskedGrammar, client: str) -> str:
        come.append(asked)
        return await check(self, asked, client)

    number = grammars._MAX_OF_ONE + 1
    monkeypatch.setattr(grammars.GrammarCheck, "check", counted)
    with ThreadPoolExecutor(number) as pool:
        asked = [pool.submit(post, site, structured_outputs={"regex": "of one burst"}) for _ in range(number)]
        wait_until(lambda: len(come) == number, "all of them", 10)
        held.may_go.set()
        assert [one.result().status_code for one in asked] == [200] * number
    assert len(held.begun) == 1


def test_a_grammar_that_takes_too_long_is_refused_with_the_part_that_is_meant(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hundred patterns of names, which exclude each other: seconds of a processor, which no count bounds."""
    names = [a + b for a in string.ascii_lowercase[:12] for b in string.ascii_lowercase]
    code = {"type": "object", "patternProperties": {f"^{name}": {"type": "string"} for name in names}}
    slow = {"type": "object", "properties": {"name": {"type": "string"}, "code": code}}
    with opened_site(checkpoint, {"limits.max_grammar_compile_s": 0.1}) as site:
        monkeypatch.delattr(grammars, "description")  # what holds up all threads was done before the router serves
        answer = post(site, **by_schema(slow))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        f"{_SCHEMA}.properties.code: takes more than 0.1 s of computation (limits.max_grammar_compile_s)"
    )


def test_what_a_worker_finds_too_complex_is_the_requests_error(site: Site) -> None:
    """In mid-stream it is the last frame."""
    error = InvalidRequestError("the grammar has become too complex")
    site.prefill.auto = False
    try:
        with ThreadPoolExecutor(1) as pool:
            before = site.prefill.count("start")
            asked = pool.submit(post, site, structured_outputs={"regex": "b+"})
            start = site.prefill.wait_for("start", before + 1)
            site.prefill.fail(start.request_id, start.attempt, error.code, retryable=False)
            answer = asked.result()
    finally:
        site.prefill.auto = True
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert site.prefill.count("start") == before + 1, "it is not tried again"


def test_a_model_without_an_end_of_text_follows_no_grammar(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "toy")
    (checkpoint / "tokenizer_config.json").write_text("{}")
    with opened_site(checkpoint) as site:
        answer = post(site, response_format={"type": "json_object"})
        assert answer.status_code == 400
        assert "names no token that ends a text" in answer.json()["error"]["message"]
        assert post(site).status_code == 200
