"""The engine: a model, its KV arena, and forwards of ragged batches over pages."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tandem.core.errors import ConfigError
from tandem.core.model_path import tensors_dtype
from tandem.core.pages import page_table
from tandem.core.pooling import Pooling, read_pooling
from tandem.core.version import version
from tandem.core.windows import Windows, kept_windows
from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.batch import SequenceInput
from tandem.engine.cuda.decode_step import DecodeBackend
from tandem.engine.cuda.graphs import CudaCapture, DecodeGraphs
from tandem.engine.fuse.small_model import has_sinks
from tandem.engine.kernels import DecodeSteps, Kernels, SharedWeights, TakeDigests
from tandem.engine.layer_places import LayerPlaces, layer_places
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.paged_model import PagedModel
from tandem.engine.probe import probe_architecture
from tandem.engine.quantized.loading import plain, scheme_of
from tandem.engine.rope import settle_rope
from tandem.engine.sampler import Sampler
from tandem.engine.select_kernels import kernels_for
from tandem.engine.torch_kernels import TorchKernels

__all__ = ["Engine", "SequenceInput"]

_log = logging.getLogger(__name__)

#: KV memory when neither pages nor bytes are configured: at most this on the CPU, and a quarter of what is free.
_DEFAULT_CPU_KV_BYTES = 1 << 30
#: The same on a GPU, of what is free after the weights.
_DEFAULT_DEVICE_KV_SHARE = 0.8


class Engine:
    """Computes logits of ragged batches; holds the KV of all sequences in pages that its caller accounts for.

    `forward` may be called from any one thread at a time.

    Attributes:
        layout: the shape of a page.
        arena: all pages.
        num_pages: sequences may have the pages `[0, num_pages)`; a page beyond them is the engine's own.
        vocab_size: token ids are `[0, vocab_size)`.
        eos_token_ids: the ids that end a text.
        max_context: greatest number of tokens of a sequence, prompt and output.
        windows: of its layers.
        window: a token sees so many tokens at most in every layer, itself included; 0: all, in some layer. Pages
            wholly behind that may be another's, if they are of the arena. Of a mixed model: in layers with a window.
        places: of a mixed model (`tandem.core.layer_groups`), where its layers have their pages; `None`: it is none, or
            keeps all its pages.
        num_windowed: of a mixed model the pages of a place for layers with a window; else 0.
        weights_sha256: of all that shapes KV; workers that differ in it must not share pages.
        types: of weights, and of what is computed; that of KV in the pages is the layout's.
        shared: the memory in which other processes have the weights too; `None`: these are its own.
        attention: name of the attention kernel in use.
        fused: how many parts of which kind are replaced by fused ones, and whether the decoder is; for people.
        linear: whose products of linear layers are in use: "packed", "packed by two", "packed in tiles", "packed int8",
            "packed int4", these two "by two" and "in tiles" too, or "torch".
        pooling: how the checkpoint pools; `None`: it generates.
        on_cpu: whether it computes on the CPU.
        computes_apart: whether `forward` returns when a step is launched: the host has time until it is computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        make_arena: Callable[[], KVArena],
        backend: AttentionBackend,
        eos_token_ids: tuple[int, ...],
        max_context: int,
        kernels: Kernels,
        pooling: Pooling | None = None,
        types: Types | None = None,
        weight_register: Path | None = None,
        places: LayerPlaces | None = None,
    ) -> None:
        """`make_arena` is called when the weights are as they stay: what was needed on the way there is free again.
        `backend` is of `kernels`. `types` are by default all that of the layout. `weight_register`: as of `load`.
        `layout` has all layers of the model; with `places` it is mixed, and the arena has as many as these say.
        """
        self.layout = _layout_of_pages(layout, places)
        self.places = places
        self.pooling = pooling
        self.vocab_size = loader.vocab_size_of(model)
        self.eos_token_ids = eos_token_ids
        self.max_context = max_context
        self.windows = loader.windows_of(model.config)
        self.window = _window(self.windows, max_context, model.device) if places is None else places.window
        self.num_windowed = places.num_windowed if places is not None else 0
        self.types = types = types or Types.all_of(layout.dtype)
        self.weights_sha256 = loader.weights_sha256(model, types)
        self.attention = backend.name
        self.on_cpu = model.device.type == "cpu"
        self.computes_apart = not self.on_cpu
        fused = kernels.fuse(model, layout, types)
        self.fused, self.linear = fused.parts, fused.linear
        self.shared: SharedWeights | None = None
        if self.linear != "torch" and weight_register is not None:
            name = f"{self.weights_sha256} {types.stored} {self.linear} {version()}"
            self.shared = kernels.share(model, weight_register, name)
        self._decoder = kernels.decoder(model, layout, max_context)
        if self._decoder is not None:
            self.fused += ", decoder"
        self.arena = arena = make_arena()
        # On a GPU the last page is what the padding of captured decode steps writes to.
        self._has_scratch_page = _has_scratch_page(backend, arena.device)
        self.num_pages = arena.num_pages - self._has_scratch_page
        self._model = model
        self._backend = backend
        self._kernels = kernels
        self._paged = PagedModel(
            model,
            arena,
            backend,
            self.vocab_size,
            max_context,
            num_pages=self.num_pages,
            window=0 if places is not None else self.window,
            decoder=self._decoder,
            places=places,
        )
        self._decode: DecodeSteps | None = kernels.decode_steps(self._paged, backend)

    @classmethod
    def load(
        cls,
        model_dir: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        cache_dtype: str = "auto",
        quantize: str = "none",
        page_size: int = 32,
        num_pages: int | None = None,
        kv_bytes: int | None = None,
        num_threads: int | None = None,
        device: str = "cpu",
        max_context: int | None = None,
        weight_register: Path | None = None,
        kernels: str = "auto",
        probe: bool = True,
        mixed: bool = False,
        attention_first: bool = False,
    ) -> Engine:
        """Load a checkpoint and make its arena.

        Args:
            model_dir: a directory in the Hugging Face layout.
            dtype: of weights, computation and KV; "auto" is the checkpoint's own. On a CPU, see `loader.choose_types`.
            cache_dtype: of K and V in the pages; "auto": see `loader.choose_kv_dtype`.
            quantize: "int8" or "int4": weights of linear layers are rounded to so many bits, on a CPU.
            page_size: token slots of a page.
            num_pages, kv_bytes: pages for sequences, or the greatest size of the arena; by default from the memory
                that is free.
            num_threads: CPU threads of a forward; by default all that this process may use.
            device: "cpu", "cuda" or "cuda:N".
            max_context: a limit below the model's own, in tokens.
            weight_register: a file through which the processes of this host that serve the same weights on its CPUs
                keep one copy of them in memory; `None`: this one has its own.
            kernels: "auto": those made for the device; "vectors": on a CPU these without tiles; "torch": operations of
                torch alone.
            probe: whether to refuse architectures that paged batches would change.
            mixed: whether a model of which some layers have a window, and some see all, has pages for each kind, on a
                CPU: then its sequences have two tables. Else they have one, and keep all pages.
            attention_first: whether to compile attention and sampling before products of weights, where that is to be
                done once a host. Of two processes that start together and take them in turns, each compiles half.

        Raises:
            ModelLoadError: the directory is no checkpoint, or weights are missing.
            UnsupportedModelError: the architecture fails the probe; says why.
            ConfigError: an argument is wrong.
        """
        target = _device(device)
        threads = _set_threads(num_threads)
        own = kernels_for(target, threads, kernels)
        config, pooling = loader.load_config(model_dir), read_pooling(Path(model_dir))
        scheme = scheme_of(config)
        types = loader.choose_types(
            dtype,
            config,
            target,
            tensors=_tensors_dtype(Path(model_dir), own),
            quantize=quantize,
            kept_as=scheme.kept_as if scheme is not None else "",
            can_widen=own.can_widen,
            short_products=own.short_products,
        )
        layout = loader.derive_layout(config, page_size, loader.choose_kv_dtype(cache_dtype, types, target))
        context = loader.context_of(config, max_context)
        if attention_first:
            own.compile_attention(layout, types)
        if probe:
            # The small copy runs on the CPU; a GPU's machine need not have what compiles kernels for that.
            probe_architecture(plain(config), own if target.type == "cpu" else TorchKernels())
        sinks = target.type == "cuda" and has_sinks(plain(config))
        backend = own.attention(layout, types, sinks)
        model = loader.load_stored(model_dir, config, types, target, pooling)
        if rope := settle_rope(model, context):
            _log.info("%s: %s", model_dir, rope)
        num_scratch = int(_has_scratch_page(backend, target))
        # A GPU's captured decode steps have one block table for all layers.
        places = layer_places(config, context) if mixed and target.type == "cpu" else None
        of_pages = _layout_of_pages(layout, places)

        def make_arena() -> KVArena:
            return KVArena(of_pages, _count_pages(of_pages, num_pages, kv_bytes, target, num_scratch), target)

        eos = loader.eos_of(model_dir, config)
        engine = cls(model, layout, make_arena, backend, eos, context, own, pooling, types, weight_register, places)
        _log.info(
            "loaded %s as %s (weights %s, products of %s) on %s: %d pages of %d slots in %s (%d bytes), %s attention, "
            "%s linear layers, fused: %s; %d threads%s",
            model_dir,
            types.computed,
            types.stored,
            types.multiplied,
            target,
            engine.num_pages,
            page_size,
            layout.dtype,
            engine.arena.num_bytes,
            engine.attention,
            engine.linear,
            engine.fused,
            threads,
            engine.shared.describe() if engine.shared is not None else "",
        )
        return engine

    def forward(
        self, sequences: Sequence[SequenceInput], on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Compute the tokens of all sequences in one batch, writing their K and V into their pages.

        `on_layer(layer)` is called, in this thread, as soon as the K and V of that layer lie in the arena for every
        token of this batch, while later layers are still to come. It must not raise and should be short.

        Returns the logits as float32 `[sum of num_logits, vocab_size]`, in the order of the sequences, on the
        engine's device; of a checkpoint that pools, hidden states or scores, `[sum of num_logits, N]`. The
        next forward may write over them.

        Raises `ValueError` for a sequence that is outside of its pages, the context or the vocabulary; nothing has
        been written then.
        """
        if self._decode is not None and on_layer is None and self._decode.takes(sequences):
            return self._decode.forward(sequences)
        return self._paged.forward(sequences, on_layer)

    def sampler(self) -> Sampler:
        """What chooses tokens from its logits, on its device."""
        return self._kernels.sampler(self.eos_token_ids)

    def device_digests(self) -> TakeDigests | None:
        """What takes digests of its pages on its device; `None`: read them (`arena.extent_view`)."""
        return self._kernels.digests(self.arena)

    def finish(self) -> None:
        """Wait until all that `forward` has begun lies in the pages. On a CPU it does as soon as it returns."""
        if self.arena.device.type == "cuda":
            torch.cuda.current_stream(self.arena.device).synchronize()

    def warmup(self, max_num_seqs: int = 64) -> None:
        """Compile the kernels and touch the weights, on pages of its own: the arena is left as it is.

        On a GPU decode steps of up to `max_num_seqs` sequences are captured as graphs; larger ones run eagerly. With 0
        none are captured: for who computes prompts only.
        """
        page_size = self.layout.page_size
        prompt = min(self.max_context - 1, 2 * page_size)
        if prompt < 1:
            return
        num_places, num_of_each = self.layout.num_pages_for(prompt + 1), 1 + self.num_windowed
        half = num_places * num_of_each
        scratch = KVArena(self.layout, 2 * half, self.arena.device)
        paged = PagedModel(
            self._model,
            scratch,
            self._backend,
            self.vocab_size,
            self.max_context,
            decoder=self._decoder,
            places=self.places,
        )

        def inputs(num_tokens: int, start: int, begin: int) -> SequenceInput:
            pages, windowed = range(begin, begin + num_places), page_table(range(begin + num_places, begin + half))
            return SequenceInput([0] * num_tokens, start, pages, windowed=windowed)

        paged.forward([inputs(prompt, 0, 0), inputs(1, 0, half)])
        paged.forward([inputs(1, prompt, 0), inputs(1, 1, half)])
        if self._has_scratch_page and max_num_seqs:
            self._decode = DecodeGraphs(
                self._paged, max_num_seqs=max_num_seqs, scratch_page=self.num_pages, capture=CudaCapture()
            )


def _layout_of_pages(layout: KVLayout, places: LayerPlaces | None) -> KVLayout:
    return layout if places is None else replace(layout, num_layers=places.num_layers)


def _tensors_dtype(model_dir: Path, kernels: Kernels) -> str:
    """As `model_path.tensors_dtype`, in a type that these kernels widen."""
    dtype = tensors_dtype(model_dir)
    return dtype if dtype != "float16" or kernels.can_widen_float16 else "float32"


def _window(windows: Windows, max_context: int, device: torch.device) -> int:
    """As `Engine.window`; 0, too, where no context is longer."""
    window = kept_windows(windows, on_cpu=device.type == "cpu").window
    return window if window < max_context else 0


def _has_scratch_page(backend: AttentionBackend, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(backend, DecodeBackend)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}", key="device") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is neither cpu nor cuda", key="device")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device", key="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is none of {torch.cuda.device_count()} GPUs", key="device")
    return device


def _set_threads(num_threads: int | None) -> int:
    available = len(os.sched_getaffinity(0))
    threads = available if num_threads is None else num_threads
    if threads < 1:
        raise ConfigError(f"num_threads must be 1 or more, got {threads}", key="num_threads")
    # On purpose, for the whole process: schedulers such as Ray set OMP_NUM_THREADS=1 for their children.
    torch.set_num_threads(threads)
    return threads


def _count_pages(
    layout: KVLayout, num_pages: int | None, kv_bytes: int | None, device: torch.device, num_scratch: int
) -> int:
    """Pages of the arena, `num_scratch` of the engine's own included; these too are within `kv_bytes`."""
    if num_pages is not None and kv_bytes is not None:
        raise ConfigError("give num_pages or kv_bytes, not both", key="num_pages")
    if num_pages is not None:
        return num_pages + num_scratch
    if kv_bytes is None:
        if device.type == "cpu":
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            kv_bytes = min(_DEFAULT_CPU_KV_BYTES, free // 4)
        else:
            kv_bytes = int(torch.cuda.mem_get_info(device)[0] * _DEFAULT_DEVICE_KV_SHARE)
    pages = kv_bytes // layout.page_bytes
    if pages <= num_scratch:
        own = f" and {num_scratch} of the engine's own" if num_scratch else ""
        raise ConfigError(f"{kv_bytes} bytes do not hold one page of {layout.page_bytes}{own}", key="kv_bytes")
    return int(pages)
