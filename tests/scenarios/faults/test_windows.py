"""Workers whose model, or some of whose layers, see a window only are struck: pages behind it are gone, and nobody
misses them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.core.model_path import resolve_model
from tests.scenarios.faults.cases import Case
from tests.scenarios.faults.site import Site, assert_same, site, story

pytestmark = pytest.mark.alone

WINDOW = 50
CASES = [
    Case("decode", "decode.step", "kill", True, "seeded", "n2"),
    Case("prefill", "prefill.sending", "kill", True, "greedy", "one"),
    Case("prefill", "prefill.chunk", "kill", False, "seeded", "one"),
    Case("decode", "decode.verified", "kill", False, "greedy", "stop"),
    Case("decode", "decode.step", "stop", False, "greedy", "n2"),
    Case("prefill", "prefill.written", "stop", True, "seeded", "one"),
]
MIXED_CASES = [
    Case("decode", "decode.step", "kill", True, "seeded", "n2"),
    Case("prefill", "prefill.sending", "kill", False, "greedy", "one"),
    Case("decode", "decode.verified", "stop", True, "seeded", "stop"),
]


@pytest.fixture(scope="module")
def shared_windowed_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("windows")
    with site(directory, model=str(save_windowed(directory / "model"))) as found:
        yield found


@pytest.fixture
def windowed_site(shared_windowed_site: Site) -> Site:
    return shared_windowed_site.ready()


@pytest.fixture(scope="module")
def shared_mixed_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("mixed")
    with site(directory, model=str(save_windowed(directory / "model", mixed=True))) as found:
        yield found


@pytest.fixture
def mixed_site(shared_mixed_site: Site) -> Site:
    return shared_mixed_site.ready()


def save_windowed(target: Path, *, mixed: bool = False) -> Path:
    """The embedded model as a Mistral, which is a Llama with a window; `mixed`: as a Ministral, with one in every other
    layer."""
    shutil.copytree(resolve_model("embedded"), target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
    if mixed:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])]
        config |= {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "layer_types": kinds}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.faults
@pytest.mark.parametrize("case", CASES, ids=map(str, CASES))
def test_a_struck_worker_changes_nothing_where_tokens_see_a_window(windowed_site: Site, case: Case) -> None:
    prompt = story(f"windowed {case}")
    expected = windowed_site.expected(prompt, case.fields)
    outcome = windowed_site.strike(case, prompt)
    assert_same(outcome.answer, expected)
    windowed_site.check_in_time(case, outcome)
    windowed_site.check_freed(case)


@pytest.mark.faults
@pytest.mark.parametrize("case", MIXED_CASES, ids=map(str, MIXED_CASES))
def test_a_struck_worker_changes_nothing_where_some_layers_see_a_window(mixed_site: Site, case: Case) -> None:
    prompt = story(f"mixed {case}")
    expected = mixed_site.expected(prompt, case.fields)
    outcome = mixed_site.strike(case, prompt)
    assert_same(outcome.answer, expected)
    mixed_site.check_in_time(case, outcome)
    mixed_site.check_freed(case)
