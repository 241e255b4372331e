"""How K and V are kept in pages: as they are, rounded, or as whole numbers with a scale.

As `int8` a head of a token is `head_dim` whole numbers and, behind them, the float32 that they are multiplied with: a
127th of the greatest of them by amount. So what is written of a token depends on that token alone, and one who walks
over tokens reads on in memory. The CPU's kernels write the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: By the types that pages may have: torch's of their elements. A head of `int8` has four more of these, its scale.
STORED: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8,
}  # fmt: skip
#: The greatest whole number, by amount.
GREATEST = 127
#: A head whose numbers are all smaller by amount is zero: their inverse would overflow.
LEAST = 2.0**-100


def encode(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """`[..., head_dim]` of any floating-point type as pages have it, `[..., elements of a head]`.

    Where a number is not finite, its whole head comes back as NaN from `int8`.
    """
    if dtype != "int8":
        return values.to(STORED[dtype])
    values = values.float()
    greatest = values.abs().amax(dim=-1, keepdim=True)
    has_size = greatest >= LEAST
    inverse = torch.where(has_size, GREATEST / greatest, 0.0)
    whole = (values * inverse).round().nan_to_num(0.0, 0.0, 0.0).to(torch.int8)
    scale = torch.where(has_size, greatest / GREATEST, 0.0)
    scale = torch.where(values.isfinite().all(dim=-1, keepdim=True), scale, float("nan"))
    return torch.cat([whole, scale.view(torch.int8)], dim=-1)


def decode(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    """The reverse of `encode`: what pages have, as numbers of their own type; of `int8`, float32."""
    if dtype != "int8":
        return stored
    scale = stored[..., -torch.float32.itemsize :].contiguous().view(torch.float32)
    return stored[..., : -torch.float32.itemsize].float() * scale
