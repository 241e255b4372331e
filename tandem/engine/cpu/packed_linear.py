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

from tandem.engine.cpu.packed_kernel import PANEL, PRODUCTS, arranged_features
from tandem.engine.cpu.panels import Panels, Rounding
from tandem.engine.cpu.threads import run
from tandem.engine.cpu.vector_ir import is_fast_here
from tandem.engine.fuse.recognise import LINEAR, replace_modules
from tandem.engine.huge_pages import FLOAT_BYTES
from tandem.engine.quantized.stored_linear import StoredLinear


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` with the weight as panels `[N / PANEL][K][PANEL]`, zeros behind the last output.

    Args:
        weight: `[N, K]`, of a type that `PRODUCTS` has; copied.
        bias: `[N]`, or none.
        num_threads: CPU threads of one product.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.panels = Panels(weight)
        self.padded_features = self.panels.num * PANEL
        self._bias = pack_biases(bias)
        self._num_threads = num_threads
        # Made once: asking a tensor for its address costs as much as a small product.
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    @property
    def weight(self) -> torch.Tensor:
        """`[N, K]` float32, for code that asks for the type or the shape of a layer's weight: it holds no number."""
        return torch.full((), torch.nan).expand(self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K]` float32 to `[..., N]`."""
        return self.padded(x)[..., : self.out_features]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, with all outputs of the last panel: `[..., PANEL * panels]`, without gaps."""
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
        panels, products = self.panels, self.panels.products
        before, x, x_stride = products.arrange(x, x_stride, num_rows, self.in_features, arranged)
        product = products.multiply.call(
            panels.num, x, x_stride, num_rows, panels.num_steps, panels.address, panels.num, self._bias_at, output,
            panels.scales_at, panels.group,
        )  # fmt: skip
        return *before, product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._bias is not None}"


def rounding_of(module: nn.Module, asked: Rounding | None) -> Rounding | None:
    """To what the weights of a part are rounded: to what was asked for all, or to what holds those of a checkpoint that
    comes quantised."""
    if asked is not None:
        return asked
    stored = next((part for part in module.modules() if isinstance(part, StoredLinear)), None)
    if stored is None:
        return None
    scheme = stored.scheme
    return Rounding(4, scheme.group_size, is_exact=True) if scheme.kept_as == "int4" else Rounding(8)


def pack(model: PreTrainedModel, num_threads: int, asked: Rounding | None = None) -> str:
    """Replace the linear layers of a model on the CPU by such that compute in float32. Return which products it uses
    now: "packed" or "torch".

    The originals are dropped, but for weights that are tied to an embedding.

    Args:
        asked: see `rounding_of`.
    """
    if not can_pack(model):
        return "torch"
    replace_modules(model, lambda module: _pack_layer(module, num_threads, asked))
    return "packed"


def _pack_layer(module: Any, num_threads: int, asked: Rounding | None) -> PackedLinear | None:
    if type(module) in LINEAR:
        packed = PackedLinear(module.weight, module.bias, num_threads)
    elif type(module) is Conv1D:  # as nn.Linear, transposed
        packed = PackedLinear(module.weight.T, module.bias, num_threads)
    else:
        return None
    if (rounding := rounding_of(module, asked)) is not None:
        packed.panels.quantize(rounding)
    return packed


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the CPU kernels can compute this model, in float32."""
    return model.device.type == "cpu" and model.dtype in PRODUCTS and is_fast_here()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., K]` as `[rows, K]`, each row without gaps."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def pack_biases(*biases: torch.Tensor | None) -> torch.Tensor | None:
    """`[N]` each, as float32 in the order of `Panels`; none where there are none."""
    present = [bias.detach().float() for bias in biases if bias is not None]
    if len(present) < len(biases):
        if present:
            raise ValueError("either all matrices have a bias or none")
        return None
    padded = [nn.functional.pad(bias, (0, -len(bias) % PANEL)).view(-1, PANEL) for bias in present]
    return torch.stack(padded, dim=1).flatten()
