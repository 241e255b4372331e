"""Tokens a second with guesses and without, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.figures import Goal
from benchmarks.text import wrapped

FORMAT = "tandem-speculation/1"
COMMAND = "`python -m benchmarks speculation`"

#: Of lookup over no guesses: where half of an output stands in its prompt, and everywhere else.
COPIED, ELSEWHERE = Goal(1.5, is_lower=True), Goal(0.98, is_lower=True)


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each load, with each way of guessing beside none."""
    settings, machine = content["settings"], content["machine"]
    yield ""
    yield "## Guesses"
    yield ""
    draft = settings["draft"] or "the model itself"
    yield from wrapped(
        f"Measured by {COMMAND} on {content['date'][:10]} ({machine['cpu']}, sources {content['code']['digest']}): a "
        f"decode worker for each way, {settings['threads']} thread each, the same requests in turn, "
        f"{settings['output']} tokens of each, medians of {settings['rounds']} rounds. Lookup guesses up to "
        f"{settings['lookup_tokens']} tokens, the draft ({draft}, its weights rounded to {settings['quantize']}) "
        f"{settings['draft_tokens']}. Ratios are over the worker without guesses, round by round. Right is the share "
        "of the guesses that were what came."
    )
    yield ""
    yield "| load | guesses | tokens/s | ratio | right | other outputs |"
    yield "|---|---|---|---|---|---|"
    for row in content["rows"]:
        num_right, num_all = row["right_guesses"] + row["right_drafts"], row["guesses"] + row["drafts"]
        right = f"{num_right / num_all:.0%} of {num_all:,}" if num_all else ""
        ratio = f"{row['ratio']:.2f}"
        if row["way"] == "lookup":
            goal = COPIED if row["copies"] else ELSEWHERE
            reached = "reached" if goal.is_reached_by(row["ratio"]) else "**missed**"
            ratio += f" ({goal}: {reached})"
        others = row["rounds_with_other_outputs"] or "none"
        yield f"| {row['load']} | {row['way']} | {row['tokens_per_s']:.1f} | {ratio} | {right} | {others} |"
