"""Does an architecture survive paged ragged batches? Ask a small random copy of it.

A copy with few layers and random weights runs two requests, in chunks, side by side, beyond its window, chunk and
RoPE limits, through the same attention as the real model. It must give what the architecture's own eager forward
gives for each request alone. What differs would be wrong answers, so it is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.core.errors import ModelLoadError, UnsupportedModelError
from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.batch import SequenceInput
from tandem.engine.fuse.small_config import shrink_config
from tandem.engine.fuse.small_model import draw_twins
from tandem.engine.kernels import Kernels
from tandem.engine.loader import Types
from tandem.engine.paged_model import PagedModel
from tandem.engine.rope import settle_rope
from tandem.engine.select_kernels import kernels_for
from tandem.engine.unserved import why_unserved

#: Two logits agree if they differ by less than this share of the standard deviation of all logits.
TOLERANCE = 1e-3
#: Another history must move the last logits by this many tolerances, or the probe could not fail.
SENSITIVITY = 100

_PAGE_SIZE = 16
_LONG, _SHORT = 75, 21
# Each step: (request, first token, end); 0 is the long request, 1 the short one. Prefill beside prefill, a chunk over a
# prefix beside another, decode beside decode.
_STEPS = (
    ((1, 0, 9), (0, 0, 30)),
    ((0, 30, 74), (1, 9, 20)),
    ((0, 74, 75), (1, 20, 21)),
)
_PAGES = ((6, 1, 4, 0, 3), (5, 2))  # interleaved and out of order
_NUM_PAGES = 7


def probe_architecture(config: PreTrainedConfig, kernels: Kernels | None = None) -> None:
    """Return if models with this `config` can be served; takes a second or two on a CPU.

    `kernels`: those that are to serve, if they compute on a CPU; by default a CPU's own, on one thread.

    Raises `UnsupportedModelError` with the name of the architecture and what went wrong.
    """
    name = _name(config)
    if reason := why_unserved(config):
        raise UnsupportedModelError(f"{name} cannot be served: {reason}")
    try:
        small = shrink_config(config)
        eager, paged = draw_twins(small)
        for model in (eager, paged):
            settle_rope(model, _LONG)
        served = _paged_model(paged, small, kernels or kernels_for(torch.device("cpu")))
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, served.vocab_size, (n,), generator=generator).tolist() for n in (_LONG, _SHORT)]
        found = _run_paged(served, prompts)
        with torch.inference_mode():
            expected = [_run_eager(eager, prompt) for prompt in prompts]
            moved = _run_eager(eager, _with_other_history(prompts[0], served.vocab_size))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served: {error.message}{_hint(config)}") from error
    except (ModelLoadError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot be served: {_why_not_run(error)}") from error
    _compare(name, config, expected, found, moved)


def _why_not_run(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return "its attention does not go through the interface of `transformers`"
    return f"its small copy does not run: {type(error).__name__}: {error}"


def _name(config: PreTrainedConfig) -> str:
    architectures = getattr(config, "architectures", None)
    return f"{architectures[0]} ({config.model_type})" if architectures else str(config.model_type)


def _paged_model(model: PreTrainedModel, config: PreTrainedConfig, kernels: Kernels) -> PagedModel:
    layout = loader.derive_layout(config, _PAGE_SIZE, "float32")
    device = torch.device("cpu")
    arena = KVArena(layout, _NUM_PAGES, device)
    arena.tensor.fill_(float("nan"))  # whoever reads a slot that nobody wrote shows it
    kernels.fuse(model, layout, Types.all_of(layout.dtype))
    decoder = kernels.decoder(model, layout, _LONG)
    return PagedModel(model, arena, kernels.attention(layout), loader.vocab_size_of(model), _LONG, decoder=decoder)


def _run_paged(model: PagedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    parts: list[list[torch.Tensor]] = [[], []]
    for step in _STEPS:
        inputs = [
            SequenceInput(prompts[request][begin:end], begin, _PAGES[request], end - begin)
            for request, begin, end in step
        ]
        logits = model.forward(inputs)
        rows = torch.split(logits, [len(item.token_ids) for item in inputs])
        for (request, _, _), part in zip(step, rows, strict=True):
            parts[request].append(part)
    return [torch.cat(part) for part in parts]


def _run_eager(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


def _with_other_history(prompt: list[int], vocab_size: int) -> list[int]:
    """Change all tokens but the last."""
    return [*((token + 1) % vocab_size for token in prompt[:-1]), prompt[-1]]


def _compare(
    name: str,
    config: PreTrainedConfig,
    expected: list[torch.Tensor],
    found: list[torch.Tensor],
    moved: torch.Tensor,
) -> None:
    scale = float(torch.cat(expected).std())
    if not scale > 0:
        raise UnsupportedModelError(f"{name} cannot be served: its small copy gives constant or undefined logits")
    reach = float((moved[-1] - expected[0][-1]).abs().max()) / scale
    if not reach > SENSITIVITY * TOLERANCE:
        raise UnsupportedModelError(
            f"{name} cannot be served: another history moves its last logits by {reach:.1e} only, so the probe is blind"
        )
    for request, (want, got) in enumerate(zip(expected, found, strict=True)):
        error = (want - got).abs().amax(dim=-1) / scale
        wrong = (~(error <= TOLERANCE)).nonzero()
        if len(wrong):
            raise UnsupportedModelError(
                f"{name} cannot be served: in a paged batch of two requests its {('long', 'short')[request]} one "
                f"differs from its own eager forward from token {int(wrong[0])} on "
                f"(by {float(error.nan_to_num(torch.inf).max()):.1e} of the spread){_hint(config)}"
            )


def _hint(config: PreTrainedConfig) -> str:
    """Name the known reason, where the config has one."""
    text = config.get_text_config(decoder=True)
    kinds = rope_types(getattr(text, "rope_parameters", None))
    reasons = [
        f"rope_type {kind!r} takes the largest position of the batch for all its requests"
        for kind in sorted(kinds & {"longrope", "dynamic"})
    ]
    return f" ({'; '.join(reasons)})" if reasons else ""


def rope_types(parameters: Any) -> set[str]:
    """Return the RoPE types in `rope_parameters`, which is one dictionary or one for each layer type."""
    if not isinstance(parameters, dict):
        return set()
    if "rope_type" in parameters:
        return {str(parameters["rope_type"])}
    return {kind for value in parameters.values() for kind in rope_types(value)}
