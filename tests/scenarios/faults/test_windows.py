"""Workers whose model sees a window only are struck: pages behind it are gone, and nobody misses them."""

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


@pytest.fixture(scope="module")
def shared_windowed_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("windows")
    with site(directory, model=str(save_windowed(directory / "model"))) as found:
        yield found


@pytest.fixture
def windowed_site(shared_windowed_site: Site) -> Site:
    return shared_windowed_site.ready()


def save_windowed(target: Path) -> Path:
    """The embedded model as a Mistral, which is a Llama with a window."""
    shutil.copytree(resolve_model("embedded"), target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
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
