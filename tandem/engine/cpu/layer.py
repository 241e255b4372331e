"""Decoder layers as programs of kernels.

A call of a kernel from Python takes 20 to 40 µs, and may first wait for Python's lock. So all kernels of a decode step
are one program. The program is cut only where other code must run in between: a callback that hears of a layer's K and
V, or another kind of attention. It is also cut behind each layer of a prompt, because threads may be lent meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tandem.engine.attention.interface import ForwardContext, begin_layer, current_forward
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.cpu.layer_kernels import ROWS_FOR_THREADS, add_rows, gather_rows
from tandem.engine.cpu.lending import threads_now
from tandem.engine.cpu.modules import FusedAttention, FusedGatedMLP, FusedRMSNorm
from tandem.engine.cpu.packed_kernel import arranged_features
from tandem.engine.cpu.threads import run
from tandem.engine.huge_pages import FLOAT_BYTES, LINE_BYTES, map_memory


class Workspace:
    """Memory for what lies between the kernels of a layer, as large as the largest batch needed.

    The layers of one model share it: each begins with the sums of the layer before, and uses the rest for itself.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.address = 0

    def reserve(self, num_bytes: int) -> int:
        """Make it at least `num_bytes` long; return its address, at a cache line. Growing moves and empties it."""
        if num_bytes > len(self._memory):
            # The old memory is freed first. Should there be no new one, no plan fits this address any more.
            self._memory, self.address = torch.empty(0, dtype=torch.uint8), 0
            self._memory = map_memory(num_bytes)
            self.address = self._memory.data_ptr()
        return self.address

    def view(self, address: int, *shape: int) -> torch.Tensor:
        """The float32 numbers from one of its addresses on, as a tensor."""
        begin = address - self.address
        num_bytes = math.prod(shape) * FLOAT_BYTES
        return self._memory[begin : begin + num_bytes].view(torch.float32).view(shape)


@dataclass(frozen=True, slots=True)
class _Plan:
    """For one number of rows: addresses of `[num_rows, features]` in the workspace, and the calls that need only these.

    Each is without gaps; heads and added are as wide as padded products. No rows: nothing is planned.
    """

    num_rows: int = 0
    sums: int = 0  # of input, attention and MLP; where the workspace begins
    normed: int = 0
    added: int = 0  # what is to be added to the sums
    heads: int = 0  # queries, keys and values
    query: int = 0
    attended: int = 0
    normalize_sums: bytes = b""
    project_heads: tuple[bytes, ...] = ()
    project_attended: tuple[bytes, ...] = ()
    add_to_sums: bytes = b""
    mlp: tuple[bytes, ...] = ()  # from sums to added


@dataclass(frozen=True, slots=True)
class Tail:
    """Of the last layer, the rows that have logits: what comes behind its K and V is of no use for the others."""

    plan: _Plan
    rows: torch.Tensor  # `[R]` int64: which they are

    @property
    def sums(self) -> int:
        """Address of what comes out, `[R, hidden_size]`."""
        return self.plan.sums


class FusedDecoderLayer(nn.Module):
    """`h = x + attention(attention_norm(x))`, then `h + mlp(mlp_norm(h))`; float32.

    Args:
        workspace: of all layers of one model.
        num_threads: CPU threads of one layer.
    """

    def __init__(
        self,
        attention_norm: FusedRMSNorm,
        attention: FusedAttention,
        mlp_norm: FusedRMSNorm,
        mlp: FusedGatedMLP,
        workspace: Workspace,
        num_threads: int,
    ) -> None:
        super().__init__()
        self.attention_norm, self.self_attn, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp
        # The same again, because `nn.Module` takes long to find its children.
        self._parts = attention_norm, attention, mlp_norm, mlp
        self.workspace = workspace
        self.num_threads = num_threads
        self._width = attention_norm.width
        self._added_stride = attention.o_proj.padded_features * FLOAT_BYTES
        self._plan = self._tail_plan = _Plan()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, T, hidden_size]` to memory of its own, of the same shape."""
        context = current_forward.get()
        self._parts[1].check_shapes(context.batch, hidden_states, position_embeddings)
        x, cos, sin = (part.contiguous() for part in (hidden_states, *position_embeddings))
        output = torch.empty_like(x)
        plan_layers([self], context.batch.num_tokens)
        program = Program(self.num_threads)
        compute_layers(
            program, [self], (cos.data_ptr(), sin.data_ptr()), num_threads=threads_now(self.num_threads),
            x=x.data_ptr(), output=output.data_ptr(), attention_mask=attention_mask, **kwargs,
        )  # fmt: skip
        program.run()
        return output

    def begin(self, context: ForwardContext, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> int:
        """The layer's number. Raises `UnsupportedModelError` for what the attention does not do."""
        return begin_layer(context, self._parts[1], attention_mask, 0.0, None, kwargs)

    def is_planned(self, num_rows: int) -> bool:
        return self._plan.num_rows == num_rows and self._plan.sums == self.workspace.address

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of the workspace that so many rows need."""
        return max(places[-1] for places in self._lay_out(0, num_rows))

    def forget_plan(self) -> None:
        """The parts are no longer what they were when it was made."""
        self._plan = self._tail_plan = _Plan()

    def plan(self, num_rows: int) -> None:
        """Prepare for so many rows, in a workspace that has room for them."""
        self._plan = self._make_plan(self.workspace.address, num_rows)

    def until_written(
        self, context: ForwardContext, layer: int, x: int | None, rotary: tuple[int, int]
    ) -> tuple[bytes, ...]:
        """Calls from the input `x`, or else from the sums, to K and V in the arena and queries; `rotary` by address."""
        attention_norm, attention, _, _ = self._parts
        plan = self._plan
        norm = plan.normalize_sums if x is None else attention_norm.call(x, plan.num_rows, plan.normed)
        return norm, *plan.project_heads, attention.call(context, layer, plan.heads, *rotary, plan.query)

    def plan_tail(self, workspace: Workspace, rows: torch.Tensor) -> Tail:
        """Prepare to go on with these of the rows that are planned, in memory that is only for them."""
        address, num_rows = workspace.reserve(self.num_bytes(len(rows))), len(rows)
        if (self._tail_plan.num_rows, self._tail_plan.sums) != (num_rows, address):
            self._tail_plan = self._make_plan(address, num_rows)
        return Tail(self._tail_plan, rows)

    def until_tail(self, tail: Tail, *, has_attended: bool) -> tuple[bytes, ...]:
        """Calls that take sums of all rows, and queries or what these have attended to, to the tail."""
        begin, end, rows = self._plan, tail.plan, tail.rows.data_ptr()
        source, target = (begin.attended, end.attended) if has_attended else (begin.query, end.query)
        return (
            gather_rows.call(end.num_rows, begin.sums, self._width, rows, end.sums),
            gather_rows.call(end.num_rows, source, self._parts[1].o_proj.in_features, rows, target),
        )

    def attend(
        self, context: ForwardContext, backend: CPUAttention, layer: int, num_threads: int, tail: Tail | None
    ) -> bytes:
        """The call from queries to what they attend to."""
        attention, plan = self._parts[1], self._plan if tail is None else tail.plan
        batch, in_arena = context.at(layer, attention.params)
        return backend.call(
            batch, context.arena, in_arena, attention.params, attention.num_heads, plan.query, plan.attended,
            num_threads, of_logits=tail is not None,
        )  # fmt: skip

    def attend_apart(self, context: ForwardContext, layer: int) -> None:
        """As `attend`, but computed at once, by a backend that takes tensors."""
        attention, plan = self._parts[1], self._plan
        shape = plan.num_rows, attention.num_heads, context.arena.layout.head_dim
        query, attended = (self.workspace.view(place, *shape) for place in (plan.query, plan.attended))
        batch, in_arena = context.at(layer, attention.params)
        attended.copy_(context.backend.attend(batch, context.arena, in_arena, query, attention.params))

    def from_attended(self, x: int | None, output: int | None, tail: Tail | None) -> Iterable[bytes]:
        """Calls from what was attended to the output, or else to the sums."""
        plan = self._plan if tail is None else tail.plan
        yield from plan.project_attended
        yield plan.add_to_sums if x is None else self._add(plan, x, plan.sums)
        yield from plan.mlp
        yield plan.add_to_sums if output is None else self._add(plan, plan.sums, output)

    def _add(self, plan: _Plan, x: int, output: int) -> bytes:
        return add_rows.call(plan.num_rows, x, plan.added, self._added_stride, self._width, output)

    def _lay_out(self, begin: int, num_rows: int) -> tuple[list[int], list[int], list[int]]:
        """Places of sums, normed, added, arranged; of heads, query, attended; of the MLP's both and inner.

        Each with its end.
        """
        _, attention, _, mlp = self._parts
        query_features = attention.o_proj.in_features
        arranged = arranged_features(num_rows, max(self._width, query_features, mlp.inner_features))
        kept = _lay_out(begin, num_rows, self._width, self._width, attention.o_proj.padded_features, arranged)
        of_attention = _lay_out(kept[-1], num_rows, attention.qkv.padded_features, query_features, query_features)
        # In the place of the attention's, which are not needed any more by then.
        of_mlp = _lay_out(kept[-1], num_rows, mlp.both_features, mlp.inner_features)
        return kept, of_attention, of_mlp

    def _make_plan(self, begin: int, num_rows: int) -> _Plan:
        attention_norm, attention, mlp_norm, mlp = self._parts
        (sums, normed, added, arranged, _), (heads, query, attended, _), (both, inner, _) = self._lay_out(
            begin, num_rows
        )
        row_bytes, query_bytes = self._width * FLOAT_BYTES, attention.o_proj.in_features * FLOAT_BYTES
        return _Plan(
            num_rows, sums, normed, added, heads, query, attended,
            normalize_sums=attention_norm.call(sums, num_rows, normed),
            project_heads=attention.qkv.calls(normed, row_bytes, num_rows, heads, arranged),
            project_attended=attention.o_proj.calls(attended, query_bytes, num_rows, added, arranged),
            add_to_sums=add_rows.call(num_rows, sums, added, self._added_stride, self._width, sums),
            mlp=(
                mlp_norm.call(sums, num_rows, normed),
                *mlp.calls(normed, row_bytes, num_rows, both, inner, arranged),
                *mlp.down.calls(inner, mlp.inner_features * FLOAT_BYTES, num_rows, added, arranged),
            ),
        )  # fmt: skip


def _lay_out(begin: int, num_rows: int, *features: int) -> list[int]:
    """Where arrays `[num_rows, features]` lie behind one another, each at a cache line; and the end of the last."""
    sizes = (-(-num_rows * count * FLOAT_BYTES // LINE_BYTES) * LINE_BYTES for count in features)
    return list(itertools.accumulate(sizes, initial=begin))


def plan_layers(layers: Sequence[FusedDecoderLayer], num_rows: int) -> int:
    """Prepare layers of one workspace for so many rows; address of the sums, `[num_rows, hidden_size]`."""
    workspace = layers[0].workspace
    if not all(layer.is_planned(num_rows) for layer in layers):
        workspace.reserve(max(layer.num_bytes(num_rows) for layer in layers))
        for layer in layers:
            layer.plan(num_rows)
    return workspace.address


def compute_layers(
    program: Program,
    layers: Sequence[FusedDecoderLayer],
    rotary: tuple[int, int],
    *,
    num_threads: int,
    x: int | None = None,
    output: int | None = None,
    attention_mask: torch.Tensor | None = None,
    tail: Tail | None = None,
    **kwargs: Any,
) -> None:
    """Add to `program` layers that are planned, one after the other, for the running forward.

    Where other code must run in between, this runs what has been added so far. The caller runs the calls that are left.

    Args:
        rotary: addresses of cosines and sines, `[T, rotary_dim]`.
        num_threads: for how many the attention is cut.
        x, output: addresses of `[T, hidden_size]`; by default the sums.
        tail: of the last layer, only these rows go on behind K and V, from sums to sums.
        attention_mask, kwargs: what else the model asks of the attention; none of it may have an effect.
    """
    context = current_forward.get()
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        number = layer.begin(context, attention_mask, kwargs)
        begin, end = x if index == 0 else None, output if index == last else None
        program.add(layer.until_written(context, number, begin, rotary))
        if context.layer_written is not None:
            program.run()
            context.layer_written(number)
        with_logits = tail if index == last else None
        if with_logits is not None and not len(with_logits.rows):
            return
        if isinstance(context.backend, CPUAttention):
            if with_logits is not None:
                program.add(layer.until_tail(with_logits, has_attended=False))
            program.add([layer.attend(context, context.backend, number, num_threads, with_logits)])
        else:
            program.run()
            layer.attend_apart(context, number)
            if with_logits is not None:
                program.add(layer.until_tail(with_logits, has_attended=True))
        program.add(layer.from_attended(begin, end, with_logits))
        if context.batch.num_tokens >= ROWS_FOR_THREADS:  # a layer takes so long that lent threads may come or go
            program.run()


class Program:
    """Calls that wait to be run."""

    def __init__(self, own_threads: int) -> None:
        self.calls: list[bytes] = []
        self._own_threads = own_threads

    def add(self, calls: Iterable[bytes]) -> None:
        self.calls += calls

    def run(self) -> None:
        if self.calls:
            run(self._own_threads, *self.calls)
        self.calls.clear()
