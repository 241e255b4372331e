"""From the tensors of a quantised layer to its weight, `[N, K]` float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem.core.errors import ModelLoadError
from tandem.engine.quantized.scheme import Packing, Scheme

_WORD_BITS = 32
#: Of eight numbers in a word, which output the one at each place is: AWQ deals them out to lanes.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)

Tensors = Mapping[str, torch.Tensor]


def unpacked(tensors: Tensors, scheme: Scheme) -> torch.Tensor:
    """The weight of a layer with these tensors, by the names that they have in a checkpoint.

    Raises `ModelLoadError` where the numbers are not what the scheme says.
    """
    return _UNPACKERS[scheme.packing](tensors, scheme)


def _gptq(tensors: Tensors, scheme: Scheme) -> torch.Tensor:
    """`qweight` int32 `[K / per word, N]`, `qzeros` int32 `[groups, N / per word]`, `scales` `[groups, N]`; `g_idx`
    `[K]`, the groups, where there is one."""
    numbers = _numbers(tensors["qweight"].T, scheme.bits)  # [N, K]
    zeros = (_numbers(tensors["qzeros"], scheme.bits) + scheme.offset) & ((1 << scheme.bits) - 1)  # [groups, N]
    num_in, num_out = tensors["g_idx"].shape[0] if "g_idx" in tensors else numbers.shape[1], numbers.shape[0]
    numbers, zeros = numbers[:, :num_in], zeros[:, :num_out]
    if scheme.symmetric and not bool((zeros == 1 << (scheme.bits - 1)).all()):
        raise ModelLoadError("it has zero points, and its config says sym: true; is checkpoint_format the right one?")
    groups = neighbours = _neighbours(num_in, scheme)
    if (order := tensors.get("g_idx")) is not None:
        groups = _in_range(order, len(zeros))
        if not scheme.ordered and not torch.equal(groups, neighbours):
            raise ModelLoadError("its groups are not of neighbours (g_idx), though its config says desc_act: false")
    return _scaled(numbers, zeros.T, tensors["scales"].T, groups)


def _awq(tensors: Tensors, scheme: Scheme) -> torch.Tensor:
    """`qweight` int32 `[K, N / 8]`, `qzeros` int32 `[groups, N / 8]`, `scales` `[groups, N]`."""
    numbers, zeros = (_dealt(_numbers(tensors[name], scheme.bits)) for name in ("qweight", "qzeros"))
    groups = _neighbours(len(numbers), scheme)
    return _scaled(numbers.T, zeros.T, tensors["scales"].T, groups)


def _dealt(numbers: torch.Tensor) -> torch.Tensor:
    words = numbers.view(len(numbers), -1, len(_AWQ_PLACES))
    return words[..., list(_AWQ_PLACES)].reshape(len(numbers), -1)


def _compressed(tensors: Tensors, scheme: Scheme) -> torch.Tensor:
    """`weight_packed` int32 `[N, K / per word]`, each number plus half of their range; `weight_scale` `[N, groups]`;
    `weight_zero_point` int32 `[N / per word, groups]` and `weight_g_idx` `[K]` where there are such."""
    half = 1 << (scheme.bits - 1)
    num_out, num_in = tensors["weight_shape"].tolist()
    numbers = _numbers(tensors["weight_packed"], scheme.bits)[:, :num_in] - half
    scales = tensors["weight_scale"]
    if numbers.shape != (num_out, num_in) or len(scales) != num_out:
        raise ModelLoadError(f"its weight_shape {[num_out, num_in]} is not that of its other tensors")
    zeros = torch.zeros(scales.shape, dtype=torch.int32)
    if not scheme.symmetric:
        zeros = (_numbers(tensors["weight_zero_point"].T, scheme.bits)[:, :num_out] - half).T
    groups = (
        _in_range(tensors["weight_g_idx"], scales.shape[1]) if scheme.ordered else _neighbours(num_in, scheme)
    )
    return _scaled(numbers, zeros, scales, groups)


def _plain(tensors: Tensors, _scheme: Scheme) -> torch.Tensor:
    """`weight` int8 or float8 `[N, K]`, `weight_scale` `[N, 1]`, `[1]` or a number."""
    return tensors["weight"].float() * tensors["weight_scale"].float().view(-1, 1)


def _blocks(tensors: Tensors, scheme: Scheme) -> torch.Tensor:
    """`weight` float8 `[N, K]`, `weight_scale_inv` `[N / block, K / block]`, both rounded up: what to multiply with."""
    weight = tensors["weight"].to(torch.float32, copy=True)
    scales = tensors["weight_scale_inv"].float()
    size = scheme.group_size
    for rows, of_rows in zip(weight.split(size), scales, strict=True):
        rows *= of_rows.repeat_interleave(size)[: weight.shape[1]]
    return weight


_UNPACKERS = {
    Packing.GPTQ: _gptq,
    Packing.AWQ: _awq,
    Packing.COMPRESSED: _compressed,
    Packing.PLAIN: _plain,
    Packing.BLOCKS: _blocks,
}


def _numbers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[rows, columns * per word]` of int32 `[rows, columns]`: the lowest bits of a word come first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_range(groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise ModelLoadError(f"its table of groups (g_idx) names others than its {num_groups}")
    return groups.long()


def _neighbours(num_in: int, scheme: Scheme) -> torch.Tensor:
    """The group of each input."""
    return torch.arange(num_in) // (scheme.group_size or num_in)


def _scaled(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`(numbers - zeros) * scales`, of `[N, K]`, `[N, groups]` and `[N, groups]`."""
    return (numbers - zeros[:, groups]).float() * scales.float()[:, groups]
