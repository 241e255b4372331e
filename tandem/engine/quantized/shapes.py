"""Which tensors a quantised layer has, of which types and shapes, and how much memory they take. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tandem.core.errors import ModelLoadError
from tandem.core.model_path import TensorHead
from tandem.engine.quantized.scheme import Packing, Scheme

_WORD_BITS = 32
_REALS = ("F16", "BF16", "F32")
_FLOAT8, _INT8, _WORDS, _INDICES = ("F8_E4M3",), ("I8",), ("I32",), ("I32", "I64")
#: What else a layer may have: of inputs, outputs, K and V, which are computed with as they are.
WITHOUT_MEANING = {
    f"{of}_{what}" for of in ("input", "output", "q", "k", "v", "kv") for what in ("scale", "zero_point")
}
#: Parts of a layer that are float32 at the same time while it is proved and packed: of the greatest, three at most.
_COPIES = 6
_REAL_BYTES = 4

#: Types, and shapes of which one fits.
_Expected = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
Heads = Mapping[str, TensorHead]


def by_layer(heads: Heads) -> dict[str, dict[str, TensorHead]]:
    """The tensors of a checkpoint by layer, and there by what they are to it."""
    layers: dict[str, dict[str, TensorHead]] = defaultdict(dict)
    for name, head in heads.items():
        layer, _, own = name.rpartition(".")
        layers[layer][own] = head
    return layers


def check(layer: str, heads: Heads, scheme: Scheme, num_in: int, num_out: int) -> None:
    """Raises `ModelLoadError` where these tensors are not what `scheme` says of `num_in` to `num_out` features."""
    expected = {**_expected(scheme, num_in, num_out), "bias": (_REALS, ((num_out,),))}
    what = f"{scheme.describe()}, {num_in} to {num_out} features"
    if missing := [name for name in scheme.tensors if name not in heads]:
        raise ModelLoadError(f"{layer} lacks {', '.join(missing)} ({what}); get its files anew")
    for name, head in heads.items():
        if name in WITHOUT_MEANING:
            continue
        if name not in expected:
            raise ModelLoadError(f"{layer} has a tensor {name}, which says nothing here ({what}); it is not served so")
        types, shapes = expected[name]
        if head.dtype not in types or head.shape not in shapes:
            raise ModelLoadError(
                f"{layer}.{name} is {head.dtype} {list(head.shape)}, not {' or '.join(types)} "
                f"{' or '.join(str(list(shape)) for shape in shapes)} ({what}); it is not served so"
            )


def _expected(scheme: Scheme, num_in: int, num_out: int) -> dict[str, _Expected]:
    per_word = _WORD_BITS // scheme.bits
    size = scheme.group_size or num_in
    groups, words_in, words_out = _up(num_in, size), _up(num_in, per_word), _up(num_out, per_word)
    match scheme.packing:
        case Packing.GPTQ:
            return {
                "qweight": (_WORDS, ((words_in, num_out),)),
                "qzeros": (_WORDS, ((groups, words_out),)),
                "scales": (_REALS, ((groups, num_out),)),
                "g_idx": (_INDICES, ((num_in,),)),
            }
        case Packing.AWQ:
            return {
                "qweight": (_WORDS, ((num_in, words_out),)),
                "qzeros": (_WORDS, ((groups, words_out),)),
                "scales": (_REALS, ((groups, num_out),)),
            }
        case Packing.COMPRESSED:
            found: dict[str, _Expected] = {
                "weight_packed": (_WORDS, ((num_out, words_in),)),
                "weight_scale": (_REALS, ((num_out, groups),)),
                "weight_shape": (_INDICES, ((2,),)),
            }
            if not scheme.symmetric:
                found["weight_zero_point"] = (_WORDS, ((words_out, groups),))
            if scheme.ordered:
                found["weight_g_idx"] = (_INDICES, ((num_in,),))
            return found
        case Packing.PLAIN:
            types = _FLOAT8 if scheme.is_float else _INT8
            return {
                "weight": (types, ((num_out, num_in),)),
                "weight_scale": (_REALS, ((num_out, 1), (num_out,), (1,), ())),
            }
        case Packing.BLOCKS:
            blocks = _up(num_out, size), _up(num_in, size)
            return {"weight": (_FLOAT8, ((num_out, num_in),)), "weight_scale_inv": (_REALS, (blocks,))}


def loaded_bytes(heads: Heads, scheme: Scheme, quantize: str = "none") -> int:
    """The most memory that a checkpoint takes while it is loaded, and afterwards. `quantize`: as `model.quantize`."""
    kept_as = scheme.kept_as if quantize == "none" else quantize
    packed = plain = greatest = 0
    for layer in by_layer(heads).values():
        if (mark := scheme.tensors[0]) in layer:
            head = layer["weight"] if "weight" in layer else layer[mark]
            num = head.num_bytes * 8 // scheme.bits
            packed += num * 5 // 8 if kept_as == "int4" else num
            greatest = max(greatest, num)
        else:
            plain += sum(head.num_bytes for head in layer.values())
    as_stored = sum(head.num_bytes for head in heads.values())
    return max(as_stored, packed + plain) + _COPIES * _REAL_BYTES * greatest


def _up(length: int, size: int) -> int:
    return -(-length // size)
