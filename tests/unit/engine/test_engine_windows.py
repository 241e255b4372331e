"""Where every layer sees a window only, pages behind it may be anybody's: what is read of them would show."""

from __future__ import annotations

import time
from pathlib import Path

import engine_helpers as helpers
import pytest
import torch
from engine_helpers import PAGE_SIZE, WINDOW
from transformers import AutoConfig

from tandem.core.config import EMBEDDED_MODEL
from tandem.core.identity import Role
from tandem.core.model_path import resolve_model
from tandem.core.pages import num_hidden_pages
from tandem.core.windows import kept_windows, windows_of
from tandem.engine import loader
from tandem.engine.engine import SequenceInput
from tandem.engine.simulated import SimulatedEngine

NUM_TOKENS = 200


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.save_model("mistral", tmp_path_factory.mktemp("mistral") / "model")


SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        ("mistral", {"sliding_window": 24}, 24),
        ("mistral", {"sliding_window": None}, 0),
        ("mixtral", {"sliding_window": 24}, 24),
        ("phi3", {"sliding_window": 24, "pad_token_id": 0}, 24),
        ("ministral", {"sliding_window": 24}, 24),
        ("ministral", {"sliding_window": 24, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}, 0),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0}, 24),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 20}, 0),
        ("qwen2", {"sliding_window": 24, "use_sliding_window": False}, 0),
        ("smollm3", {**SLIDING, "use_sliding_window": True}, 24),
        ("smollm3", {**SLIDING, "use_sliding_window": False}, 0),
        ("gemma2", {"sliding_window": 24}, 0),
        ("gemma3_text", {"sliding_window": 24}, 0),
        ("llama", {}, 0),
    ],
)
def test_a_window_counts_where_all_layers_have_it(model_type: str, options: dict[str, object], expected: int) -> None:
    windows = loader.windows_of(AutoConfig.for_model(model_type, **options))
    assert kept_windows(windows, on_cpu=True).window == expected


# fmt: off
SERVED = [
    "arcee", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "gpt2", "gpt_neox", "gpt_oss",
    "granitemoe_swa", "llama", "ministral", "mistral", "mixtral", "olmo3", "phi", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
]
# fmt: on
KINDS = ["sliding_attention"] * 4 + ["full_attention"] * 4


@pytest.mark.parametrize("model_type", SERVED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 24},
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3},
        {"sliding_window": 24, "sliding_window_pattern": 3},
        {"sliding_window": 24, "layer_types": KINDS},
    ],
    ids=str,
)
def test_a_file_says_what_its_model_does(model_type: str, options: dict[str, object]) -> None:
    """`tandem plan` reads the file; the engine what `transformers` makes of it, with what the file leaves out."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=8, **options)
    assert windows_of({"model_type": model_type, "num_hidden_layers": 8, **options}) == loader.windows_of(config)


def test_a_context_that_is_no_longer_than_the_window_hides_nothing(model_dir: Path) -> None:
    assert helpers.load_engine(model_dir).window == WINDOW
    assert helpers.load_engine(model_dir, max_context=WINDOW).window == 0


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [7, PAGE_SIZE, 50])
def test_pages_behind_the_window_may_be_anybodys(model_dir: Path, kernels: str, chunk: int) -> None:
    """Page 0 stands for them, and holds what is no number."""
    engine = helpers.load_engine(model_dir, kernels=kernels)
    tokens = torch.randint(2, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    engine.arena.tensor.fill_(float("nan"))
    whole, cut = list(range(1, 30)), list(range(30, 60))
    steps = [(start, min(start + chunk, NUM_TOKENS - 40)) for start in range(0, NUM_TOKENS - 40, chunk)]
    steps += [(start, start + 1) for start in range(NUM_TOKENS - 40, NUM_TOKENS)]
    for start, end in steps:
        num_hidden = num_hidden_pages(start, PAGE_SIZE, engine.window)
        cut[:num_hidden] = [0] * num_hidden
        for page in range(30, 30 + num_hidden):  # nor is it there by another way
            for layer in range(engine.layout.num_layers):
                engine.arena.keys(layer)[page] = engine.arena.values(layer)[page] = float("nan")
        inputs = [SequenceInput(tokens[start:end], start, pages, end - start) for pages in (whole, cut)]
        expected, found = (engine.forward([one]).clone() for one in inputs)
        assert torch.equal(found, expected)
        assert not found.isnan().any()
    assert num_hidden > 8


def test_a_simulated_engine_gives_back_the_pages_that_its_model_would(tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"

    def engine_of(model: str, *, mixed: bool = False) -> SimulatedEngine:
        times = "times: fitted\nfitted: {base_ms: 0, read_ns: 1.0e+6}\ncard: {is_cpu: true}\n"
        file.write_text(f"{times}model: {model}\n")
        path, settings = resolve_model(EMBEDDED_MODEL), {"page_size": 4, "max_context": 500, "mixed": mixed}
        return SimulatedEngine(path, file, Role.DECODE, **settings)  # type: ignore[arg-type]

    one_sees_all = "{layers: 6, window: 20, full_layers: 1}"
    whole, mixed = engine_of(one_sees_all), engine_of(one_sees_all, mixed=True)
    assert (whole.window, whole.num_windowed, whole.num_pages) == (0, 0, 25_000)
    assert (mixed.window, mixed.num_windowed, mixed.num_pages) == (20, 5, 6 * 25_000)
    assert engine_of("{window: 4000}").window == 0, "no context is as long"
    engine = engine_of("{window: 20}")
    assert engine.window == 20
    began_s = time.monotonic()
    engine.forward([SequenceInput([1], 400, [0] * 101, 1)])
    assert 0.02 <= time.monotonic() - began_s < 0.4, "a millisecond for each token that it sees"
