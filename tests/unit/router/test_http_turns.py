"""Turns, targets and deadlines through HTTP: who waits in the router, who goes first, and who is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.router_site import Site
from tests.support.scripted_worker import WAIT_S
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
FLOOD, CALM, EAGER = (f"sk-{name}-0123456789" for name in ("flood", "calm", "eager"))
FILE = f"""tenants:
  - {{name: flood, keys: [{FLOOD}]}}
  - {{name: calm, keys: [{CALM}], weight: 2, ttft_ms: 0.001}}
  - {{name: eager, keys: [{EAGER}], most_urgent_priority: -5}}
"""
#: Of each prefill worker so many wait there; there is one.
AT_WORKER = 2


@pytest.fixture
def site(make_site: MakeSite, tmp_path: Path) -> Site:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(FILE)
    return make_site({"http.api_keys_file": str(file)})


class Asker:
    """Asks in an order, each when the one before has come in."""

    def __init__(self, site: Site, pool: ThreadPoolExecutor) -> None:
        self._site, self._pool, self._num = site, pool, 0

    def ask(self, key: str, prompt: str, **body: Any) -> Future[httpx.Response]:
        self._num += 1
        future = self._pool.submit(post, self._site, key, prompt, **body)
        wait_until(
            lambda: num_waiting(self._site),
            f"{self._num} requests that wait",
            WAIT_S,
            wanted=lambda num: num >= self._num,
        )
        return future


def post(site: Site, key: str, prompt: str, **body: Any) -> httpx.Response:
    with site.http(headers={"Authorization": f"Bearer {key}"}) as client:
        return client.post("/v1/completions", json={"model": "toy", "prompt": prompt, "max_tokens": 1, **body})


def num_waiting(site: Site) -> float:
    return site.metrics(FLOOD)["tandem_router_waiting_requests"]


def started(site: Site, num: int) -> str:
    """The prompt of the `num`th request that came to prefill."""
    return bytes(site.prefill.wait_for("start", num).prompt_ids).decode()


def order_of(site: Site, asked: list[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """Prompts in the order in which prefill gets them, where each waits for the one before."""
    site.prefill.auto = False
    with ThreadPoolExecutor(len(asked)) as pool:
        asker = Asker(site, pool)
        answers = [asker.ask(key, prompt, **body) for key, prompt, body in asked]
        found = []
        for number in range(1, len(asked) + 1):
            start = site.prefill.wait_for("start", number)
            found.append(bytes(start.prompt_ids).decode())
            if number >= AT_WORKER:
                done = site.prefill.wait_for("start", number - AT_WORKER + 1)
                site.prefill.first_tokens(done)
        site.prefill.first_tokens(site.prefill.wait_for("start", len(asked)))
        assert [answer.result().status_code for answer in answers] == [200] * len(asked)
    return found


def test_what_a_worker_cannot_begin_yet_waits_in_the_router(site: Site) -> None:
    asked = [(FLOOD, letter, {}) for letter in "abcde"]
    site.prefill.auto = False
    with ThreadPoolExecutor(5) as pool:
        asker = Asker(site, pool)
        answers = [asker.ask(*each[:2]) for each in asked]
        assert site.prefill.count("start") == AT_WORKER
        assert site.decode.count("reserve") == AT_WORKER
        site.prefill.auto = True
        for number in (1, 2):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in answers] == [200] * 5
    assert [started(site, number) for number in range(1, 6)] == list("abcde")


@pytest.mark.long
def test_a_tenant_with_one_request_does_not_wait_for_the_flood_of_another(site: Site) -> None:
    asked = [(FLOOD, letter, {}) for letter in "abcdef"] + [(CALM, "X", {})]
    assert order_of(site, asked).index("X") <= AT_WORKER + 1


def test_who_may_goes_before_all_others(site: Site) -> None:
    asked = [(FLOOD, letter, {}) for letter in "abcd"] + [(EAGER, "X", {"priority": -5})]
    assert order_of(site, asked).index("X") == AT_WORKER


@pytest.mark.long
@pytest.mark.parametrize("field", ["user", "prompt_cache_key", "session_id"])
def test_the_session_that_has_got_least_goes_first(site: Site, field: str) -> None:
    long = {field: "greedy", "max_tokens": 100, "ignore_eos": True}
    site.prefill.script = site.decode.script = lambda prompt, choice, index: 97
    site.prefill.num_computed_tokens = 0  # so that its speed stays unknown, and no more than two wait there
    assert post(site, FLOOD, "x", **long).status_code == 200
    site.prefill.received.clear()
    asked = [(FLOOD, "a", {}), (FLOOD, "b", {}), (FLOOD, "c", {field: "greedy"}), (FLOOD, "d", {field: "modest"})]
    assert order_of(site, asked) == ["a", "b", "d", "c"]


def test_who_is_due_sooner_goes_first(site: Site) -> None:
    asked = [(FLOOD, "a", {}), (FLOOD, "b", {}), (FLOOD, "c", {}), (FLOOD, "d", {"slo": {"ttft_ms": 1}})]
    assert order_of(site, asked) == ["a", "b", "d", "c"]


@pytest.mark.long
def test_long_prompts_hold_back_no_short_ones(site: Site) -> None:
    """Two are at the worker and two wait in the router when short ones come, which go before all four there; of their
    tenant's turns every fourth would be the oldest's."""
    assert post(site, FLOOD, "warm", max_tokens=3).status_code == 200  # handed off: three tokens in 10 ms
    wait_until(lambda: site.metrics(FLOOD)["tandem_handoff_seconds_count"], "its speed", WAIT_S)
    site.prefill.auto = False
    with ThreadPoolExecutor(16) as pool:
        asker = Asker(site, pool)
        long = [asker.ask(FLOOD, letter * 240) for letter in "abcd"]
        assert [started(site, number)[0] for number in (2, 3)] == ["a", "b"]
        short = []
        for number, letter in enumerate("stuvwx", 4):
            short.append(pool.submit(post, site, FLOOD, letter))
            assert started(site, number) == letter
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        for number in range(2, 4):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        for number in range(10, 12):
            assert started(site, number)[0] in "cd"
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in (*short, *long)] == [200] * 10


@pytest.mark.long
def test_who_goes_away_while_it_waits_is_forgotten(site: Site) -> None:
    site.prefill.auto = False
    site.prefill.num_computed_tokens = 0  # so that its speed stays unknown, and no more than two wait there
    with ThreadPoolExecutor(4) as pool:
        asker = Asker(site, pool)
        answers = [asker.ask(FLOOD, letter) for letter in "ab"]
        for _ in range(AT_WORKER):
            with pytest.raises(httpx.ReadTimeout), site.http(headers={"Authorization": f"Bearer {FLOOD}"}) as client:
                client.post("/v1/completions", json={"model": "toy", "prompt": "gone"}, timeout=0.3)
        wait_until(lambda: num_waiting(site), "the two", WAIT_S, wanted=lambda num: num == 2)
        answers.append(asker.ask(FLOOD, "c"))
        site.prefill.auto = True
        for number in (1, 2):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert "gone" not in [started(site, number) for number in (1, 2, 3)]
    site.prefill.auto = False
    with ThreadPoolExecutor(2) as pool:  # and its turn takes nobody's place
        answers = [pool.submit(post, site, FLOOD, letter) for letter in "de"]
        assert {started(site, number) for number in (4, 5)} == {"d", "e"}
        for number in (4, 5):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in answers] == [200] * 2


@pytest.mark.long
def test_who_goes_away_before_a_worker_has_begun_leaves_its_place_to_the_next(site: Site) -> None:
    site.prefill.auto = site.decode.auto = False
    site.prefill.num_computed_tokens = 0
    for prompt in "ab":  # both are placed, granted nothing, and given up
        with pytest.raises(httpx.ReadTimeout), site.http(headers={"Authorization": f"Bearer {FLOOD}"}) as client:
            client.post("/v1/completions", json={"model": "toy", "prompt": prompt}, timeout=0.3)
    assert site.prefill.count("start") == AT_WORKER
    site.decode.auto = True
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, site, FLOOD, letter) for letter in "cd"]
        assert {started(site, number) for number in (3, 4)} == {"c", "d"}
        for number in (3, 4):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in answers] == [200] * 2


@pytest.mark.long
def test_its_time_out_ends_a_request_that_waits(site: Site) -> None:
    site.prefill.auto = False
    with ThreadPoolExecutor(4) as pool:
        asker = Asker(site, pool)
        answers = [asker.ask(FLOOD, letter) for letter in "ab"]
        late = post(site, FLOOD, "late", timeout=0.2)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
        for number in (1, 2):
            site.prefill.first_tokens(site.prefill.wait_for("start", number))
        assert [answer.result().status_code for answer in answers] == [200] * 2
    assert site.prefill.count("start") == 2


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimate(site: Site) -> None:
    site.prefill.num_computed_tokens = 10  # in a hundredth of a second
    prompt = 200 * "x"
    assert post(site, FLOOD, prompt, timeout=0.15).status_code in (200, 504), "nothing is known yet"
    for _ in range(3):
        assert post(site, FLOOD, "y", max_tokens=3).status_code == 200
    num_started = site.prefill.count("start")
    refused = post(site, FLOOD, 200 * "z", timeout=0.15)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_unmeetable")
    assert "of 0.15 s cannot be met: the first token is expected in 0.2 s" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-should-retry"] == "true"
    assert site.prefill.count("start") == num_started
    assert post(site, FLOOD, 200 * "z", timeout=10).status_code == 200


def test_what_kept_its_targets_is_counted_by_tenant(site: Site) -> None:
    assert post(site, FLOOD, "a", max_tokens=3).status_code == 200
    assert post(site, FLOOD, "b", max_tokens=3, slo={"tpot_ms": 1e-6}).status_code == 200
    assert post(site, CALM, "c", max_tokens=3).status_code == 200, "its own target is a microsecond"
    assert post(site, CALM, "d", max_tokens=3, slo={"ttft_ms": 60_000}).status_code == 200
    found = site.metrics(FLOOD)
    name = 'tandem_slo_requests_total{{tenant="{}",tpot="{}",ttft="{}"}}'
    assert found[name.format("flood", "kept", "kept")] == 1
    assert found[name.format("flood", "missed", "kept")] == 1
    assert found[name.format("calm", "kept", "missed")] == 1
    assert found[name.format("calm", "kept", "kept")] == 1
    assert found['tandem_slo_target_seconds{target="ttft"}'] == 5.0
    assert found['tandem_slo_target_seconds{target="tpot"}'] == 0.2


@pytest.mark.parametrize("slo", [{"ttft_ms": 0}, {"tpot_ms": -1}, {"ttft_ms": "1"}, 5])
def test_targets_that_cannot_be_are_refused_by_name(site: Site, slo: Any) -> None:
    refused = post(site, FLOOD, "a", slo=slo)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("slo")
