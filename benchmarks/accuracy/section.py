"""What types of numbers do to the embedded model's answers, as a section of `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.accuracy.ways import EXACT, GATES
from benchmarks.text import wrapped

FORMAT = "tandem-accuracy/1"
COMMAND = "`python -m benchmarks accuracy`"


def section(content: dict[str, Any]) -> Iterator[str]:
    """Each way and each checkpoint beside float32, and whether it passes its gate."""
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
        "multiplied with, and KV, and what attention multiplies; `int8` and `int4` round them when they are "
        "loaded, and widen them to float32 unless it says bfloat16. With `KV in bfloat16` and `KV in int8` "
        "(`cache.dtype`) all is as in `float32`, but for what the pages hold. A gate bounds perplexity, by that of "
        "float32; divergence, in nats; and of a hundred prompts, how many fewer are answered."
    )
    yield ""
    yield "| | perplexity | divergence, nats | same token | recalled | gate |"
    yield "|---|---|---|---|---|---|"
    exact = content["ways"][EXACT]
    num_recalls = settings["num_recalls"]
    for name, found in content["ways"].items():
        cells = [name, *_measured(found, num_recalls), _judged(name, found, exact, num_recalls)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "### Checkpoints that come quantised"
    yield ""
    yield from wrapped(
        "The same model from checkpoints that come quantised, each loaded with nothing configured "
        "([checkpoints.md](checkpoints.md#quantised) has what is served). They are written for this, by rounding to "
        "the nearest: quantisers that look at texts lose less. Groups are of 64 inputs where nothing else is said; "
        "embedding, head and norms are float16. *Added by loading* is the divergence of the very weights that the "
        "checkpoint means, computed in float32, and bounded by itself: int4 keeps the same numbers, and so does int8 "
        "of whole numbers with a scale an output whose greatest is 127, so there only sums are in another order."
    )
    yield ""
    yield "| checkpoint | kept as | perplexity | divergence, nats | same token | recalled | added by loading | gate |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in content["checkpoints"].items():
        kept, added = found["types"]["quantized"], f"{found['added']:.1g}"
        cells = [name, kept, *_measured(found, num_recalls), added, _judged(name, found, exact, num_recalls)]
        yield f"| {' | '.join(cells)} |"


def passes(name: str, found: dict[str, Any], exact: dict[str, Any], num_recalls: int) -> bool:
    """Whether what was `found` of a way or a checkpoint is within its gate."""
    gate = GATES[name]
    lost = 100 * (exact["num_recalled"] - found["num_recalled"]) / num_recalls
    return bool(
        found["perplexity"] <= gate.perplexity * exact["perplexity"]
        and found["divergence"] <= gate.divergence
        and (gate.added is None or found["added"] <= gate.added)
        and lost <= gate.recall
    )


def _measured(found: dict[str, Any], num_recalls: int) -> list[str]:
    return [
        f"{found['perplexity']:.3f}",
        f"{found['divergence']:.6f}",
        f"{found['same_token']:.1%}",
        f"{found['num_recalled']} of {num_recalls}",
    ]


def _judged(name: str, found: dict[str, Any], exact: dict[str, Any], num_recalls: int) -> str:
    if name not in GATES:
        return ""
    gate = GATES[name]
    added = "" if gate.added is None else f", {gate.added:g} added"
    bounds = f"≤ {gate.perplexity:g} ×, {gate.divergence:g} nats{added}, {gate.recall:g} of 100 recalled less"
    return f"{bounds}: {'passed' if passes(name, found, exact, num_recalls) else '**failed**'}"
