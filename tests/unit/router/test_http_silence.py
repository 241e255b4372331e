"""Requests of a worker that is silent, and not lost yet: those that it has not begun go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.router_site import Site, in_background
from tests.support.scripted_worker import ScriptedDecode, ScriptedPrefill, ScriptedWorker

pytestmark = pytest.mark.long

MakeSite = Callable[..., Site]
LEASE = {"transport.lease_s": 3.0}


def halted(make_site: MakeSite, **overrides: Any) -> tuple[Site, Any]:
    """A request that both workers have, and of which neither has said anything."""
    site = make_site({**LEASE, **overrides})
    site.prefill.auto = site.decode.auto = False
    under_way = in_background(site)
    site.prefill.wait_for("start")
    site.decode.wait_for("reserve")
    return site, under_way


def hear(site: Site, worker: ScriptedWorker) -> None:
    """Until all has arrived that the worker has said."""
    worker.status.num_queued = 7
    site.until_shown(worker.info.worker_id, num_queued=7)


def num_lost(site: Site) -> float:
    return sum(value for name, value in site.metrics().items() if name.startswith("tandem_workers_lost_total"))


def text(under_way: Any) -> str:
    return str(under_way.result().json()["choices"][0]["text"])


@pytest.mark.parametrize("granted", ["before", "meanwhile", "never"])
def test_what_a_silent_prefill_worker_has_not_begun_another_one_computes(make_site: MakeSite, granted: str) -> None:
    site, under_way = halted(make_site)
    reserve, other = site.decode.wait_for("reserve"), ScriptedPrefill("prefill-1")
    site.add(other)
    if granted == "before":
        site.decode.grant(reserve)
        site.decode.wait_for("attach")
        hear(site, site.prefill)
    site.prefill.go_silent()
    if granted == "meanwhile":
        site.decode.grant(reserve)
        site.decode.wait_for("attach")
    site.decode.auto = True
    assert text(under_way) == "abcde"
    assert other.wait_for("start").attempt == 2
    assert site.decode.wait_for("reserve", 2).attempt == 2
    if granted == "before":  # its pages would be in quarantine: it was waited for until it was lost
        assert num_lost(site) == 1
        return
    assert num_lost(site) == 0
    assert site.prefill.wait_for("cancel").attempt == 1
    site.prefill.speak_again()
    site.prefill.auto = True
    late = site.prefill.wait_for("start")
    site.prefill.first_tokens(late)  # of an attempt that is over
    assert text(in_background(site)) == "abcde"


def test_those_that_wait_for_a_silent_worker_hold_nobody_up_who_may_go_to_another(make_site: MakeSite) -> None:
    """As many prompts wait for it as the router places and are not begun: two for each worker that is heard."""
    site, first = halted(make_site)
    second = in_background(site)
    site.prefill.wait_for("start", 2)
    for number in (1, 2):
        site.decode.grant(site.decode.wait_for("reserve", number))
        site.decode.wait_for("attach", number)
    hear(site, site.prefill)
    site.add(ScriptedPrefill("prefill-1"))
    site.prefill.go_silent()
    site.until_shown("prefill-0", state="silent")
    site.decode.auto = True
    assert text(in_background(site)) == "abcde"
    assert num_lost(site) == 0
    assert [text(first), text(second)] == ["abcde"] * 2
    assert num_lost(site) == 1


def test_what_a_silent_prefill_worker_has_begun_waits_for_it(make_site: MakeSite) -> None:
    site, under_way = halted(make_site)
    start, other = site.prefill.wait_for("start"), ScriptedPrefill("prefill-1")
    site.add(other)
    site.prefill.started(start)
    hear(site, site.prefill)
    site.prefill.go_silent()
    site.until_shown("prefill-0", state="silent")
    site.prefill.speak_again()
    site.prefill.first_tokens(start)
    site.decode.auto = True
    site.decode.grant(site.decode.wait_for("reserve"))
    assert text(under_way) == "abcde"
    assert other.count("start") == 0
    assert num_lost(site) == 0


def test_what_a_silent_decode_worker_has_not_granted_another_one_takes_from_the_same_prefill_worker(
    make_site: MakeSite,
) -> None:
    site, under_way = halted(make_site)
    other = ScriptedDecode("decode-1")
    site.add(other, ScriptedPrefill("prefill-1"))
    site.decode.go_silent()
    site.prefill.auto = True
    assert text(under_way) == "abcde"
    assert site.prefill.wait_for("start", 2).attempt == other.wait_for("reserve").attempt == 2
    assert num_lost(site) == 0


def goes_on_where_it_is(site: Site, start: Any, under_way: Any) -> None:
    """The silent worker is heard again, and serves what it had."""
    site.prefill.speak_again()
    site.decode.auto = True
    site.decode.grant(site.decode.wait_for("reserve"))
    site.prefill.first_tokens(start)
    assert text(under_way) == "abcde"


def test_where_no_other_is_ready_the_request_waits_for_the_silent_worker(make_site: MakeSite) -> None:
    site, under_way = halted(make_site)
    start = site.prefill.wait_for("start")
    site.prefill.go_silent()
    site.until_shown("prefill-0", state="silent")
    goes_on_where_it_is(site, start, under_way)
    assert (site.prefill.count("start"), num_lost(site)) == (1, 0)


def test_nobody_leaves_a_silent_worker_for_a_last_attempt(make_site: MakeSite) -> None:
    """It may be heard again; an attempt that fails elsewhere would be the end."""
    site, under_way = halted(make_site, **{"limits.max_attempts": 1})
    start, other = site.prefill.wait_for("start"), ScriptedPrefill("prefill-1")
    site.add(other)
    site.prefill.go_silent()
    site.until_shown("prefill-0", state="silent")
    goes_on_where_it_is(site, start, under_way)
    assert other.count("start") == 0
