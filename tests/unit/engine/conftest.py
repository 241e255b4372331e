"""Checkpoints, engines and references that are made once for all tests of the engine."""

from __future__ import annotations

from pathlib import Path

import engine_helpers as helpers
import pytest
from engine_helpers import Case


@pytest.fixture(scope="session", params=list(helpers.ARCHITECTURES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each architecture in turn."""
    arch = request.param
    model_dir = helpers.save_model(arch, tmp_path_factory.mktemp("models") / arch)
    prompts = [helpers.make_prompt(length, seed=index) for index, length in enumerate(helpers.PROMPT_LENGTHS)]
    return Case(arch, model_dir, helpers.load_engine(model_dir), prompts, helpers.eager_greedy(model_dir, prompts))


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama checkpoint."""
    return helpers.save_model("llama", tmp_path_factory.mktemp("models") / "llama")
