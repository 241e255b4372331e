"""The links' section of `docs/benchmarks.md`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

FORMAT = "tandem-link/1"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown of what `python -m benchmarks link --json` wrote."""
    yield ""
    yield "## Links between hosts"
    yield ""
    yield "Measured by `python -m benchmarks link`: two processes with an arena each, no model. The same bytes go as a"
    yield "TCP stream, as one raw write of the transport, and as a handoff with digests at both ends, in turn; medians."
    yield "The exposed transfer is of a prompt whose pages are sealed at the given rate, from its end to the answer."
    for link in content["links"]:
        measured = link["measured"]
        yield ""
        yield f"### {link['link']}"
        yield ""
        host, rate, num_runs = link["machine"], measured[0]["prefill_rate"], len(measured[0]["raw_s"])
        yield f"{host['cpu']}, {host['num_cores']} cores; {link['transport']}; {link['date'][:10]};"
        yield f"{num_runs} runs of each; prompts computed at {rate:,.0f} tokens/s."
        yield ""
        yield "| pages of | tokens | MB | TCP stream GB/s | raw write GB/s | handoff GB/s | of raw | exposed ms |"
        yield "|---|---|---|---|---|---|---|---|"
        for one in measured:
            yield "| " + " | ".join(_cells(one)) + " |"


def _cells(one: dict[str, Any]) -> list[str]:
    tcp, raw, handoff = (
        one["num_bytes"] / statistics.median(one[name]) / 1e9 for name in ("tcp_s", "raw_s", "handoff_s")
    )
    exposed_ms = statistics.median(one["exposed_s"]) * 1e3
    return [
        one["layout"],
        f"{one['num_tokens']:,}",
        f"{one['num_bytes'] / 1e6:,.0f}",
        f"{tcp:.2f}",
        f"{raw:.2f}",
        f"{handoff:.2f}",
        f"{handoff / raw:.0%}",
        f"{exposed_ms:,.1f}",
    ]
