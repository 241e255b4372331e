"""Linear layers of a model that is computed in float32 on the CPU, their weights packed for `packed_kernel`.

torch's own product reads weights at a third of the memory's speed when a batch has 2 to 32 rows, which is what decoding
does all the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandem.engine.cpu.packed_kernel import BY_TWO, PANEL, PRODUCTS, arranged_features
from tandem.engine.cpu.threads import run
from tandem.engine.cpu.vector_ir import is_fast_here
from tandem.engine.fuse.recognise import replace_modules
from tandem.engine.huge_pages import FLOAT_BYTES, weight_memory


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight as panels `[N / 32][K][32]`, zeros behind the last output.

    Args:
        weight: `[N, K]`, of a type that `PRODUCTS` has; copied.
        bias: `[N]`, or none.
        num_threads: CPU threads of one product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._panels = pack_weights(weight)
        self._products = PRODUCTS[self._panels.dtype]
        self._num_panels = self._panels.shape[0]
        self.padded_features = self._num_panels * PANEL
        self._bias = pack_biases(bias)
        self._num_threads = num_threads
        # Made once: asking a tensor for its address costs as much as a small product.
        self._weight_at = self._panels.data_ptr()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` float32 to `[..., N]`."""
        return self.padded(x)[..., : self.out_features]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, with all outputs of the last panel: `[..., 32 * panels]`, without gaps."""
        rows = as_rows(x)
        output = torch.empty(*x.shape[:-1], self.padded_features, dtype=torch.float32)
        arranged = torch.empty(len(rows), arranged_features(len(rows), self.in_features), dtype=torch.float32)
        stride = rows.stride(0) * FLOAT_BYTES
        run(
            self._num_threads,
            *self.calls(rows.data_ptr(), stride, len(rows), output.data_ptr(), arranged.data_ptr()),
        )
        return output

    def calls(self, x: int, x_stride: int, num_rows: int, output: int, arranged: int) -> tuple[bytes, ...]:
        """`padded` by address, for `run`; `x_stride` in bytes, `arranged` is memory as for `Products.arrange`."""
        products, num_in = self._products, self.in_features
        before, x, x_stride = products.arrange(x, x_stride, num_rows, num_in, arranged)
        product = products.multiply.call(
            self._num_panels, x, x_stride, num_rows, products.num_steps(num_in), self._weight_at, self._num_panels,
            self._bias_at, output,
        )  # fmt: skip
        return *before, product

    def multiply_by_two(self) -> None:
        """From now on multiply in bfloat16, if the weights are of that type and go by two."""
        if pair_up(self._panels):
            self._products = BY_TWO

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


def pack(model: PreTrainedModel, num_threads: int) -> str:
    """Replace the linear layers of a model on the CPU by such that compute in float32. Return which products it uses
    now: "packed" or "torch".

    The originals are dropped, but for weights that are tied to an embedding.
    """
    if not can_pack(model):
        return "torch"
    replace_modules(model, lambda module: _pack_layer(module, num_threads))
    return "packed"


def _pack_layer(module: Any, num_threads: int) -> PackedLinear | None:
    if type(module) is nn.Linear:
        return PackedLinear(module.weight, module.bias, num_threads)
    if type(module) is Conv1D:  # as nn.Linear, transposed
        return PackedLinear(module.weight.T, module.bias, num_threads)
    return None


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the CPU kernels can compute this model, in float32."""
    return model.device.type == "cpu" and model.dtype in PRODUCTS and is_fast_here()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., K]` as `[rows, K]`, each row without gaps."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def pack_weights(*weights: torch.Tensor) -> torch.Tensor:
    """`[N, K]` each, to `[panels][K][32]` of the same type; of several of one shape, a panel of each in turn."""
    num_out, num_in = weights[0].shape
    num_panels = -(-num_out // PANEL)
    panels = weight_memory.empty(num_panels, len(weights), num_in, PANEL, dtype=weights[0].dtype)
    for index, weight in enumerate(weights):
        rows = nn.functional.pad(weight.detach(), (0, 0, 0, num_panels * PANEL - num_out))
        panels[:, index].copy_(rows.view(num_panels, PANEL, num_in).transpose(1, 2))
    return panels.flatten(0, 1)


def pair_up(panels: torch.Tensor) -> bool:
    """Put the numbers of two steps together in place: from `[panels][K][32]` to `[panels][K / 2][32][2]`.

    Returns whether that was done: only bfloat16 goes by two, and K is to be even.
    """
    _, num_in, width = panels.shape
    if panels.dtype is not torch.bfloat16 or num_in % 2:
        return False
    for panel in panels:
        panel.copy_(panel.view(num_in // 2, 2, width).transpose(1, 2).reshape(num_in, width))
    return True


def pack_biases(*biases: torch.Tensor | None) -> torch.Tensor | None:
    """`[N]` each, as float32 in the order of `pack_weights`; none where there are none."""
    present = [bias.detach().float() for bias in biases if bias is not None]
    if len(present) < len(biases):
        if present:
            raise ValueError("either all matrices have a bias or none")
        return None
    padded = [nn.functional.pad(bias, (0, -len(bias) % PANEL)).view(-1, PANEL) for bias in present]
    return torch.stack(padded, dim=1).flatten()
