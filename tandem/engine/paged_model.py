"""A `transformers` model over an arena: one forward of a ragged batch."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from tandem.core.errors import UnsupportedModelError
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend, ForwardContext, current_forward
from tandem.engine.batch import PagedBatch, SequenceInput, build_batch, check_sequence
from tandem.engine.block_tables import BlockTables
from tandem.engine.device import current
from tandem.engine.layer_places import LayerPlaces

LayerCallback = Callable[[int], None]


class Decoder(Protocol):
    """Computes logits in a model's place."""

    def logits(self, batch: PagedBatch) -> torch.Tensor:
        """`[R, vocab]`, of the model's type or float32, for the rows `batch.logit_rows` of the running forward."""
        ...


class PagedModel:
    """Runs batches of one model over one arena. Not for several threads at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        arena: KVArena,
        backend: AttentionBackend,
        vocab_size: int,
        max_context: int,
        *,
        num_pages: int | None = None,
        window: int = 0,
        decoder: Decoder | None = None,
        places: LayerPlaces | None = None,
    ) -> None:
        """Sequences may have the pages `[0, num_pages)`, by default all of the arena. `window`: as of `Engine`, 0 for a
        mixed model; that has `places`.

        `decoder` is to compute the logits in the model's place.
        """
        self.model = model
        self.arena = arena
        self.backend = backend
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.num_pages = arena.num_pages if num_pages is None else num_pages
        self.window = window
        self.decoder = decoder
        self.places = places
        self._num_windowed = places.num_windowed if places is not None else 0
        self._limit = min(max_context, self.table_width * arena.layout.page_size)
        self.tables = BlockTables(
            self.table_width, self.num_pages, num_windowed=self._num_windowed, device=arena.device
        )
        # Models differ in what they do after the last layer (head bias, soft capping, scaling): all of it is theirs,
        # on the rows that are asked for.
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def table_width(self) -> int:
        """Pages in the table of the longest sequence; with a window it may be longer than the arena has pages."""
        num_pages = self.arena.layout.num_pages_for(self.max_context)
        return num_pages if self.window else min(num_pages, self.arena.num_pages)

    def forward(self, sequences: Sequence[SequenceInput], on_layer: LayerCallback | None = None) -> torch.Tensor:
        """Compute all `sequences` in one batch; see `Engine.forward`."""
        self.check(sequences)
        with current(self.arena.device):
            batch = build_batch(sequences, self.arena.layout.page_size, self.arena.device, self.tables)
            return self.compute(batch, on_layer).float()

    def check(self, sequences: Sequence[SequenceInput]) -> None:
        """Raise `ValueError` for a batch that is empty or fails `check_sequence`."""
        if not sequences:
            raise ValueError("an empty batch")
        for sequence in sequences:
            check_sequence(sequence, self.arena.layout, self.vocab_size, self._limit, self._num_windowed)

    def compute(self, batch: PagedBatch, on_layer: LayerCallback | None = None) -> torch.Tensor:
        """Compute a batch that is checked and laid out; `[logit_rows, vocab]` in the model's type or float32."""
        if on_layer is not None and self.places is not None:
            on_layer = self.places.completed(on_layer)
        notifier = _notifier(on_layer, self.arena.device)
        context = ForwardContext(batch, self.arena, self.backend, notifier, places=self.places)
        token = current_forward.set(context)
        try:
            with torch.inference_mode():
                if self.decoder is None:
                    logits = self._logits(batch.token_ids, batch.positions, batch.logit_rows)
                else:
                    logits = self.decoder.logits(batch)
        finally:
            current_forward.reset(token)
        if isinstance(notifier, _DeviceLayers):
            notifier.finish()
        self._check_layers(context)
        return logits

    def _logits(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self._selects_rows:
            output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
            logits: torch.Tensor = output.logits[0]
        else:
            output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False)
            logits = output.logits[0][rows]
        return logits

    def _check_layers(self, context: ForwardContext) -> None:
        # A layer that never came keeps no KV here: whatever it remembers is not in the pages.
        missing = sorted(set(range(context.num_layers)) - set(context.layers))
        if missing:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: layers {missing} do not use the attention interface"
            )


def _notifier(on_layer: LayerCallback | None, device: torch.device) -> LayerCallback | None:
    if on_layer is None or device.type == "cpu":
        return on_layer
    return _DeviceLayers(on_layer)


class _DeviceLayers:
    """Tells of a layer when the device has really written it, without waiting for the device in between."""

    def __init__(self, on_layer: LayerCallback) -> None:
        self._on_layer = on_layer
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()

    def __call__(self, layer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._pending.append((layer, event))
        while self._pending and self._pending[0][1].query():
            self._on_layer(self._pending.popleft()[0])

    def finish(self) -> None:
        """Wait for the layers that are left and tell of them."""
        while self._pending:
            layer, event = self._pending.popleft()
            event.synchronize()
            self._on_layer(layer)
