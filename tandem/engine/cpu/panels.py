"""The weights of a linear layer in the order in which `packed_kernel` reads them, in the type that it multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tandem.engine.cpu.packed_kernel import BY_TWO, PANEL, PRODUCTS, QUANTIZED, QUANTIZED_BY_TWO, Products
from tandem.engine.cpu.tiles_kernel import IN_TILES, TILE_NUMBERS
from tandem.engine.cpu.tiles_quantized import QUANTIZED_IN_TILES
from tandem.engine.cpu.vector_ir import INT4_BY_TWO, INT4_PER_WORD, has_bfloat16_tiles
from tandem.engine.huge_pages import weight_memory

#: Of 4 bits, so many weights of an output have a scale in common.
GROUP = 128
# What a scale of 4 bits may be, relative to the one by which the greatest weight of its group is exact: smaller ones
# cut that off, and are finer for all others.
_CUTS = [1.0 - 0.05 * number for number in range(8)]
# Where the weights are whole numbers of a scale: the greatest of them may be any, and the scale negative.
_EXACT_CUTS = [sign * 7 / number for number in range(8, 0, -1) for sign in (1, -1)]
# So many weights are converted at a time.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Rounding:
    """To what weights are rounded.

    Attributes:
        bits: 8, with a scale for each output; or 4, with one for each `group` of an output too.
        is_exact: the weights are whole numbers of 4 bits of some scale already, which is to be found.
    """

    bits: int
    group: int = GROUP
    is_exact: bool = False


class Panels:
    """Of `[N, K]`: panels `[N / PANEL][K][PANEL]`, zeros behind the last output. Of several of one shape a panel of
    each in turn.

    Attributes:
        num: of panels.
        num_steps: of a panel, as the kernels count.
        products: the kernels that take them.
        address, scales_at: of the numbers and of their scales; 0 where they have none.
        group: steps that have scales in common; all where there are no scales.
    """

    def __init__(self, *weights: torch.Tensor) -> None:
        """`weights`: of one type, that `PRODUCTS` has; copied."""
        num_out, self._num_in = weights[0].shape
        num_panels = -(-num_out // PANEL)
        numbers = weight_memory.empty(num_panels, len(weights), self._num_in, PANEL, dtype=weights[0].dtype)
        for index, weight in enumerate(weights):
            rows = nn.functional.pad(weight.detach(), (0, 0, 0, num_panels * PANEL - num_out))
            numbers[:, index].copy_(rows.view(num_panels, PANEL, self._num_in).transpose(1, 2))
        self.num = num_panels * len(weights)
        self.products = PRODUCTS[numbers.dtype]
        self.num_steps = self.group = self._num_in
        self.place(numbers.flatten(0, 1), None)

    def place(self, numbers: torch.Tensor, scales: torch.Tensor | None) -> None:
        """From now on these are read. Whoever has noted the addresses must hear of it."""
        self.numbers, self.scales = numbers, scales
        self.address = numbers.data_ptr()
        self.scales_at = 0 if scales is None else scales.data_ptr()

    def multiply_short(self, *, in_tiles: bool = False) -> None:
        """From now on multiply in bfloat16, if the weights are of that type, or whole numbers, and K is even: in tiles,
        if that is asked for, this process may, and K, and groups, are made of whole ones. Once, behind `quantize`: what
        is read by two is put in order in place."""
        if self.products.rounds:
            return
        if self.scales is not None:
            bits, group = 4 if self.numbers.dtype is torch.int32 else 8, self.group * self.products.per_step
            is_whole = not (self._num_in % TILE_NUMBERS or group % TILE_NUMBERS)
            if in_tiles and is_whole and has_bfloat16_tiles():
                self._count_steps(QUANTIZED_IN_TILES[bits], group)
            elif not self._num_in % 2:
                self._count_steps(QUANTIZED_BY_TWO[bits], group)
            if bits == 4:
                for panel in self.numbers:
                    panel.copy_(_by_two(panel))
            return
        if self.numbers.dtype is not torch.bfloat16 or self._num_in % 2:
            return
        for panel in self.numbers:  # in place: the numbers of two steps beside each other
            panel.copy_(panel.view(-1, 2, PANEL).transpose(1, 2).reshape(-1, PANEL))
        has_tiles = in_tiles and not self._num_in % TILE_NUMBERS and has_bfloat16_tiles()
        self.products = IN_TILES if has_tiles else BY_TWO
        self.num_steps = self.group = self._num_in // 2

    def quantize(self, rounding: Rounding) -> None:
        """Round the weights to whole numbers of 8 bits, or of 4 if words of eight fit into K and into the groups."""
        bits = 8 if self._num_in % INT4_PER_WORD or rounding.group % INT4_PER_WORD else rounding.bits
        group = self._num_in if bits == 8 else min(rounding.group, self._num_in)
        cuts = _EXACT_CUTS if rounding.is_exact else _CUTS
        num_groups = -(-self._num_in // group)
        products = QUANTIZED[bits]
        dtype = torch.int8 if bits == 8 else torch.int32
        numbers = weight_memory.empty(self.num, self._num_in // products.per_step, PANEL, dtype=dtype)
        scales = weight_memory.empty(self.num, num_groups, PANEL, dtype=torch.float32)
        num_at_once = max(1, _AT_ONCE // (self._num_in * PANEL))
        for begin in range(0, self.num, num_at_once):
            those = slice(begin, begin + num_at_once)
            wide = nn.functional.pad(self.numbers[those].float(), (0, 0, 0, num_groups * group - self._num_in))
            found, rounded = _round(wide.view(len(wide), num_groups, group, PANEL), bits, cuts)
            scales[those] = found.squeeze(2)
            whole = rounded.view(len(wide), -1, PANEL)[:, : self._num_in].to(dtype)
            numbers[those] = whole if bits == 8 else _in_words(whole)
        self.place(numbers, scales)
        self._count_steps(products, group)

    def _count_steps(self, products: Products, group: int) -> None:
        """By `products`; `group`: in numbers of K."""
        self.products = products
        self.num_steps, self.group = self._num_in // products.per_step, group // products.per_step


def _round(weights: torch.Tensor, bits: int, cuts: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales `[P, groups, 1, PANEL]`, and whole numbers as float32, of weights `[P, groups, K, PANEL]`.

    Of 4 bits each scale is the one of `cuts` with the least sum of squared errors.
    """
    most = float(2 ** (bits - 1) - 1)
    exact = (weights.abs().amax(dim=2, keepdim=True) / most).clamp(min=torch.finfo(torch.float32).tiny)
    if bits == 8:
        return exact, (weights / exact).round()
    best, least = exact, torch.full_like(exact, torch.inf)
    for cut in cuts:
        scale = exact * cut
        error = ((weights / scale).round().clamp(-most - 1, most) * scale - weights).square().sum(dim=2, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best, (weights / best).round().clamp(-most - 1, most)


def _by_two(words: torch.Tensor) -> torch.Tensor:
    """As `INT4_BY_TWO` says, what has the first number lowest."""
    found = torch.zeros_like(words)
    for place, index in enumerate(INT4_BY_TWO):
        found |= (words >> 4 * index & 15) << 4 * place
    return found


def _in_words(whole: torch.Tensor) -> torch.Tensor:
    """`[P, K, PANEL]` from -8 to 7 as int32 `[P, K / 8, PANEL]`: four bits each, of eight the first one lowest."""
    of_words = (whole & 15).view(len(whole), -1, INT4_PER_WORD, PANEL)
    words = of_words[:, :, 0].clone()
    for index in range(1, INT4_PER_WORD):
        words |= of_words[:, :, index] << (4 * index)
    return words
