"""What types of numbers do to the embedded model's answers, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.text import wrapped

FORMAT = "tandem-accuracy/1"
COMMAND = "`python -m benchmarks accuracy`"


@dataclass(frozen=True)
class Gate:
    """How far a type may be from float32.

    Attributes:
        perplexity: the ratio of its perplexity to that of float32, at most.
        recall: by how many of a hundred prompts it may recall fewer.
    """

    perplexity: float
    recall: float = 2.0


#: By way of computing.
GATES = {
    "bfloat16": Gate(1.01),
    "int8": Gate(1.01),
    "int4": Gate(1.06),
    "KV in bfloat16": Gate(1.01),
    "KV in int8": Gate(1.01),
}


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each way beside float32, and whether it passes its gate."""
    settings = content["settings"]
    yield ""
    yield "## Fewer bits"
    yield ""
    yield from wrapped(
        f"Measured by {COMMAND} on {content['date'][:10]} (sources {content['code']['digest']}) with the embedded "
        "model: perplexity, divergence (of float32's distributions from these, mean over the tokens) and how often the "
        f"likeliest token is the same, over {settings['num_texts']} stories of {content['num_tokens']:,} tokens in "
        f"all; and of {settings['num_recalls']} prompts of 400 to 900 tokens that hold a code, how many are answered "
        "with it. Its weights have 16 bits; `float32` computes with them exactly, `bfloat16` rounds what they are "
        "multiplied with, `int8` and `int4` round them when they are loaded. With `KV in bfloat16` and `KV in int8` "
        "(`cache.dtype`) all is as in `float32`, but for what the pages hold."
    )
    yield ""
    yield "| | perplexity | divergence, nats | same token | recalled | gate |"
    yield "|---|---|---|---|---|---|"
    exact = content["ways"]["float32"]
    for name, found in content["ways"].items():
        cells = [
            name,
            f"{found['perplexity']:.3f}",
            f"{found['divergence']:.5f}",
            f"{found['same_token']:.1%}",
            f"{found['num_recalled']} of {settings['num_recalls']}",
            _judged(name, found, exact, settings["num_recalls"]),
        ]
        yield f"| {' | '.join(cells)} |"


def passes(name: str, found: dict[str, Any], exact: dict[str, Any], num_recalls: int) -> bool:
    gate = GATES[name]
    lost = 100 * (exact["num_recalled"] - found["num_recalled"]) / num_recalls
    return bool(found["perplexity"] <= gate.perplexity * exact["perplexity"] and lost <= gate.recall)


def _judged(name: str, found: dict[str, Any], exact: dict[str, Any], num_recalls: int) -> str:
    if name not in GATES:
        return ""
    gate = asdict(GATES[name])
    bounds = f"perplexity ≤ {gate['perplexity']:g} ×, {gate['recall']:g} of 100 recalled less"
    return f"{bounds}: {'passed' if passes(name, found, exact, num_recalls) else '**failed**'}"
