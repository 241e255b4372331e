"""Where the layers of a mixed model have their pages: see `tandem.core.layer_groups` for what a mixed model is.

A page of the arena holds as many layers as see all. Those go to *group* 0, each to a layer of the arena of its own. The
layers with a window are dealt out in their order, as many to each layer of the arena as a place has pages for them. So
a layer of the arena is complete, in the pages of all groups, when a block of neighbouring layers of the model is
computed, and a prompt's pages can be sent layer by layer while the rest computes. Extents that are left over at the
end stay empty: few, and only of pages that are given back behind the window. Nobody writes to them or reads them, but
they are sent with their page, as what they held before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from tandem.core.layer_groups import num_windowed_pages
from tandem.core.windows import windows_of


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Of a mixed model.

    Attributes:
        window: tokens that a token sees in the layers with a window, itself included.
        num_layers: of the arena.
        num_windowed: pages of a place for the layers with a window.
        of: by layer of the model, its group and its layer in the arena. Group 0 sees all.
    """

    window: int
    num_layers: int
    num_windowed: int
    of: tuple[tuple[int, int], ...]

    def completed(self, on_layer: Callable[[int], None]) -> Callable[[int], None]:
        """What is to hear of each layer of the model that is written, so that `on_layer` hears of each layer of the
        arena when it is written in the pages of all groups."""
        missing = [0] * self.num_layers
        for _, layer in self.of:
            missing[layer] += 1

        def written(layer: int) -> None:
            _, place = self.of[layer]
            missing[place] -= 1
            if not missing[place]:
                on_layer(place)

        return written


def layer_places(config: PreTrainedConfig, max_context: int) -> LayerPlaces | None:
    """Of models with this config; `None`: they are not mixed, or nothing is to be gained by it."""
    text = config.get_text_config(decoder=True).to_dict()
    windows, kinds = windows_of(text), list(text.get("layer_types") or ())
    if not 0 < windows.window < max_context or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return None
    num_windowed = num_windowed_pages(windows.num_full, windows.num_windowed)
    if not num_windowed or len(kinds) != text["num_hidden_layers"]:
        return None
    of, num_seen_all, num_seen = list[tuple[int, int]](), 0, 0
    for kind in kinds:
        if kind == "full_attention":
            of.append((0, num_seen_all))
            num_seen_all += 1
        else:
            of.append((1 + num_seen % num_windowed, num_seen // num_windowed))
            num_seen += 1
    return LayerPlaces(windows.window, windows.num_full, num_windowed, tuple(of))
