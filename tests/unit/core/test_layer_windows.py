"""What layers with a window see, against what is counted token by token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.core.layer_groups import LayerGroups, kept_pages
from tandem.core.step_times import Card, ModelSize, Roofline, Terms
from tandem.core.time_model import CardSpec, ModelSpec, TimeModel
from tandem.core.windows import GPU_BLOCK_TOKENS, NO_WINDOWS, Windows, kept_windows, windows_in, windows_of

GEMMA = Windows(16, num_windowed=5, num_full=1)
part = st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans())


@given(st.lists(part, max_size=5), st.integers(1, 40), st.integers(0, 3), st.integers(1, 3))
def test_terms_are_what_is_counted_token_by_token(
    parts: list[tuple[int, int, bool]], window: int, num_full: int, num_windowed: int
) -> None:
    num_read = num_pairs = 0
    for layer in range(num_full + num_windowed):
        for start, num_new, _ in parts:
            seen = [
                range(0 if layer < num_full else max(0, at - window + 1), at + 1)
                for at in range(start, start + num_new)
            ]
            num_pairs += sum(map(len, seen))
            num_read += len(set().union(*seen))
    terms = Terms.of(parts, Windows(window, num_windowed, num_full))
    assert terms.num_read == pytest.approx(num_read / (num_full + num_windowed))
    assert terms.num_pairs == pytest.approx(num_pairs / (num_full + num_windowed))


def test_without_windows_all_is_seen() -> None:
    assert Terms.of([(9, 1, True), (0, 4, False)]) == Terms(5, 1, 14, 20.0)
    assert NO_WINDOWS.seen(77) == 77
    assert not NO_WINDOWS.are_everywhere


def test_of_a_mixed_model_the_mean_of_its_layers_counts() -> None:
    # Five of six layers see 16 of 100 tokens.
    assert GEMMA.seen(100) == (5 * 16 + 100) / 6
    assert GEMMA.seen(16) == 16
    terms = Terms.of([(99, 1, True)], GEMMA)
    assert terms == Terms(1, 1, GEMMA.seen(100), GEMMA.seen(100))
    # So a roofline reads of each layer what that sees, and multiplies as much.
    times = Roofline(ModelSize(0, 0, 6 * 10, 6, 8, GEMMA), Card(1.0, 1.0, 1.0, 1.0))
    assert times.model.num_bytes(terms) == 10 * (5 * 16 + 100)
    assert times.model.flops(terms) == 4 * 8 * (5 * 16 + 100)


def test_pages_are_kept_as_workers_keep_them() -> None:
    everywhere = Windows(4096, num_windowed=32)
    assert kept_windows(everywhere, on_cpu=True) == everywhere
    assert kept_windows(everywhere, on_cpu=False).window == 4096 + GPU_BLOCK_TOKENS
    for on_cpu in (True, False):
        assert kept_windows(GEMMA, on_cpu=on_cpu) == kept_windows(NO_WINDOWS, on_cpu=on_cpu) == NO_WINDOWS


def test_pages_of_a_mixed_model_hold_as_many_layers_as_see_all() -> None:
    """Of a Gemma 3 27B ten of 62: in the same memory there are 62 pages for each ten, of which a place has seven."""
    kept = kept_pages(Windows(1024, 52, 10), 62, 32, on_cpu=True)
    assert (kept.groups, kept.num_layers, kept.is_mixed) == (LayerGroups(32, 1024, 6), 10, True)
    assert kept.page_bytes(62 * 100) == 32 * 10 * 100
    assert kept.num_pages(100_000) == 100_000 * 62 // (32 * 10)
    assert kept.num_slots(71) == 10 * 32
    whole = kept_pages(Windows(1024, 52, 10), 62, 32, on_cpu=False)
    assert (whole.groups, whole.num_layers, whole.is_mixed) == (LayerGroups(32), 62, False)
    assert (whole.num_pages(100_000), whole.num_slots(71)) == (3125, 71 * 32)
    # Where fewer layers have a window than see all, nothing is gained.
    assert not kept_pages(Windows(1024, 2, 4), 6, 32, on_cpu=True).is_mixed


def test_what_published_configs_say() -> None:
    assert windows_of({"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096}) == Windows(4096, 32)
    assert windows_of({"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": None}) == NO_WINDOWS
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024}
    assert windows_of(gemma) == Windows(1024, 52, 10)
    assert windows_of({**gemma, "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6}) == (
        Windows(512, 22, 4)
    )
    kinds = ["sliding_attention", "full_attention"] * 12
    oss = {"model_type": "gpt_oss", "num_hidden_layers": 24, "sliding_window": 128}
    assert windows_of({**oss, "layer_types": kinds}) == windows_of(oss) == Windows(128, 12, 12)
    qwen = {"model_type": "qwen2", "num_hidden_layers": 28, "sliding_window": 131072, "max_window_layers": 28}
    assert windows_of({**qwen, "use_sliding_window": False}) == windows_of(qwen) == NO_WINDOWS
    assert windows_of({"model_type": "llama", "num_hidden_layers": 32}) == NO_WINDOWS


def test_a_time_model_says_what_its_layers_see() -> None:
    model = ModelSpec(layers=6, window=16, full_layers=1)
    assert model.windows == GEMMA == windows_in(16, 6, 1)
    for times in ("roofline", "fitted"):
        assert TimeModel(model=model, times=times).step_times().windows == GEMMA
    on_gpu, on_cpu = CardSpec(), CardSpec(is_cpu=True)

    def kept(model: ModelSpec, card: CardSpec, *, mixed: bool = True, max_context: float = math.inf) -> LayerGroups:
        return TimeModel(model=model, card=card).kept_pages(8, mixed=mixed, max_context=max_context).groups

    assert kept(model, on_gpu) == kept(model, on_cpu, mixed=False) == LayerGroups(8)
    assert kept(model, on_cpu) == LayerGroups(8, 16, 5)
    assert kept(model, on_cpu, max_context=16) == LayerGroups(8)
    assert kept(ModelSpec(window=16), on_gpu) == LayerGroups(8, 16 + GPU_BLOCK_TOKENS)
    assert kept(ModelSpec(window=16), on_cpu) == LayerGroups(8, 16)
    with pytest.raises(ConfigError, match=r"without model\.window all layers see all"):
        ModelSpec(full_layers=3)
    with pytest.raises(ConfigError, match="32 of 32 layers, so none has a window"):
        ModelSpec(window=16, full_layers=32)
