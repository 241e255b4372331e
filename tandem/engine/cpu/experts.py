"""Mixtures of experts on the CPU: the rows of each expert together, through packed weights.

What `transformers` has computes rows differently by how many share an expert; here a row's result depends on nothing
but the row. All products of a layer are one program of kernels. Weights stay in the type of their checkpoint.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tandem.engine.cpu.experts_kernel import gate_clamped, sum_experts
from tandem.engine.cpu.layer_kernels import LANES
from tandem.engine.cpu.packed_kernel import PANEL, arranged_features
from tandem.engine.cpu.packed_linear import PackedLinear, can_pack, pack_biases
from tandem.engine.cpu.panels import Panels, Rounding
from tandem.engine.cpu.threads import run
from tandem.engine.fuse.recognise import LINEAR, replace_modules
from tandem.engine.fuse.trial import NUM_ROW_SCALES, attempted, proved, random, same_rows, scale_rows
from tandem.engine.huge_pages import FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Silu:
    """Gating as most have it."""

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Clamped:
    """Gating as gpt-oss has it: `gate * sigmoid(alpha * gate) * (up + 1)`, both clamped at `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


class PackedExpert:
    """`down(act(gate(x), up(x)))`, gate and up as one product.

    Args:
        gate, up, down: `[I, H]`, `[I, H]`, `[H, I]`, of one type that `PRODUCTS` has; copied.
        biases: of the three, or none.
        gating: as `act`.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        gating: Silu | Clamped,
    ) -> None:
        self.both, self.down, self._gating = Panels(gate, up), Panels(down), gating
        self._both_bias = pack_biases(*biases[:2]) if biases else None
        self._down_bias = pack_biases(biases[2]) if biases else None
        self._both_bias_at, self._down_bias_at = (
            0 if bias is None else bias.data_ptr() for bias in (self._both_bias, self._down_bias)
        )
        self._hidden, self._inner = gate.shape[1], down.shape[1]

    def calls(self, x: int, num_rows: int, both: int, inner: int, arranged: int, output: int) -> Iterator[bytes]:
        """By address, for `run`: `[num_rows, H]` without gaps to `[num_rows, padded H]`.

        `both`, `inner` and `arranged` are memory, see `PackedExperts`.
        """
        panels, pairs = self.both, self.both.num // 2
        before, x, stride = panels.products.arrange(x, self._hidden * FLOAT_BYTES, num_rows, self._hidden, arranged)
        yield from before
        words = x, stride, num_rows, panels.num_steps, panels.address
        if isinstance(self._gating, Silu):
            yield panels.products.multiply_gated.call(
                pairs, *words, pairs, self._both_bias_at, both, panels.scales_at, panels.group, inner
            )
        else:
            yield panels.products.multiply.call(
                panels.num, *words, panels.num, self._both_bias_at, both, panels.scales_at, panels.group
            )
            yield gate_clamped.call(num_rows, both, pairs, self._gating.alpha, self._gating.limit, inner)
        panels = self.down
        before, x, stride = panels.products.arrange(inner, pairs * PANEL * FLOAT_BYTES, num_rows, self._inner, arranged)
        yield from before
        yield panels.products.multiply.call(
            panels.num, x, stride, num_rows, panels.num_steps, panels.address, panels.num, self._down_bias_at, output,
            panels.scales_at, panels.group,
        )  # fmt: skip


class PackedExperts(nn.Module):
    """The experts of a layer: for each row the weighted sum of what its own ones give."""

    def __init__(self, experts: list[PackedExpert], hidden: int, num_threads: int) -> None:
        super().__init__()
        self.experts = experts
        self._hidden, self._num_threads = hidden, num_threads
        first = experts[0]
        self._both_features, self._padded_hidden = first.both.num * PANEL, first.down.num * PANEL
        self._widest = max(hidden, self._both_features // 2)

    def panels(self) -> Iterator[Panels]:
        for expert in self.experts:
            yield expert.both
            yield expert.down

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T, H]` float32 to the same.

        Args:
            chosen: `[T, K]`, the experts of each row.
            weights: `[T, K]`, theirs.
        """
        num_rows, num_chosen = chosen.shape
        of_pairs = chosen.reshape(-1).numpy()
        order = np.argsort(of_pairs, kind="stable")  # pairs of a row and an expert, by expert
        counts = np.bincount(of_pairs, minlength=len(self.experts))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        rows = hidden_states.float()[torch.from_numpy(order // num_chosen)].contiguous()
        most = int(counts.max())
        both, inner, arranged, output = (
            torch.empty(size, dtype=torch.float32)
            for size in (
                most * self._both_features,
                most * self._both_features // 2,
                most * arranged_features(most, self._widest),
                len(order) * self._padded_hidden,
            )
        )
        memory = both.data_ptr(), inner.data_ptr(), arranged.data_ptr()
        calls: list[bytes] = []
        begin = 0
        for expert in np.flatnonzero(counts):
            count = int(counts[expert])
            x, y = rows.data_ptr() + begin * self._hidden * FLOAT_BYTES, output.data_ptr()
            place = y + begin * self._padded_hidden * FLOAT_BYTES
            calls += self.experts[expert].calls(x, count, *memory, place)
            begin += count
        shares, total = weights.float().contiguous(), torch.empty_like(rows[:1]).expand(num_rows, -1).contiguous()
        calls.append(sum_experts.call(
            num_rows, output.data_ptr(), self._padded_hidden, places.ctypes.data, shares.data_ptr(), num_chosen,
            self._hidden, total.data_ptr(),
        ))  # fmt: skip
        run(self._num_threads, *calls)
        return total


def pack_experts(model: PreTrainedModel, num_threads: int, asked: Rounding | None = None) -> int:
    """Replace the experts of a model on the CPU, and what chooses them; return of how many layers.

    What is not known stays as it is, and computes in float32.

    Args:
        asked: to what weights are rounded.
    """
    if not can_pack(model):
        return 0
    count = replace_modules(model, lambda module: _pack_layer(module, num_threads, asked))
    if count:
        replace_modules(model, lambda module: _pack_router(module, num_threads))
    return count


def _pack_layer(module: Any, num_threads: int, asked: Rounding | None) -> PackedExperts | None:
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and gate_up.dim() == down.dim() == 3):
        return None
    # What `transformers` says of experts that it can compute in several ways.
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", True):
        return None
    if any(len(parameter) != len(down) for parameter in module.parameters()):
        return None
    hidden = down.shape[2] if module.is_transposed else down.shape[1]
    gating = attempted(module, lambda: _gating_of(module))
    if gating is None or hidden % LANES:
        return None

    def make(part: Any) -> PackedExperts:
        experts = [_expert(part, index, gating) for index in range(len(part.down_proj))]
        return PackedExperts(experts, hidden, num_threads)

    rows = scale_rows(random(2 * NUM_ROW_SCALES, hidden))
    chosen = torch.arange(len(rows))[:, None].add(torch.tensor([0, 1])) % min(len(down), 2)
    weights = random(*chosen.shape).sigmoid()
    few = _with_few_experts(module)
    if proved(few, make, lambda part, _: [part(rows, chosen, weights)], torch.float32) is None:
        return None
    packed = make(module)
    if asked is not None:
        for panels in packed.panels():
            panels.quantize(asked)
    return packed


def _with_few_experts(module: Any) -> nn.Module:
    """The same with its first two experts alone, in float32: a copy of all would be as large as the layer."""
    few = copy.copy(module)
    parameters = {name: nn.Parameter(value[:2].float()) for name, value in module.named_parameters()}
    few.__dict__ |= {"_parameters": parameters, "num_experts": min(2, len(module.down_proj))}
    result: nn.Module = few
    return result


def _gating_of(module: Any) -> Silu | Clamped | None:
    """What its own gating gives on random numbers; `None` where it is another."""
    gate, up = scale_rows(random(2, NUM_ROW_SCALES, 8))
    both = torch.cat([gate, up], dim=1) if module.is_concatenated else torch.stack([gate, up], dim=2).flatten(1)
    found = module._apply_gate(both)
    known: list[Silu | Clamped] = [Silu()]
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        known.append(Clamped(alpha, limit))
    return next((gating for gating in known if same_rows(found, gating(gate, up))), None)


def _expert(module: Any, index: int, gating: Silu | Clamped) -> PackedExpert:
    both, down = module.gate_up_proj[index], module.down_proj[index]
    if module.is_transposed:
        both, down = both.T, down.T
    biases = None
    if module.has_bias:
        biases = (*_halves(module, module.gate_up_proj_bias[index]), module.down_proj_bias[index])
    return PackedExpert(*_halves(module, both), down, biases, gating)


def _halves(module: Any, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, which lie behind one another or in turn."""
    if module.is_concatenated:
        return both[: len(both) // 2], both[len(both) // 2 :]
    return both[::2], both[1::2]


#: By which a router may make float32 of its weight.
_CONVERSIONS = (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type)


class _PackedProduct(TorchFunctionMode):
    """Computes `linear` with a router's weight and bias by a packed layer."""

    def __init__(self, router: Any, packed: PackedLinear) -> None:
        super().__init__()
        self._weight, self._bias, self._packed = router.weight, getattr(router, "bias", None), packed
        self.num_products = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _CONVERSIONS and args[0] is self._weight:
            return self._weight  # it is widened as it is multiplied
        kwargs = kwargs or {}
        if function is nn.functional.linear and len(args) > 1 and args[1] is self._weight:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if bias is self._bias:
                self.num_products += 1
                return self._packed(args[0].float())
        return function(*args, **kwargs)


class PackedRouter(nn.Module):
    """Chooses experts as the original does, by a product in which a row does not depend on the others."""

    def __init__(self, original: Any, num_threads: int) -> None:
        super().__init__()
        self.original = original
        self._packed = PackedLinear(original.weight, getattr(original, "bias", None), num_threads)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _PackedProduct(self.original, self._packed):
            return self.original(*args, **kwargs)

    def multiplies(self, hidden_states: torch.Tensor) -> bool:
        """Whether the original's only product is this one. What else it wants is one number for each expert."""
        parameters = inspect.signature(self.original.forward).parameters.values()
        wanted = [part for part in parameters if part.default is part.empty and part.kind is part.POSITIONAL_OR_KEYWORD]
        others = torch.zeros(len(wanted) - 1, len(self.original.weight))
        with torch.inference_mode(), _PackedProduct(self.original, self._packed) as mode:
            self.original(hidden_states, *others)
        return bool(mode.num_products == 1)


def _pack_router(module: Any, num_threads: int) -> PackedRouter | None:
    own = dict(module.named_parameters(recurse=False))
    weight, bias = own.get("weight"), own.get("bias")
    if type(module) in LINEAR or isinstance(module, nn.Embedding) or weight is None or weight.dim() != 2:
        return None
    if bias is not None and bias.shape != weight.shape[:1]:
        return None
    packed = PackedRouter(module, num_threads)
    rows = random(NUM_ROW_SCALES, weight.shape[1])
    return packed if attempted(module, lambda: packed.multiplies(rows)) else None
