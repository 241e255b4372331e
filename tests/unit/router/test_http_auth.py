"""API keys: who gets in, what a refusal says, and where a key never shows."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from router.http.auth import KEYS_VARIABLE, ApiKeys, check_exposure, check_not_lost, digests_of_variable
from router.server import RouterServer
from tandem.cluster.checks.host import Host
from tandem.cluster.checks.preflight import Finding, Preflight
from tandem.core import config as configuration
from tandem.core.clock import VirtualClock
from tandem.core.config import HttpConfig
from tandem.core.errors import AuthenticationError, ConfigError
from tests.support.router_site import Site
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]
FIRST, SECOND, THIRD = "sk-first-0123456789", "sk-second-0123456789", "sk-third-0123456789"


def key_file(tmp_path: Path, *lines: str, mode: int = 0o600) -> Path:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    file.chmod(mode)
    return file


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"{scheme} {key}".encode())]


def keys_of(file: Path, environment: str = "", clock: VirtualClock | None = None) -> ApiKeys:
    digests = digests_of_variable({KEYS_VARIABLE: environment})
    return ApiKeys(HttpConfig(api_keys_file=str(file)), digests, clock or VirtualClock())


# -- the keys


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    file = key_file(tmp_path, "# staff", FIRST, "", f"  {SECOND}  # of a colleague")
    keys = keys_of(file, f" {THIRD} ,")
    for key in (FIRST, SECOND, THIRD):
        keys.check(bearer(key))
        keys.check(bearer(key, "bearer"))
    for headers in (
        [],
        bearer("sk-unknown-0123456789"),
        bearer(FIRST[:-1]),
        bearer(FIRST + "x"),
        bearer(FIRST, "Basic"),
        bearer(""),
        bearer(FIRST) + bearer(FIRST),
        [(b"authorization", FIRST.encode())],
    ):
        with pytest.raises(AuthenticationError):
            keys.check(headers)


def test_a_number_sign_within_a_key_is_part_of_it(tmp_path: Path) -> None:
    keys_of(key_file(tmp_path, "sk-with#sign-0123456789")).check(bearer("sk-with#sign-0123456789"))


def test_without_keys_nobody_is_asked() -> None:
    keys = ApiKeys(HttpConfig(), frozenset(), VirtualClock())
    assert not keys.are_required
    keys.check([])


@pytest.mark.parametrize(
    ("lines", "mode", "why"),
    [
        ([], 0o600, "holds no key"),
        (["# only a comment"], 0o600, "holds no key"),
        ([FIRST], 0o604, "chmod 600"),
        ([FIRST], 0o602, "chmod 600"),
        (["short"], 0o600, "at least 16"),
        (["sk with spaces 0123456789"], 0o600, "without spaces"),
        (["sk-ümlaut-0123456789"], 0o600, "printable ASCII"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, lines: list[str], mode: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        keys_of(key_file(tmp_path, *lines, mode=mode))
    assert caught.value.key == "http.api_keys_file"
    assert not any(line in caught.value.message for line in lines), "the message shows a key"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        keys_of(tmp_path / "none")


def test_a_file_open_to_its_group_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = key_file(tmp_path, FIRST, mode=0o640)
    keys_of(file)
    assert f"the file of API keys {file} is open to its group (mode 640)" in caplog.text


def test_keys_are_exchanged_while_it_runs(tmp_path: Path) -> None:
    file, clock = key_file(tmp_path, FIRST), VirtualClock()
    keys = keys_of(file, clock=clock)
    replacement = key_file(tmp_path, SECOND)
    assert replacement == file
    keys.check(bearer(FIRST))  # not looked at again yet
    clock.advance(1.1)
    keys.check(bearer(SECOND))
    with pytest.raises(AuthenticationError):
        keys.check(bearer(FIRST))


@pytest.mark.parametrize("damage", ["gone", "empty", "open"])
def test_a_file_that_breaks_leaves_the_keys_as_they_are(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = key_file(tmp_path, FIRST), VirtualClock()
    keys = keys_of(file, clock=clock)
    if damage == "gone":
        file.unlink()
    else:
        key_file(tmp_path, *([SECOND] if damage == "open" else []), mode=0o604 if damage == "open" else 0o600)
    clock.advance(1.1)
    keys.check(bearer(FIRST))
    for headers in ([], bearer(SECOND)):
        with pytest.raises(AuthenticationError):
            keys.check(headers)
    assert f"the API keys read before still hold: http.api_keys_file: {file} " in caplog.text
    key_file(tmp_path, THIRD)
    clock.advance(1.1)
    keys.check(bearer(THIRD))


# -- where a router may listen


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host: str) -> None:
    check_exposure(HttpConfig(), host, frozenset())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "router.example", "fe80::1"])
def test_beyond_loopback_keys_or_a_word_are_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="allow_anonymous") as caught:
        check_exposure(HttpConfig(), host, frozenset())
    assert KEYS_VARIABLE in caught.value.message
    check_exposure(HttpConfig(allow_anonymous=True), host, frozenset())
    check_exposure(HttpConfig(api_keys_file="keys"), host, frozenset())
    check_exposure(HttpConfig(), host, digests_of_variable({KEYS_VARIABLE: FIRST}))
    with pytest.raises(ConfigError, match="allow_anonymous"):
        check_exposure(HttpConfig(), host, digests_of_variable({KEYS_VARIABLE: ""}))


@pytest.mark.parametrize("listed", [",", "\n", "  ", " , ,\t"])
def test_a_variable_without_a_key_opens_nothing(listed: str) -> None:
    with pytest.raises(ConfigError, match="is set but holds no key"):
        digests_of_variable({KEYS_VARIABLE: listed})


def test_a_router_beyond_loopback_refuses_to_start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no key was given to it: what its own environment holds is of whoever started its process."""
    monkeypatch.setenv(KEYS_VARIABLE, FIRST)
    with pytest.raises(ConfigError, match="beyond loopback"):
        RouterServer(configuration.load(None), model_dir=checkpoint, host="0.0.0.0").start()
    allowed = configuration.load(None, {"http.allow_anonymous": True})
    server = RouterServer(allowed, model_dir=checkpoint, host="0.0.0.0")
    server.start()
    server.stop()


def test_keys_that_only_ray_was_started_with_are_not_lost_in_silence() -> None:
    environment = {KEYS_VARIABLE: FIRST}
    with pytest.raises(ConfigError, match="set where Ray was started, but not for `tandem serve`"):
        check_not_lost(HttpConfig(), frozenset(), environment)
    check_not_lost(HttpConfig(), digests_of_variable({KEYS_VARIABLE: SECOND}), environment)
    check_not_lost(HttpConfig(api_keys_file="keys"), frozenset(), environment)
    check_not_lost(HttpConfig(), frozenset(), {})


# -- through HTTP


@pytest.fixture
def locked(make_site: MakeSite, tmp_path: Path) -> Site:
    return make_site({"http.api_keys_file": str(key_file(tmp_path, FIRST))})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/toy", "/v1/cluster", "/metrics", "/openapi.json", "/none"])
def test_every_route_but_health_needs_a_key(locked: Site, path: str) -> None:
    with locked.http() as client:
        assert client.get("/health").status_code == 200
        refused = client.get(path, headers={"Authorization": "Bearer sk-wrong-0123456789"})
        allowed = client.get(path, headers={"Authorization": f"Bearer {FIRST}"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert error["request_id"] == refused.headers["x-request-id"]
    assert allowed.status_code == (404 if path == "/none" else 200)


def test_openais_client_gets_in_with_its_key(locked: Site) -> None:
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0, timeout=10)

    answer = client(FIRST).completions.create(model="toy", prompt="x", max_tokens=2)
    assert answer.choices[0].text == "ab"
    with pytest.raises(openai.AuthenticationError):
        client(SECOND).completions.create(model="toy", prompt="x")
    assert locked.prefill.count("start") == 1


def test_an_odd_path_is_no_way_around(locked: Site) -> None:
    with locked.http() as client:
        for path in ("//v1/cluster", "/health/../v1/cluster", "/health/", "/%68ealth/x", "/health%2F..%2Fmetrics"):
            assert client.get(path, follow_redirects=False).status_code in (401, 404), path


def test_keys_from_the_environment_reach_the_router_as_digests(make_site: MakeSite) -> None:
    digests = digests_of_variable({KEYS_VARIABLE: f"{FIRST},{SECOND}"})
    site = make_site(with_workers=False, key_digests=digests)
    with site.http() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {SECOND}"}).status_code == 200


def test_a_key_shows_nowhere(
    locked: Site, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"Authorization": f"Bearer {FIRST}"}
    with locked.http(headers=headers) as client:
        shown = [client.get(path).text for path in ("/v1/cluster", "/metrics", "/openapi.json", "/v1/models")]
        shown.append(client.post("/v1/completions", content=b"{").text)
        shown.append(client.get("/health", headers={"Authorization": f"Bearer {FIRST}x"}).text)
    shown += [*capsys.readouterr(), caplog.text]
    shown.append(json.dumps(dataclasses.asdict(locked.server._config)))  # what travels to an actor
    shown.append(repr(vars(keys_of(Path(locked.server._config.http.api_keys_file)))))
    assert "answered with" in caplog.text, "nothing was logged: the test proves nothing"
    assert not [text for text in shown if FIRST in text]


@pytest.mark.long
def test_keys_are_exchanged_in_a_running_router(locked: Site) -> None:
    file = Path(locked.server._config.http.api_keys_file)
    partial = file.with_name("keys.new")
    partial.write_text(SECOND)
    partial.chmod(0o600)
    os.replace(partial, file)

    def status(key: str) -> int:
        return httpx.get(f"{locked.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    wait_until(lambda: status(SECOND), "the second key's answer", wanted=lambda seen: seen == 200)
    assert status(FIRST) == 401


# -- before anything starts


@pytest.mark.parametrize("local", [True, False], ids=["own", "joined"])
def test_preflight_says_what_the_router_would(local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)

    def finding(**http: object) -> Finding:
        config = configuration.load(None, {f"http.{key}": value for key, value in http.items()})
        host = Host(num_cores=2, num_gpus=0, available_bytes=1 << 30)
        return Preflight(config, host, local=local).check_api_keys()

    assert finding().status == "ok"
    with pytest.raises(ConfigError, match="beyond loopback"):
        finding(host="0.0.0.0")
    with pytest.raises(ConfigError, match="cannot be read"):
        finding(api_keys_file=str(tmp_path / "none"))
    assert finding(host="0.0.0.0", allow_anonymous=True).status == "warn"
    assert finding(host="0.0.0.0", api_keys_file=str(key_file(tmp_path, FIRST))).status == "ok"
    monkeypatch.setenv(KEYS_VARIABLE, FIRST)
    assert finding().detail == "every request but /health needs one"


@pytest.mark.parametrize("local", [True, False], ids=["own", "joined"])
def test_the_router_reads_the_file_that_was_checked(
    local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose path may be relative; the router runs in a directory of its own."""
    monkeypatch.chdir(key_file(tmp_path, FIRST).parent)
    config = configuration.load(None, {"http.api_keys_file": "keys", "http.port": 18765})
    plan = Preflight(config, Host(num_cores=2, num_gpus=0, available_bytes=8 << 30), local=local).plan()
    assert plan.config.http.api_keys_file == str(tmp_path / "keys")


def test_a_plan_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, FIRST)
    config = configuration.load(None, {"http.port": 18765})
    plan = Preflight(config, Host(num_cores=2, num_gpus=0, available_bytes=8 << 30)).plan()
    (digest,) = plan.key_digests
    assert str(digest) not in repr(plan)
    assert plan.key_digests == digests_of_variable({KEYS_VARIABLE: FIRST})
