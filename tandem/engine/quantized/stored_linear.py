"""A linear layer that keeps its weight as its checkpoint has it."""

from __future__ import annotations

import torch
from torch import nn

from tandem.core.errors import ModelLoadError
from tandem.engine.quantized.scheme import Scheme
from tandem.engine.quantized.unpack import unpacked


class StoredLinear(nn.Module):
    """As `nn.Linear`; its weight is unpacked anew for each look, so that no layer but one is in memory as float32.

    Args:
        name: of the layer, for errors.
        tensors: names, types and shapes of what a checkpoint holds for this layer, the bias among them.
    """

    def __init__(
        self, name: str, scheme: Scheme, in_features: int, out_features: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        self.name = name
        self.bias: nn.Parameter | None = None
        for own, tensor in tensors.items():
            if own == "bias":
                self.bias = nn.Parameter(tensor, requires_grad=False)
            else:
                self._buffers[own] = tensor  # one may be called `weight`, as the property is

    @property
    def weight(self) -> torch.Tensor:
        """`[N, K]` float32; while it is being loaded, what a checkpoint has under this name.

        Raises `ModelLoadError` where the numbers are not what the checkpoint's config says.
        """
        raw = self._buffers.get("weight")
        if raw is not None and any(tensor.is_meta for tensor in self.buffers()):
            return raw
        try:
            weight = unpacked(dict(self.named_buffers()), self.scheme)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.name}: {error.message}") from error
        if weight.shape != (self.out_features, self.in_features):  # padded to whole words, or what it says of itself
            shape = f"{list(weight.shape)}, not {[self.out_features, self.in_features]}"
            raise ModelLoadError(f"{self.name} makes a weight of {shape}; get its files anew")
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.weight, bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme.describe()}"
