"""A mixed model, whose layers with a window have pages of their own: the logits are those of all pages kept, bit by
bit, and pages behind the window may be anybody's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import engine_helpers as helpers
import pytest
import torch
from engine_helpers import NUM_PAGES, PAGE_SIZE, WINDOW
from transformers import AutoConfig

from tandem.core.config import CacheConfig
from tandem.core.errors import UnsupportedModelError
from tandem.core.layer_groups import LayerGroups
from tandem.core.pages import PagePool
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.engine import loader
from tandem.engine.engine import Engine, SequenceInput
from tandem.engine.layer_places import LayerPlaces, layer_places
from tandem.engine.random_model import ModelSpec, save
from tandem.plan.calculators import Served
from tandem.plan.shapes import find_shape
from tandem.worker.batch import SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import Sequence

NUM_TOKENS = 200
#: Fused on a CPU; of five layers with a window, dealt out in threes, one page has an empty extent.
MODELS = {"gemma2": {}, "qwen3": {"layers": 7, "full_every": 3}}


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp(request.param) / "model"
    return helpers.save_model(request.param, target, **MODELS[request.param])


def groups_of(engine: Engine) -> LayerGroups:
    return LayerGroups(PAGE_SIZE, engine.window, engine.num_windowed)


class Text:
    """Computes one text, and poisons what no layer sees any more."""

    def __init__(self, engine: Engine, first_page: int) -> None:
        self._engine, self._groups = engine, groups_of(engine)
        num_places = -(-NUM_TOKENS // PAGE_SIZE)
        flat = range(first_page, first_page + num_places * (1 + engine.num_windowed))
        self.pages, self.windowed = self._groups.tables(flat, 0, num_places)

    def input(self, tokens: list[int], start: int, num_logits: int = 1) -> SequenceInput:
        engine = self._engine
        end = self._groups.num_hidden(start) * engine.num_windowed
        for index, page in enumerate(self.windowed[:end]):
            if page:
                engine.arena.tensor[:, page] = float("nan")
            self.windowed[index] = 0
        return SequenceInput(tokens, start, self.pages, num_logits, self.windowed)


@pytest.mark.long
@pytest.mark.parametrize(("kernels", "chunk"), [("auto", 7), ("auto", 50), ("torch", 50)])
def test_logits_are_those_of_all_pages_kept(model_dir: Path, kernels: str, chunk: int) -> None:
    assert_same_logits(model_dir, kernels, chunk)


#: Others whose layers differ: in the base of their RoPE, in sinks, in having RoPE at all.
OTHERS: dict[str, dict[str, object]] = {
    "gemma3_text": {"head_dim": 16, "num_hidden_layers": 6, "sliding_window_pattern": 3},
    "gpt_oss": {"head_dim": 16, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    "cohere2": {"num_hidden_layers": 4},
}


@pytest.mark.long
@pytest.mark.parametrize("arch", OTHERS)
def test_logits_of_other_architectures_are_those_of_all_pages_kept(arch: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 320, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
        "tie_word_embeddings": False, "sliding_window": WINDOW,
    }  # fmt: skip
    config = AutoConfig.for_model(arch, **(sizes | OTHERS[arch]))
    assert_same_logits(save(ModelSpec(seed=3), tmp_path / arch, config), "auto", 50)


def assert_same_logits(model_dir: Path, kernels: str, chunk: int) -> None:
    whole = helpers.load_engine(model_dir, kernels=kernels)
    mixed = helpers.load_engine(model_dir, kernels=kernels, mixed=True)
    assert whole.num_windowed == 0
    assert mixed.num_windowed > 0
    assert mixed.weights_sha256 == whole.weights_sha256
    mixed.arena.tensor.fill_(float("nan"))  # page 0 stays so: whoever reads what is given back shows it
    texts = [torch.randint(2, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 4)]
    all_pages = [list(range(1, 30)), list(range(30, 60))]
    in_groups = [Text(mixed, 1), Text(mixed, 80)]
    steps = [(start, min(start + chunk, 160)) for start in range(0, 160, chunk)]
    steps += [(start, start + 1) for start in range(160, NUM_TOKENS)]
    for index, (start, end) in enumerate(steps):
        now, num = [text[start:end] for text in texts], end - start
        num_logits = ((num, num), (0, num), (num, 1))[index % 3]
        expected = whole.forward([SequenceInput(now[n], start, all_pages[n], num_logits[n]) for n in range(2)]).clone()
        found = mixed.forward([in_groups[n].input(now[n], start, num_logits[n]) for n in range(2)])
        assert torch.equal(found, expected)
        assert not found.isnan().any()
    hidden = groups_of(mixed).num_hidden(NUM_TOKENS - 1)
    assert in_groups[0].windowed[: hidden * mixed.num_windowed].tolist() == [0] * hidden * mixed.num_windowed
    assert hidden > 8


def test_a_layer_is_told_of_when_it_is_written_in_all_groups(model_dir: Path) -> None:
    engine = helpers.load_engine(model_dir, mixed=True)
    engine.arena.tensor.fill_(float("nan"))
    text, seen, written = Text(engine, 1), [], []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        groups = [text.pages, *(text.windowed[group :: engine.num_windowed] for group in range(engine.num_windowed))]
        written.append([not engine.arena.tensor[layer, pages[0]].isnan().any() for pages in groups])

    engine.forward([text.input(list(range(2, 2 + PAGE_SIZE)), 0)], on_layer)
    assert seen == list(range(engine.layout.num_layers))
    of = engine.places.of
    assert written == [[(group, layer) in of for group in range(1 + engine.num_windowed)] for layer in seen]


def test_a_page_outside_of_the_arena_is_refused(model_dir: Path) -> None:
    engine = helpers.load_engine(model_dir, mixed=True)
    text = Text(engine, 1)
    text.windowed[0] = NUM_PAGES
    for num_tokens in (1, 5):
        with pytest.raises(ValueError, match="outside of the arena"):
            engine.forward([SequenceInput([5] * num_tokens, 0, text.pages, windowed=text.windowed)])
    assert text.windowed[0] == NUM_PAGES, "the caller's own table is left as it is"
    with pytest.raises(ValueError, match="of layers with a window do not hold"):
        engine.forward([SequenceInput([5], 0, text.pages)])


def test_a_layer_that_sees_more_than_its_config_says_is_refused(model_dir: Path) -> None:
    engine = helpers.load_engine(model_dir, mixed=True, kernels="torch")
    text = Text(engine, 1)
    places = engine.places
    engine._paged.places = LayerPlaces(WINDOW - 1, places.num_layers, places.num_windowed, places.of)
    with pytest.raises(UnsupportedModelError, match="the config says 23"):
        engine.forward([text.input([5], 0)])


KINDS = {"s": "sliding_attention", "f": "full_attention", "c": "chunked_attention"}


def config(kinds: str, **options: object) -> object:
    layers = {"num_hidden_layers": len(kinds), "layer_types": [KINDS[kind] for kind in kinds]}
    return AutoConfig.for_model("qwen3", **({"use_sliding_window": True, "sliding_window": 24} | layers | options))


def test_layers_are_dealt_out_so_that_blocks_of_neighbours_complete_a_layer_of_the_arena() -> None:
    assert layer_places(config("sfsf"), 512) == LayerPlaces(24, 2, 1, ((1, 0), (0, 0), (1, 1), (0, 1)))
    of = ((1, 0), (2, 0), (0, 0), (1, 1), (2, 1), (0, 1), (1, 2), (2, 2), (0, 2))
    assert layer_places(config("ssfssfssf"), 512) == LayerPlaces(24, 3, 2, of)
    gemma = AutoConfig.for_model("gemma3_text", num_hidden_layers=26, sliding_window=512)
    places = layer_places(gemma, 32768)
    assert (places.num_layers, places.num_windowed, len(set(places.of))) == (4, 6, 26)


@pytest.mark.parametrize(
    ("kinds", "options", "max_context"),
    [
        ("ssss", {}, 512),
        ("ffff", {}, 512),
        ("ffsf", {}, 512),  # pages of its layers with a window would be nearly empty
        ("scsf", {}, 512),
        ("sfsf", {"use_sliding_window": False}, 512),
        ("sfsf", {}, 24),  # no context is longer than the window
    ],
)
def test_other_models_keep_one_table(kinds: str, options: dict[str, object], max_context: int) -> None:
    assert layer_places(config(kinds, **options), max_context) is None


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("gemma3_text", {"num_hidden_layers": 13, "sliding_window": 24}),  # an extent stays empty
        ("gpt_oss", {"num_hidden_layers": 6, "sliding_window": 17, "num_local_experts": 2}),
        ("cohere2", {"num_hidden_layers": 8, "sliding_window": 40}),
    ],
)
def test_a_plan_counts_the_pages_that_a_scheduler_holds_for_the_engines_places(
    arch: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    of_all = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "vocab_size": 320}
    config = AutoConfig.for_model(arch, **(of_all | sizes))
    config.save_pretrained(tmp_path)
    places = layer_places(config, 512)
    assert places is not None
    layout = replace(loader.derive_layout(config, PAGE_SIZE, "float32"), num_layers=places.num_layers)
    limits = SchedulerLimits(4, 64, 2 * PAGE_SIZE, 4, window=places.window, num_windowed=places.num_windowed)
    scheduler = BatchScheduler(PagePool(400, PAGE_SIZE), limits, salt=b"")
    text = Sequence("0", 1, 0, 0.0, 0, token_ids([5] * 50), 50, SamplingParams(max_tokens=150))
    scheduler.add(text)
    planned, num = Served(find_shape(str(tmp_path)), kv_dtype="float32", cache=CacheConfig(page_size=PAGE_SIZE)), 0
    while len(text.token_ids) < 200:
        batch = scheduler.schedule()
        scheduler.apply(batch, [[7] for item in batch.items if item.samples])
        if text.is_decode:
            held = len(scheduler.held_pages(text)) * layout.page_bytes
            assert held == planned.sequence_bytes(text.num_computed, on_cpu=True)
            num += held < planned.sequence_bytes(text.num_computed)
    assert num > 100
