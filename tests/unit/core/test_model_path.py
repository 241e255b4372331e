"""Which files of a directory are a checkpoint's, as `transformers` reads them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ModelLoadError
from tandem.core.model_path import TensorHead, positions_of, read_facts, read_heads
from tandem.engine.loader import derive_layout, load_config
from tandem.plan.shapes import find_shape


def write_tensor(file: Path, name: str, dtype: str = "F16") -> None:
    """A file that has the head of one tensor `[2, 3]`."""
    head = json.dumps({name: {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head)


def write_index(directory: Path, content: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def test_one_file_goes_before_an_index_and_both_before_what_lies_beside_them(tmp_path: Path) -> None:
    write_tensor(tmp_path / "consolidated.safetensors", "foreign")
    assert set(read_heads(tmp_path)) == {"foreign"}
    write_tensor(tmp_path / "part-1.safetensors", "a")
    write_tensor(tmp_path / "part-2.safetensors", "b")
    write_index(tmp_path, {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
    assert set(read_heads(tmp_path)) == {"a", "b"}
    write_tensor(tmp_path / "model.safetensors", "all")
    assert read_heads(tmp_path) == {"all": TensorHead("F16", (2, 3))}


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: Any) -> None:
    write_index(tmp_path, content)
    with pytest.raises(ModelLoadError, match=r"index\.json has no weight_map"):
        read_heads(tmp_path)


def test_a_file_that_the_index_names_and_that_is_missing_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {"a": "part-1.safetensors"}})
    with pytest.raises(ModelLoadError, match=r"part-1\.safetensors"):
        read_heads(tmp_path)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("F32", 24), ("BF16", 12), ("F8_E4M3", 6), ("I64", 48), ("BOOL", 6)])
def test_bytes_are_those_of_the_type(dtype: str, num_bytes: int) -> None:
    assert TensorHead(dtype, (2, 3)).num_bytes == num_bytes


def test_a_quantization_config_that_is_no_object_is_named_and_an_empty_one_is_none(tmp_path: Path) -> None:
    write_tensor(tmp_path / "model.safetensors", "a")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {}}))
    assert read_facts(str(tmp_path), tmp_path).quantization is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": "gptq"}))
    with pytest.raises(ModelLoadError, match="must be an object, not 'gptq'"):
        read_facts(str(tmp_path), tmp_path)


@pytest.mark.parametrize(("said", "num_kv_heads"), [({}, 1), ({"multi_query": True}, 1), ({"multi_query": False}, 6)])
def test_one_head_of_k_and_v_counts_as_one(tmp_path: Path, said: dict[str, bool], num_kv_heads: int) -> None:
    sizes = {"n_layer": 2, "n_head": 6, "n_embd": 96, "n_positions": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_bigcode", **sizes, **said}))
    facts, shape = read_facts("model", tmp_path), find_shape(str(tmp_path))
    layout = derive_layout(load_config(tmp_path), page_size=1, dtype="float32")
    assert facts.num_kv_heads == shape.kv_heads == layout.num_kv_heads == num_kv_heads
    assert facts.kv_bytes_per_token("float32") == layout.page_bytes


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 4.0}, 4096),  # some publishers have stretched the limit already
        (YARN, 16384),
        ({**YARN, "rope_type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "factor": 2.0}, 8192),
        ({**YARN, "factor": "4"}, 4096),
    ],
)
def test_the_context_of_yarn_is_what_it_stretches_times_its_factor(rope: Any, limit: int) -> None:
    assert positions_of({"max_position_embeddings": 4096, "rope_scaling": rope}) == limit
