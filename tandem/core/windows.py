"""Layers in which a token sees the last tokens only: which they are, what is read there, and what is kept. Pure.

Reference: Beltagy et al., "Longformer: The Long-Document Transformer", 2020 (section 3.1: sliding window).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A GPU's kernels read whole blocks, of so many tokens at most, and weigh with zero what a window hides: were that no
#: number, neither would be the result. So it must be the sequence's own.
GPU_BLOCK_TOKENS = 256

_SLIDING = "sliding_attention"
# Whose attention always hands on the window of the config, for every layer.
_ALL_SLIDE = ("ministral", "mistral", "mixtral", "phi3", "starcoder2")
# Of each so many layers the last one sees all, where the config does not say which do. Those below may say how many.
_PERIODS = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2}
_SAY_THEIR_PERIOD = ("cohere2", "exaone4", "gemma3_text")
# Of each four layers the first one sees all.
_FIRST_SEES_ALL = ("granite_swa", "granitemoe_swa")
# Whose window counts only where `use_sliding_window` says so.
_OFF_BY_DEFAULT = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
# Where the config does not say it; of others: there is none.
_WINDOWS = dict.fromkeys(("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral", "olmo3"), 4096) | {
    "gpt_oss": 128, "granite_swa": 128, "granitemoe_swa": 128, "qwen2": 4096, "qwen2_moe": 4096, "qwen3": 4096,
    "vaultgemma": 4096,
}  # fmt: skip
# Of Qwen: layers before which, or from which on, all see all.
_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True, slots=True)
class Windows:
    """Of a model's layers, those in which a token sees the last tokens only.

    Attributes:
        window: so many, itself included; 0: all layers see all.
        num_windowed, num_full: layers with the window, and those that see all tokens all the same.
    """

    window: int = 0
    num_windowed: int = 0
    num_full: int = 0

    @property
    def are_everywhere(self) -> bool:
        """Whether all layers have the window."""
        return self.window > 0 and not self.num_full

    def mean(self, of_full: float, of_windowed: float) -> float:
        """Over the layers, of what is so in those that see all and so in the others."""
        if not self.window:
            return of_full
        num_layers = self.num_full + self.num_windowed
        return (self.num_full * of_full + self.num_windowed * of_windowed) / num_layers

    def seen(self, num_tokens: int) -> float:
        """Tokens of a context that its last one sees, itself included; the mean over the layers."""
        return self.mean(num_tokens, min(num_tokens, self.window))


NO_WINDOWS = Windows()


def windows_in(window: int, num_layers: int, num_full: int) -> Windows:
    """Of so many layers, of which `num_full` see all tokens where the others have a `window`; 0: all see all."""
    return Windows(window, num_layers - num_full, num_full) if window else NO_WINDOWS


def num_read_in_window(start: int, num_new: int, window: int) -> int:
    """Tokens that any of `num_new` tokens sees which are computed behind `start` others, one of them at least."""
    return min(start, window - 1) + num_new


def num_pairs_in_window(start: int, num_new: int, window: int) -> float:
    """Of one of `num_new` tokens that are computed behind `start` others, and one that it sees."""
    num_growing = min(max(window - start, 0), num_new)  # each of these sees one more than the one before
    return num_growing * (start + (num_growing + 1) / 2) + (num_new - num_growing) * window


def kept_windows(windows: Windows, *, on_cpu: bool) -> Windows:
    """Of which tokens of a sequence a worker keeps K and V where a page holds all layers: as far back as one sees.

    Mixed models keep less on CPUs, in pages that hold some of the layers: `kept_pages` in `tandem.core.layer_groups`
    knows both.
    """
    if not windows.are_everywhere:
        return NO_WINDOWS
    window = windows.window if on_cpu else windows.window + GPU_BLOCK_TOKENS
    return Windows(window, windows.num_windowed)


def windows_of(config: Mapping[str, Any]) -> Windows:
    """Of a `config.json`, or of what `transformers` makes of it, which has more keys; of composites the text part."""
    window, kinds = _window(config), _slides(config)
    if not window or not any(kinds):
        return NO_WINDOWS
    return Windows(window, sum(kinds), len(kinds) - sum(kinds))


def _window(config: Mapping[str, Any]) -> int:
    """Of the layers that have one; some configs keep the number, and the kinds of the layers, where it is off."""
    kind = config.get("model_type")
    if not config.get("use_sliding_window", kind not in _OFF_BY_DEFAULT):
        return 0
    return int(config.get("sliding_window", _WINDOWS.get(str(kind))) or 0)


def _slides(config: Mapping[str, Any]) -> list[bool]:
    """Of each layer whether it has the window."""
    if config.get("layer_types"):
        return [kind == _SLIDING for kind in config["layer_types"]]
    kind, layers = str(config.get("model_type")), range(int(config.get("num_hidden_layers") or 0))
    if kind in _PERIODS:
        said = config.get("sliding_window_pattern") if kind in _SAY_THEIR_PERIOD else None
        period = said if isinstance(said, int) and said > 0 else _PERIODS[kind]
        return [(layer + 1) % period > 0 for layer in layers]
    if kind in _FIRST_SEES_ALL:
        return [layer % 4 > 0 for layer in layers]
    most = config.get("max_window_layers", _MAX_WINDOW_LAYERS)
    if kind in ("qwen2", "qwen3"):
        return [layer >= most for layer in layers]
    if kind == "qwen2_moe":
        return [layer % 2 == 0 and layer < most for layer in layers]
    if kind == "smollm3":
        return [not has_rope for has_rope in _ropes(config, layers)]
    return [kind in _ALL_SLIDE for _ in layers]


def _ropes(config: Mapping[str, Any], layers: range) -> list[int]:
    interval = config.get("no_rope_layer_interval", 4)
    return config.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]
