"""`tools/make_random_model.py` writes what the engine loads."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tandem.engine import loader

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_random_model.py"


def test_the_tool_writes_the_shape_that_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hidden", "32", "--layers", "2", "--head-dim", "16", "--tie"]
    monkeypatch.setattr(sys, "argv", [str(TOOL), str(tmp_path / "model"), *options])
    runpy.run_path(str(TOOL), run_name="__main__")
    said = json.loads(capsys.readouterr().out)
    files = list((tmp_path / "model").iterdir())
    assert said["bytes"] == sum(path.stat().st_size for path in files)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    config = loader.load_config(tmp_path / "model")
    layout = loader.derive_layout(config, 16, "float32")
    assert (config.hidden_size, layout.num_layers, layout.head_dim, config.tie_word_embeddings) == (32, 2, 16, True)
