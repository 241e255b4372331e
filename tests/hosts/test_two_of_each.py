"""A head, two prefill and two decode hosts: each fault of a host or of the network, and its end.

Whatever it is: the same tokens or a typed error, and afterwards all workers serve and nothing is held for anybody.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.hosts import report
from tests.hosts.cluster import HostCluster
from tests.hosts.host import Host
from tests.hosts.hosts import Hosts
from tests.hosts.oracle import expected
from tests.hosts.strike import NUM_BEFORE, NUM_DURING, PROMPT, TOKENS, strike
from tests.scenarios.faults.site import story

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(2400)]

_FIGURES = "HOST_FAULTS"
"""Names the file that the figures of the run go to; without it they are not kept."""

KEEP_NOTHING = {"cache": {"memory_bytes": 64 << 20, "prefix_cache": False}}
"""Each fault strikes the same prompts, whose answers are known; they are computed and handed off each time."""

Sides = Callable[[HostCluster], tuple[list[Host], list[Host]]]

PARTITIONS: dict[str, Sides] = {
    "prefill hosts from decode hosts": lambda c: (c.prefill, c.decode),
    "one prefill host from one decode host": lambda c: (c.prefill[:1], c.decode[:1]),
    "the head from prefill hosts": lambda c: ([c.head], c.prefill),
    "the head from decode hosts": lambda c: ([c.head], c.decode),
    "one prefill host from all": lambda c: (c.prefill[:1], [c.head, *c.prefill[1:], *c.decode]),
    "one decode host from all": lambda c: (c.decode[:1], [c.head, *c.prefill, *c.decode[1:]]),
}


@pytest.fixture(scope="module")
def cluster(start_hosts: Callable[..., Hosts], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    cluster = HostCluster(start_hosts(), 2, 2, limits={"retry_budget": 1.0}, **KEEP_NOTHING)
    try:
        cluster.start_hosts()
        cluster.up()
        yield cluster
    finally:
        cluster.save_logs(tmp_path_factory.getbasetemp() / "logs-of-two-of-each")


def keep(seen: report.Seen) -> None:
    if target := os.environ.get(_FIGURES):
        report.save(Path(target), [seen])
    assert not set(seen.afterwards) - {report.SAME}, "when all is over, nobody sees anything of it"


@pytest.mark.parametrize("lasts_s", [1, 5, 15, 60])
@pytest.mark.parametrize("between", PARTITIONS)
def test_a_partition(cluster: HostCluster, between: str, lasts_s: int) -> None:
    fault = f"{between} for {lasts_s} s"
    keep(strike(cluster, fault, lambda: cluster.hosts.part(*PARTITIONS[between](cluster)), cluster.hosts.heal, lasts_s))


def test_connections_between_living_workers_break_and_nobody_is_killed_for_it(cluster: HostCluster) -> None:
    def reset() -> None:
        for prefill in cluster.prefill:
            for decode in cluster.decode:
                cluster.hosts.reset(prefill, decode)

    seen = strike(cluster, "all connections between prefill and decode reset", reset, lambda: None, 4)
    keep(seen)
    assert (seen.saw, seen.replaced) == ({report.SAME: NUM_BEFORE + NUM_DURING}, 0)


def test_one_packet_in_a_hundred_is_lost(cluster: HostCluster) -> None:
    everyone = [cluster.head, *cluster.prefill, *cluster.decode]

    def lose(percent: float) -> None:
        for host in everyone:
            cluster.hosts.lose(host, percent)

    keep(strike(cluster, "1 % of all packets lost for 15 s", lambda: lose(1), lambda: lose(0), 15))


def test_a_slow_link(cluster: HostCluster) -> None:
    fault, slow = "a prefill host sends 2 Mbit/s for 30 s", cluster.prefill[0]
    keep(strike(cluster, fault, lambda: slow.shape("2mbit"), lambda: slow.shape("off"), 30))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_host_dies_and_comes_back_unasked(cluster: HostCluster, role: str) -> None:
    victim: Host = getattr(cluster, role)[-1]
    fault = f"a {role} host dies, and is back after 20 s"
    keep(strike(cluster, fault, victim.kill, lambda: cluster.hosts.add(victim.number), 20))


def test_a_network_of_long_ways(cluster: HostCluster) -> None:
    def delay(delay_s: float) -> None:
        for host in cluster.prefill:
            cluster.hosts.delay(host, delay_s)

    fault = "50 ms of delay, to and from prefill hosts, for 15 s"
    keep(strike(cluster, fault, lambda: delay(0.05), lambda: delay(0), 15))


def test_the_head_dies_and_tandem_up_brings_all_back(cluster: HostCluster) -> None:
    """Nobody tells clients of a host that has lost its power: they wait for as long as they like."""
    gave_up, before = "nothing more", cluster.incarnations()
    prompts = [story(f"under way {number}", PROMPT) for number in range(NUM_BEFORE)]
    streams = [cluster.asking(prompt, max_tokens=TOKENS, ignore_eos=True, timeout_s=30.0) for prompt in prompts]
    streams[0].wait_for_token()
    struck_at = time.time()
    cluster.head.kill()
    saw = []
    for stream, prompt in zip(streams, prompts, strict=True):
        try:
            answer = stream.answer()
        except httpx.TimeoutException:
            saw.append(gave_up)
            continue
        right = expected(prompt, TOKENS)
        assert answer.token_ids[0] == right[: len(answer.token_ids[0])]
        assert answer.done == (answer.token_ids[0] == right)
        saw.append(report.SAME if answer.done else "a broken connection")
    waited_s = time.time() - struck_at
    cluster.hosts.add(cluster.head.number)
    back_at = time.time()
    cluster.up()
    whole_at = time.time()
    cluster.wait_idle()
    after = cluster.incarnations()
    assert not before & after, "workers of the head that died serve nobody"
    answer = cluster.ask(prompts[0], max_tokens=TOKENS, ignore_eos=True)
    assert answer.token_ids == [expected(prompts[0], TOKENS)]
    fault = "the head dies, is back after 30 s, and `tandem up` is run again"
    idle_s = time.time() - whole_at
    keep(report.Seen(fault, dict(Counter(saw)), round(waited_s, 2), round(whole_at - back_at, 2), round(idle_s, 2),
                     len(after)))  # fmt: skip
