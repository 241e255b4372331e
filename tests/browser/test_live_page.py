"""The live page in Debian's Chromium: a real router, scripted workers. `SCREENSHOTS=DIR` keeps what it looked like."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.router_site import Site, in_background, opened_site, write_checkpoint
from tests.support.scripted_worker import ScriptedDecode

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 60.0
KEY = "a key of this test"
HOSTILE = "<img/src=x/onerror=document.title='broken'>"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no browser: apt-get install chromium chromium-driver"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    checkpoint = write_checkpoint(tmp_path / "toy")
    made = []

    def make(**options: Any) -> Site:
        made.append(opened_site(checkpoint, **options))
        return made[-1].__enter__()

    yield make
    for site in made:
        site.__exit__(None, None, None)


def texts(browser: Chrome, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def until(browser: Chrome, seen: Callable[[], object]) -> None:
    WebDriverWait(browser, WAIT_S, ignored_exceptions=[Exception]).until(lambda _: seen())


def look(browser: Chrome, name: str) -> None:
    if directory := os.environ.get("SCREENSHOTS"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(directory) / f"{name}.png"))


def complaints(browser: Chrome) -> list[str]:
    return [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]


def test_workers_requests_and_the_way_of_one_are_seen_as_they_happen(
    browser: Chrome, make_site: Callable[..., Site]
) -> None:
    site = make_site()
    browser.get(site.url)
    until(browser, lambda: "prefill-0" in browser.find_element(By.ID, "prefill").text)
    assert "decode-0" in browser.find_element(By.ID, "decode").text

    site.decode.held_back.clear()
    under_way = in_background(site, stream=True)
    until(browser, lambda: any("prefill-0 → decode-0" in row for row in texts(browser, "#requests tr")))
    site.add(ScriptedDecode("decode-1"))
    until(browser, lambda: "decode-1" in browser.find_element(By.ID, "decode").text)
    site.decode.kill()
    assert under_way.result().status_code == 200
    until(browser, lambda: any("finished" in row for row in texts(browser, "#requests tr")))

    browser.find_element(By.CSS_SELECTOR, "#requests tr").click()
    until(browser, lambda: len(texts(browser, "#waterfall rect")) > 8)
    named = texts(browser, "#waterfall text")
    parts = {"waits for router", "read", "tokenise", "queue", "waits for prefill"}
    parts |= {"prefill", "handoff", "decode", "send"}
    # The second attempt is answered at once: of its states that are reached together only the last one lasts.
    assert {*parts, "waits for prefill (attempt 2)"} <= set(named), " ".join(named)
    facts = browser.find_element(By.ID, "one-facts").text
    assert "attempt 1: prefill-0 → decode-0" in facts
    assert "ended as died" in facts
    look(browser, "wide")
    browser.set_window_size(420, 900)
    look(browser, "phone")
    overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, "nothing is wider than a phone"
    browser.set_window_size(1280, 1000)
    assert complaints(browser) == []


def test_what_a_client_wrote_is_shown_as_text(browser: Chrome, make_site: Callable[..., Site]) -> None:
    """The id is the client's word: letters, digits and a few signs, which are enough for a tag without the check."""
    site = make_site()
    with site.http() as client:
        body = {"model": "toy", "prompt": "x", "max_tokens": 2}
        assert client.post("/v1/completions", json=body, headers={"x-request-id": "a/b=c:d@e"}).status_code == 200
        refused = client.get(f"/v1/requests/{HOSTILE}").json()["error"]["message"]
    assert HOSTILE in refused
    browser.get(site.url)
    until(browser, lambda: any("a/b=c:d@e" in row for row in texts(browser, "#requests tr")))
    browser.execute_script("chosen = arguments[0]; drawOne();", HOSTILE)
    until(browser, lambda: HOSTILE in browser.find_element(By.ID, "one-title").text)
    assert browser.title == "Tandem"


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Chrome, make_site: Callable[..., Site]) -> None:
    site = make_site(key_digests=frozenset({hashlib.sha256(KEY.encode()).digest()}), with_workers=False)
    browser.get(site.url)
    until(browser, lambda: browser.find_element(By.ID, "key").is_displayed())
    for typed, said in (("wrong", "this key does not hold"), (KEY, "live")):
        field = browser.find_element(By.ID, "key")
        field.clear()
        field.send_keys(typed)
        browser.find_element(By.CSS_SELECTOR, "#keys button").click()
        until(browser, lambda said=said: said in browser.find_element(By.ID, "said").text)  # type: ignore[misc]
    assert "no worker" in browser.find_element(By.ID, "prefill").text
    browser.refresh()
    until(browser, lambda: "live" in browser.find_element(By.ID, "said").text)


def test_a_router_that_comes_back_is_found_again(browser: Chrome, make_site: Callable[..., Site]) -> None:
    site = make_site()
    browser.get(site.url)
    until(browser, lambda: "live" in browser.find_element(By.ID, "said").text)
    site.server.stop(drain_s=0.2)
    until(browser, lambda: "again" in browser.find_element(By.ID, "said").text)
    look(browser, "gone")
