"""What is measured: the types that weights and pages may have, and the kinds of checkpoints that come quantised."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accuracy import quantized_checkpoints as made
from benchmarks.accuracy.quantized_checkpoints import Kind
from tandem.engine.cpu.vector_ir import has_bfloat16_products

#: The one from which all others differ.
EXACT = "float32"

#: Those ways that only CPUs have which multiply bfloat16.
SHORT_WAYS = {
    "int8, multiplied in bfloat16": {"dtype": "bfloat16", "quantize": "int8"},
    "int4, multiplied in bfloat16": {"dtype": "bfloat16", "quantize": "int4"},
}
#: How each way is loaded, the exact one first.
WAYS: dict[str, dict[str, str]] = {
    EXACT: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "KV in bfloat16": {"dtype": "float32", "cache_dtype": "bfloat16"},
    "KV in int8": {"dtype": "float32", "cache_dtype": "int8"},
    **(SHORT_WAYS if has_bfloat16_products() else {}),
}

#: As what each checkpoint is written, by rounding to the nearest. Groups of 64 divide the embedded model's inputs.
CHECKPOINTS: dict[str, Kind] = {
    "GPTQ, 8 bits": made.gptq(8, 64),
    "GPTQ, 4 bits": made.gptq(4, 64),
    "GPTQ, 4 bits, zero points, `desc_act`": made.gptq(4, 64, symmetric=False, ordered=True),
    "GPTQ, 2 bits, zero points, groups of 16": made.gptq(2, 16, symmetric=False),
    "AWQ": made.awq(64),
    "compressed-tensors, W8A16": made.compressed(8, -1),
    "compressed-tensors, W4A16": made.compressed(4, 64),
    "compressed-tensors, W4A16, zero points": made.compressed(4, 64, symmetric=False),
    "compressed-tensors, int8": made.plain_numbers("int8"),
    "compressed-tensors, FP8": made.plain_numbers("float8"),
    "compressed-tensors, FP8, one scale a layer": made.plain_numbers("float8", whole=True),
    "FP8, blocks of 128": made.blocks(128),
}


@dataclass(frozen=True)
class Gate:
    """How far from float32 a way may be.

    Attributes:
        perplexity: the ratio of its perplexity to that of float32, at most.
        divergence: of float32's distributions from its own, the mean over tokens in nats, at most.
        added: of a checkpoint that comes quantised, the same divergence of the very weights that it means, computed
            in float32: what loading adds to what the quantiser did.
        recall: by how many of a hundred prompts it may recall fewer.
    """

    perplexity: float
    divergence: float
    added: float | None = None
    recall: float = 2.0


# Loading adds nothing but sums in another order where numbers stay the same ones (those of 4 bits; those of 8 with a
# scale an output, the greatest of them 127); else int8 rounds once more.
_KEPT, _ROUNDED = 1e-9, 4e-5

#: By way of computing, and by checkpoint. A bit less in every number makes about four times the divergence: bounds on
#: it are below that, but for that of bfloat16, which is torch's where a CPU has no products of it.
GATES = {
    "bfloat16": Gate(1.01, 1e-3),  # where a CPU has no products of bfloat16, all is rounded to it
    "int8": Gate(1.01, 7e-5),
    "int4": Gate(1.06, 0.02),
    "KV in bfloat16": Gate(1.01, 2.5e-6),
    "KV in int8": Gate(1.01, 2e-5),
    "int8, multiplied in bfloat16": Gate(1.01, 7e-5),
    "int4, multiplied in bfloat16": Gate(1.06, 0.02),
    "GPTQ, 8 bits": Gate(1.01, 6e-5, _ROUNDED),
    "GPTQ, 4 bits": Gate(1.02, 0.01, _KEPT),
    "GPTQ, 4 bits, zero points, `desc_act`": Gate(1.02, 0.007, _ROUNDED),
    "GPTQ, 2 bits, zero points, groups of 16": Gate(1.3, 0.3, 1e-3),
    "AWQ": Gate(1.02, 0.007, _ROUNDED),
    "compressed-tensors, W8A16": Gate(1.01, 6e-5, _ROUNDED),
    "compressed-tensors, W4A16": Gate(1.02, 0.01, _KEPT),
    "compressed-tensors, W4A16, zero points": Gate(1.02, 0.007, _ROUNDED),
    "compressed-tensors, int8": Gate(1.01, 6e-5, _KEPT),
    "compressed-tensors, FP8": Gate(1.01, 5e-4, _ROUNDED),
    "compressed-tensors, FP8, one scale a layer": Gate(1.01, 5e-4, _ROUNDED),
    "FP8, blocks of 128": Gate(1.01, 5e-4, _ROUNDED),
}
