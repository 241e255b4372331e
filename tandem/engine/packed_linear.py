"""Linear layers of a float32 model on the CPU, their weights packed for `packed_kernel`.

torch's own product reads weights at a third of the memory's speed when a batch has 2 to 32 rows, which is what decoding
does all the time.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.engine.packed_kernel import PANEL, multiply, multiply_parallel
from tandem.engine.threads import launch
from tandem.engine.vector_ir import is_fast_here

_log = logging.getLogger(__name__)

_ALIGNMENT = 64


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight as panels `[N / 32][K][32]`, zeros behind the last output.

    Args:
        weight: `[N, K]` float32; copied.
        bias: `[N]` float32, or none.
        num_threads: CPU threads of one product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._num_panels = -(-self.out_features // PANEL)
        self._panels = _aligned(self._num_panels, self.in_features, PANEL)
        rows = nn.functional.pad(weight.detach(), (0, 0, 0, self._num_panels * PANEL - self.out_features))
        self._panels.copy_(rows.view(self._num_panels, PANEL, self.in_features).transpose(1, 2))
        self._bias = bias.detach().clone() if bias is not None else None
        self._num_threads = num_threads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` float32 to `[..., N]`."""
        rows = x.reshape(-1, self.in_features).contiguous()
        num_rows = rows.shape[0]
        output = torch.empty(num_rows, self._num_panels * PANEL)
        arguments = (
            rows.data_ptr(), num_rows, self.in_features, self._panels.data_ptr(), self._num_panels, output.data_ptr(),
        )  # fmt: skip
        if self._num_threads == 1:
            multiply(*arguments)
        else:
            launch(self._num_threads, multiply_parallel, *arguments)
        output = output[:, : self.out_features]
        if self._bias is not None:
            output = output + self._bias
        return output.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


def pack(model: PreTrainedModel, num_threads: int) -> str:
    """Replace the linear layers of a float32 model on the CPU; what products it uses from now on: "packed" or "torch".

    The originals are dropped, but for weights that are tied to an embedding.
    """
    if model.device.type != "cpu" or model.dtype is not torch.float32 or not is_fast_here():
        return "torch"
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            packed = PackedLinear(module.weight, module.bias, num_threads)
        elif type(module) is Conv1D:  # as nn.Linear, transposed
            packed = PackedLinear(module.weight.T, module.bias, num_threads)
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed)
    return "packed"


def _aligned(*shape: int) -> torch.Tensor:
    """Uninitialised float32 that begins at a cache line."""
    count = int(torch.Size(shape).numel())
    spare = _ALIGNMENT // 4
    flat = torch.empty(count + spare)
    skip = (-flat.data_ptr() % _ALIGNMENT) // 4
    return flat[skip : skip + count].view(shape)
