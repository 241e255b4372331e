"""The board for Grafana and the alert rules: each query against a running router's figures, by Prometheus itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.lifecycle.serve import outcome_of
from tandem.core.errors import error_class
from tandem.core.metrics import OUTCOMES, RouterMetrics
from tandem.core.ports import free_port
from tests.support.router_site import Site, opened_site, write_checkpoint
from tests.support.waiting import nothing, wait_until

ROOT = Path(__file__).parent.parent.parent
BOARD = ROOT / "deploy/grafana/tandem.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"

#: What a cluster in which nothing ever went wrong has no sample of, so that a query is right and finds nothing.
QUIET = re.compile(
    "tandem_(retries|moves|handoffs_refused|local_prefills|workers_lost|worker_deaths|recovery_seconds|calls_denied"
    "|link_bytes|grammar|preemptions|kv_transfer|prompt_tokens|decode_tokens)"
)

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="apt-get install prometheus"
)


def board_queries() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alert_queries() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened_site(write_checkpoint(tmp_path_factory.mktemp("board") / "toy")) as site:
        yield site


def test_every_metric_of_the_board_and_the_rules_is_exported(site: Site) -> None:
    site.post(prompt="x", max_tokens=3)
    with site.http() as client:
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", client.get("/metrics").text, re.MULTILINE))
    known = set(types) | {"tandem_router_answers"}  # where several share a port
    histograms = [name for name, kind in types.items() if kind == "histogram"]
    known |= {name + end for name in histograms for end in ("_bucket", "_sum", "_count")}
    used = set(re.findall(r"tandem_\w+", " ".join([*board_queries(), *alert_queries()])))
    assert used - known == set()
    assert len(used) > 25


def test_what_alerts_count_is_exported_before_it_happens() -> None:
    """Prometheus sees no increase where a series begins: the first deaths, and a burst of failures, would be missed."""
    shown = set(RouterMetrics().exposition().decode().splitlines())
    for role in ("prefill", "decode"):
        assert f'tandem_worker_deaths_total{{role="{role}"}} 0.0' in shown
    codes = ["cancelled", "deadline", "overloaded", "rate_limit_exceeded", "no_worker", "invalid_request", "internal"]
    assert {outcome_of(error_class(code)("x")) for code in codes} | {"finished"} == set(OUTCOMES)
    assert {f'tandem_requests_total{{outcome="{outcome}"}} 0.0' for outcome in OUTCOMES} <= shown


def test_what_every_router_tells_of_workers_is_counted_once() -> None:
    """The deployment's page lists it."""
    page = (ROOT / "docs/deploy.md").read_text().split("What workers report")[1].split("take one of them")[0]
    of_workers = re.findall(r"`(tandem_\w+)`", page)
    assert len(of_workers) > 8
    for query in [*board_queries(), *alert_queries()]:
        for name in of_workers:
            if name in query:
                assert re.search(r"max|absent", query), query


def test_the_board_shows_every_histogram_and_counts_each_request_once(site: Site) -> None:
    queries = board_queries()
    for query in queries:
        assert re.search(r"sum|max", query), query  # several routers tell of the same workers
    with site.http() as client:
        histograms = re.findall(r"^# TYPE (tandem_\S+) histogram$", client.get("/metrics").text, re.MULTILINE)
    shown = " ".join(queries)
    assert [name for name in histograms if name not in shown] == []


@pytest.fixture
def prometheus(site: Site, tmp_path: Path) -> Iterator[str]:
    """The URL of a real one that scrapes the router each second and evaluates the rules."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "tandem", "static_configs": [{"targets": [site.url.removeprefix("http://")]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    line = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with subprocess.Popen([*line, f"--web.listen-address={url}"], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: _is_ready(f"http://{url}"), "prometheus", 60, every_s=0.1)
        yield f"http://{url}"
        process.terminate()


def _is_ready(prometheus: str) -> bool:
    try:
        return httpx.get(f"{prometheus}/-/ready", timeout=20).status_code == 200
    except httpx.TransportError:
        return False


def ask(prometheus: str, query: str) -> list[Any]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=20).json()
    assert answer["status"] == "success", (query, answer)
    result: list[Any] = answer["data"]["result"]
    return result


@needs_prometheus
@pytest.mark.processes
def test_prometheus_answers_every_query_and_knows_every_rule(site: Site, prometheus: str) -> None:
    def unanswered() -> list[str]:
        """The queries that find nothing; a rate needs two scrapes of its series, which may begin with a request."""
        site.post(prompt="x", max_tokens=3)
        found = {query: ask(prometheus, query.replace("$__rate_interval", "1m")) for query in board_queries()}
        return [query for query, result in found.items() if not result and not QUIET.search(query)]

    wait_until(unanswered, "an answer to every query", 60, wanted=nothing, every_s=0.5)

    def evaluated() -> list[str]:
        groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=20).json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    wait_until(evaluated, "every rule is evaluated", 60, wanted=lambda seen: bool(seen) and set(seen) == {"ok"})
    assert len(evaluated()) == len(alert_queries())
    firing = {alert["metric"]["alertname"] for alert in ask(prometheus, "ALERTS")}
    assert firing == set(), "a sound cluster raises none"


@needs_prometheus
@pytest.mark.processes
def test_promtool_finds_the_rules_sound() -> None:
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@needs_prometheus
@pytest.mark.processes
def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    """By promtool's own unit tests: series in, alerts out."""

    def case(series: dict[str, str], alert: str, *labels: dict[str, str], at: str = "30m") -> dict[str, Any]:
        expected = [{"exp_labels": each} for each in labels]
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
        }

    pages = "tandem_kv_pages{worker='decode-0',role='decode',state='%s'}"
    ended = "tandem_requests_total{outcome='%s'}"
    slo = "tandem_slo_requests_total{tenant='t',ttft='%s',tpot='%s'}"
    cases = [
        case({}, "TandemDown", {"severity": "critical"}),
        case(
            {"tandem_running_requests{role='prefill',worker='p'}": "1x40"},
            "TandemPoolEmpty",
            {"severity": "critical", "role": "decode"},
        ),
        case(
            {"tandem_running_requests{role='decode',worker='d'}": "1x40", "tandem_colocated": "0x40"},
            "TandemPoolEmpty",
            {"severity": "critical", "role": "prefill"},
        ),
        case(
            {
                "tandem_running_requests{role='decode',worker='d'}": "1x40",
                "tandem_colocated{router='router-0'}": "1x40",
                "tandem_colocated{router='router-1'}": "1x40",
            },
            "TandemPoolEmpty",
        ),
        case(
            {ended % "finished": "0+90x40", ended % "failed": "0+10x40"}, "TandemRequestsFail", {"severity": "critical"}
        ),
        case(
            {ended % "finished": "0+90x40", ended % "no_worker": "0+10x40"},
            "TandemRequestsFail",
            {"severity": "critical"},
        ),
        case({ended % "finished": "0+90x40", ended % "deadline": "0+10x40"}, "TandemRequestsFail"),
        case(
            {ended % "finished": "0+90x40", ended % "overloaded": "0+10x40"},
            "TandemOverloaded",
            {"severity": "warning"},
        ),
        case(
            {
                slo % ("kept", "kept"): "0+90x40",
                slo % ("missed", "kept"): "0+10x40",
            },
            "TandemFirstTokenLate",
            {"severity": "warning"},
        ),
        case(
            {
                slo % ("kept", "kept"): "0+90x40",
                slo % ("kept", "missed"): "0+10x40",
            },
            "TandemTokensLate",
            {"severity": "warning"},
        ),
        case(
            {pages % "free": "1x40", pages % "used": "99x40"},
            "TandemSaturated",
            {"severity": "warning", "worker": "decode-0"},
        ),
        case(
            {
                **{(pages % "used").replace("decode-0", worker): "100x40" for worker in ("decode-0", "decode-1")},
                "tandem_kv_unfilled_pages{worker='decode-0',role='decode'}": "21x40",
                "tandem_kv_unfilled_pages{worker='decode-1',role='decode'}": "19x40",
                **{(pages % "quarantined").replace("decode-0", worker): "0x40" for worker in ("decode-0", "decode-1")},
            },
            "TandemFragmented",
            {"severity": "warning", "worker": "decode-0"},
        ),
        case({pages % "quarantined": "4x40"}, "TandemQuarantine", {"severity": "warning", "worker": "decode-0"}),
        case(
            {"tandem_worker_deaths_total{role='decode'}": "0+1x40"},
            "TandemWorkersDie",
            {"severity": "warning", "role": "decode"},
        ),
        case({"tandem_retry_budget_exhausted_total": "0+1x40"}, "TandemRetryBudgetSpent", {"severity": "warning"}),
        case(
            {
                # A time since the epoch, which begins with the case.
                "tandem_certificate_expiry_timestamp_seconds{process='decode-0',router='router-0'}": "1200000x40",
                "tandem_certificate_expiry_timestamp_seconds{process='decode-0',router='router-1'}": "1200000x40",
                "tandem_certificate_expiry_timestamp_seconds{process='decode-1',router='router-0'}": "1300000x40",
            },
            "TandemCertificateEnds",
            {"severity": "warning", "process": "decode-0"},
        ),
        case(
            {"tandem_router_answers{router='router-1'}": "0x40"},
            "TandemRouterSilent",
            {"severity": "warning", "router": "router-1"},
        ),
    ]
    assert {one["alert_rule_test"][0]["alertname"] for one in cases} == {
        rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    }
    # What an alert says is not part of the case: only that it fires, and for whom.
    rules = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": cases}))
    tested = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "cases.yaml"], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
