"""Impossible values fail before anything starts, naming key and remedy."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from state_files import cluster_file

from tandem.cluster import statefile
from tandem.cluster.checks.draft import draft_bytes
from tandem.cluster.checks.host import Host, human_bytes, this_host
from tandem.cluster.checks.nixl_build import MissingBuild, cuda_of, missing_build, torch_cuda
from tandem.cluster.checks.preflight import WORKER_OVERHEAD_BYTES, Plan, Preflight, check_room, share_of_gpu
from tandem.cluster.serve.banner import ready_banner
from tandem.core import ports
from tandem.core.config import from_dict, load
from tandem.core.errors import ConfigError, ModelLoadError, TandemError, UnsupportedModelError
from tandem.core.identity import Role
from tandem.core.model_path import TensorHead, read_facts, resolve_model
from tandem.engine.cpu.vector_ir import has_bfloat16_products
from tandem.engine.quantized.scheme import read_scheme
from tandem.engine.quantized.shapes import loaded_bytes
from tandem.engine.random_model import make_tokenizer
from tests.support.imports import loaded_by
from tests.support.pooling_models import write_modules

GIB = 1 << 30
HOST = Host(available_bytes=16 * GIB, num_cores=8, num_gpus=0)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Llama-like, 1 MiB of weights, 4 layers, 2 KV heads of 32: 2 KiB of KV a token in float32."""
    directory = tmp_path / "small"
    directory.mkdir()
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "dtype": "bfloat16", **shape}
    (directory / "config.json").write_text(json.dumps(config))
    head = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [512, 512], "data_offsets": [0, 1]}})
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head.encode())
    return directory


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def preflight(checkpoint: Path, port: int, host: Host = HOST, **sections: Any) -> Preflight:
    tree = {"model": {"path": str(checkpoint)}, "http": {"port": port}, **sections}
    return Preflight(from_dict(tree), host)


BAD = [
    ({"cache": {"max_context": 4096}}, "cache.max_context", "at most 2048"),
    ({"cache": {"page_size": 4096}, "scheduling": {"chunk_size": 4096, "max_num_batched_tokens": 4096}},
     "cache.page_size", "set it to 32"),
    ({"cache": {"memory_bytes": 100 * GIB}}, "cache.memory_bytes", "set it to at most"),
    ({"cache": {"memory_bytes": 1 << 20}}, "cache.memory_bytes", "set cache.max_context to at most 512"),
    ({"cache": {"memory_bytes": 1 << 20, "dtype": "bfloat16"}}, "cache.memory_bytes", "max_context to at most 1024"),
    ({"cache": {"memory_bytes": 1 << 20, "dtype": "int8"}}, "cache.memory_bytes", "max_context to at most 1792"),
    ({"cache": {"dtype": "int8"}, "pools": {"decode": {"gpus": 1}}}, "cache.dtype", "leave cache.dtype out"),
    ({"cache": {"host_bytes": 9 * GIB}}, "cache.host_bytes", "set it to at most"),
    ({"cache": {"disk_path": "/dev/null/pages"}}, "cache.disk_path", "name a directory"),
    ({"logging": {"directory": "/dev/null/logs"}}, "logging.directory", "name a directory"),
    ({"batches": {"directory": "/dev/null"}}, "batches.directory", "name a directory"),
    ({"metrics": {"step_log": "/dev/null/steps"}}, "metrics.step_log", "name a directory"),
    ({"pools": {"prefill": {"workers": 40}}}, "pools", "start fewer workers"),
    ({"pools": {"prefill": {"max": 40}}}, "pools", "41 workers need"),
    ({"pools": {"decode": {"gpus": 1}}}, "pools.prefill.gpus", "set them to 0"),
    ({"transport": {"name": "loopback"}}, "transport.name", "choose ucx or nccl"),
    ({"http": {"port": 8000, "host": "no.such.host.invalid"}}, "http.host", "use 127.0.0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "key", "remedy"), BAD, ids=[case[1] for case in BAD])
def test_impossible_values_name_key_and_remedy(
    checkpoint: Path, free_port: int, sections: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(checkpoint, free_port, **sections).plan()
    assert caught.value.key == key
    assert remedy in caught.value.message
    if key != "pools":
        assert key.split(".")[-1] in caught.value.message


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"cache": {"page_size": 0}}, "cache.page_size"),
        ({"cache": {"page_size": 48}}, "scheduling.chunk_size"),
        ({"pools": {"prefill": {"workers": -1}}}, "pools.prefill.workers"),
        ({"pools": {"decode": {"workers": 0}}}, "pools.decode.workers"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"cahce": {}}, "cahce"),
        ({"model": {"dtype": "int3"}}, "model.dtype"),
        ({"cache": {"disk_path": "pages", "prefix_cache": False}}, "cache.disk_path"),
        ({"cache": {"host_bytes": 1, "prefix_cache": False}}, "cache.host_bytes"),
    ],
)
def test_values_wrong_in_themselves(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree)
    assert caught.value.key == key


def test_a_directory_for_pages_is_made_and_named_as_workers_need_it(
    checkpoint: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = preflight(checkpoint, free_port, cache={"disk_path": "some/pages", "disk_bytes": 1 << 20})
    assert checked.check_tiers().status == "ok"
    assert checked.plan().config.cache.disk_path == str(tmp_path / "some/pages")
    assert (tmp_path / "some/pages").is_dir()


def test_too_little_room_on_disk_is_a_warning(checkpoint: Path, free_port: int, tmp_path: Path) -> None:
    """Pages of an earlier cluster may fill the rest."""
    finding = preflight(checkpoint, free_port, cache={"disk_path": str(tmp_path), "disk_bytes": 1 << 60}).check_tiers()
    assert finding.status == "warn"
    assert "cache.disk_bytes" in finding.remedy


def test_copies_in_host_memory_are_no_room_for_pages(checkpoint: Path, free_port: int) -> None:
    def pages(host_bytes: int) -> int:
        cache = {"host_bytes": host_bytes, "memory_share": 0.5, "max_memory_bytes": 0}
        return preflight(checkpoint, free_port, cache=cache).plan().kv_bytes[Role.DECODE]

    assert pages(0) - pages(2 * GIB) == GIB, "of each of the two workers"
    with pytest.raises(ConfigError, match=r"weights, cache\.host_bytes and processes"):
        preflight(checkpoint, free_port, cache={"host_bytes": 8 * GIB}).check_memory()


def test_on_other_hosts_the_directory_for_pages_is_absolute(checkpoint: Path, free_port: int) -> None:
    tree = {"model": {"path": str(checkpoint)}, "http": {"port": free_port}, "cache": {"disk_path": "pages"}}
    with pytest.raises(ConfigError, match="absolute") as caught:
        Preflight(from_dict(tree), HOST, local=False).check_tiers()
    assert caught.value.key == "cache.disk_path"


PLACES = [("logging", "directory"), ("batches", "directory"), ("metrics", "step_log")]


@pytest.mark.parametrize(("section", "name"), PLACES, ids=[section for section, _ in PLACES])
def test_processes_find_a_directory_wherever_they_run(
    checkpoint: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for place, path in (("some/logs", tmp_path / "some/logs"), ("~/logs", tmp_path / "home/logs")):
        checked = preflight(checkpoint, free_port, **{section: {name: place}})
        assert str(path) in checked.check_directories().detail
        assert getattr(getattr(checked.plan().config, section), name) == str(path)
    tree = {"model": {"path": str(checkpoint)}, section: {name: "some/logs"}}
    with pytest.raises(ConfigError, match="absolute") as caught:
        Preflight(from_dict(tree), HOST, local=False).check_directories()
    assert caught.value.key == f"{section}.{name}"


def test_tracing_without_its_packages_is_refused_before_anything_starts(
    checkpoint: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = preflight(checkpoint, free_port, tracing={"otlp_endpoint": "http://collector:4318"})
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="otel"):
        checked.check_tracing()


def test_a_port_in_use_is_named_with_a_remedy(checkpoint: Path, taken_port: int) -> None:
    with pytest.raises(ConfigError, match=r"stop what listens there, or choose another with --port") as caught:
        preflight(checkpoint, taken_port).plan()
    assert caught.value.key == "http.port"
    assert str(taken_port) in caught.value.message


def test_a_port_of_ones_own_cluster_is_told_apart(
    checkpoint: Path, taken_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    statefile.write(cluster_file(port=taken_port))
    says = rf"a Tandem cluster of yours, ready \(pid .*\); end it with `tandem stop --port {taken_port}`"
    with pytest.raises(ConfigError, match=says):
        preflight(checkpoint, taken_port).plan()


@pytest.mark.parametrize("mode", ["disabled", "k8s"])
def test_beyond_loopback_rays_token_is_required(
    checkpoint: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ConfigError, match="unset RAY_AUTH_MODE"):
        preflight(checkpoint, free_port, http={"host": "0.0.0.0", "port": free_port}).check_token()
    assert preflight(checkpoint, free_port).check_token().status == "warn"
    for name in ("token", ""):
        monkeypatch.setenv("RAY_AUTH_MODE", name) if name else monkeypatch.delenv("RAY_AUTH_MODE")
        open_to_all = preflight(checkpoint, free_port, http={"host": "0.0.0.0", "port": free_port})
        assert open_to_all.check_token().status == "ok"


def test_another_owner_of_a_top_level_name_is_refused(
    checkpoint: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {"router": ["some-router", "tandem-serving"], "tandem": ["tandem-serving"]}
    monkeypatch.setattr("tandem.cluster.checks.preflight._owners", lambda: owners)
    with pytest.raises(ConfigError, match="some-router owns the package router") as caught:
        preflight(checkpoint, free_port).plan()
    assert "pip uninstall some-router" in caught.value.message


def test_a_package_that_shadows_ours_is_refused(
    checkpoint: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decode_worker").mkdir()
    (tmp_path / "decode_worker" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "decode_worker", raising=False)
    with pytest.raises(ConfigError, match="decode_worker comes from"):
        preflight(checkpoint, free_port).plan()


@pytest.mark.parametrize(
    ("dtype", "per_token", "num_tokens"),
    [("auto", "2.0 KiB a token", "4,096 tokens in float32"),
     ("bfloat16", "1.0 KiB a token", "8,192 tokens in bfloat16"),
     ("int8", "576 B a token", "14,560 tokens in int8")],
)  # fmt: skip
def test_the_doctor_says_for_how_many_tokens_there_is_room(
    checkpoint: Path, free_port: int, dtype: str, per_token: str, num_tokens: str
) -> None:
    found = preflight(checkpoint, free_port, cache={"dtype": dtype, "memory_bytes": 8 << 20}).findings()
    details = {finding.check: finding.detail for finding in found}
    assert per_token in details["pages"]
    assert num_tokens in details["memory"]


@pytest.mark.parametrize(
    ("num_sliding", "cache", "most"),
    [
        (3, {"memory_bytes": 2 << 20}, 0),  # 64 places of one layer, and 21 of the three others: 127 of 128 pages
        (3, {"memory_bytes": 1 << 20}, 512),
        (3, {"memory_bytes": 2 << 20, "mixed_windows": False}, 1024),
        (3, {"memory_bytes": 1 << 20, "max_context": 64}, 0),
        (4, {"memory_bytes": 2 << 20}, 0),  # 21 places of all layers
        (4, {"memory_bytes": 1 << 20}, 512),
        (1, {"memory_bytes": 2 << 20}, 1024),
    ],
)
def test_a_request_has_room_where_workers_keep_what_layers_with_a_window_see(
    checkpoint: Path, free_port: int, num_sliding: int, cache: dict[str, Any], most: int
) -> None:
    """Of a context of 2048 tokens, 4 MiB were all kept; the windows have 64."""
    config = json.loads((checkpoint / "config.json").read_text())
    kinds = ["sliding_attention"] * num_sliding + ["full_attention"] * (4 - num_sliding)
    (checkpoint / "config.json").write_text(json.dumps({**config, "sliding_window": 64, "layer_types": kinds}))
    checks = preflight(checkpoint, free_port, cache=cache)
    if most:
        with pytest.raises(ConfigError, match=f"set cache.max_context to at most {most}$"):
            checks.check_memory()
    else:
        assert checks.check_memory().status == "ok"


@pytest.fixture
def mixed(checkpoint: Path) -> Path:
    """Every other layer sees 64 tokens."""
    config = json.loads((checkpoint / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * 2
    (checkpoint / "config.json").write_text(json.dumps({**config, "sliding_window": 64, "layer_types": kinds}))
    return checkpoint


def test_cpus_and_gpus_that_would_keep_other_pages_are_refused(mixed: Path, free_port: int) -> None:
    on_gpu, on_both = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}, {"decode": {"gpus": 1}}
    with pytest.raises(ConfigError, match=r"cannot exchange pages; set cache\.mixed_windows to false"):
        preflight(mixed, free_port, pools=on_both).check_cache_dtype()
    for pools, cache in ((on_gpu, {}), (on_both, {"mixed_windows": False}), (on_both, {"max_context": 64}), ({}, {})):
        assert preflight(mixed, free_port, pools=pools, cache=cache).check_cache_dtype().status == "ok"


def test_cpus_and_gpus_keep_other_pages_where_all_layers_slide(mixed: Path, free_port: int) -> None:
    """GPUs read whole blocks and keep 256 tokens more; where no text is longer than the window, both keep all."""
    config = json.loads((mixed / "config.json").read_text())
    (mixed / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"] * 4}))
    on_gpu, on_both = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}, {"decode": {"gpus": 1}}
    for max_context in (0, 65, 400):
        cache = {"max_context": max_context, "mixed_windows": False}
        with pytest.raises(ConfigError, match=r"cannot exchange pages; .* cache\.max_context to at most 64") as told:
            preflight(mixed, free_port, pools=on_both, cache=cache).check_cache_dtype()
        assert told.value.key == "pools.prefill.gpus"
    for pools, max_context in ((on_gpu, 0), ({}, 0), (on_both, 64)):
        checks = preflight(mixed, free_port, pools=pools, cache={"max_context": max_context})
        assert checks.check_cache_dtype().status == "ok"


def test_the_room_of_a_mixed_model_is_what_its_workers_hold(mixed: Path, free_port: int) -> None:
    """Of 256 pages of two layers a text has one a place, and 21 more for its window and a chunk of 512."""
    cache, scheduling = {"memory_bytes": 8 << 20}, {"chunk_size": 512}
    detail = preflight(mixed, free_port, cache=cache, scheduling=scheduling).check_memory().detail
    assert "room for one text of 7,520 tokens, or 4,096 tokens of texts within the window in float32" in detail
    checks = preflight(mixed, free_port, cache={**cache, "mixed_windows": False}, scheduling=scheduling)
    assert "room for 4,096 tokens in float32" in checks.check_memory().detail


def test_no_host_memory_is_set_aside_for_copies_that_no_worker_makes(mixed: Path, free_port: int) -> None:
    def plan(**cache: Any) -> tuple[int, str]:
        checks = preflight(mixed, free_port, cache={"max_memory_bytes": 0, **cache})
        return checks._kv_bytes(Role.DECODE), checks._fixed_words

    assert plan(host_bytes=64 << 20) == plan()
    assert plan(host_bytes=64 << 20, mixed_windows=False)[0] < plan()[0]
    assert preflight(mixed, free_port, cache={"host_bytes": 1 << 60}).check_tiers().status == "warn", "nobody takes it"


def test_copies_that_no_worker_makes_are_a_warning(mixed: Path, free_port: int) -> None:

    def found(**cache: Any) -> tuple[str, str]:
        finding = preflight(mixed, free_port, cache={"host_bytes": 1 << 20, **cache}).check_tiers()
        return finding.status, finding.remedy

    assert found() == ("warn", "set cache.mixed_windows to false, or keep no copies")
    assert found(mixed_windows=False)[0] == found(max_context=64)[0] == found(host_bytes=0)[0] == "ok"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_pages_on_gpus_have_the_models_type(checkpoint: Path, free_port: int, dtype: str) -> None:
    checks = preflight(checkpoint, free_port, cache={"dtype": dtype}, pools={"decode": {"gpus": 1}})
    assert "K and V in bfloat16" in checks.check_cache_dtype().detail


@pytest.mark.parametrize(
    ("model", "cache", "dtype"),
    [
        ({}, {}, "bfloat16"),
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({}, {"dtype": "float32"}, "float32"),
        ({"dtype": "float32"}, {}, "float32"),
        ({"quantize": "int8"}, {}, "bfloat16"),
        ({"quantize": "int8", "kernels": "vectors"}, {}, "bfloat16"),
        ({"quantize": "int8", "dtype": "float32"}, {}, "float32"),
        ({"kernels": "vectors"}, {}, "bfloat16"),
        ({"kernels": "torch"}, {}, "float32"),
        ({"kernels": "torch", "dtype": "bfloat16"}, {}, "bfloat16"),
    ],
)
def test_pages_on_cpus_that_multiply_bfloat16_hold_it(
    checkpoint: Path, free_port: int, model: dict[str, str], cache: dict[str, str], dtype: str
) -> None:
    def found(host: Host) -> str:
        tree = {"model": {"path": str(checkpoint), **model}, "cache": cache, "http": {"port": free_port}}
        return Preflight(from_dict(tree), host).check_cache_dtype().detail

    assert f"K and V in {dtype}, " in found(dataclasses.replace(HOST, multiplies_bfloat16=True))
    elsewhere = "bfloat16" if model.get("dtype") == "bfloat16" else "float32"  # torch's arithmetic
    assert f"K and V in {elsewhere}, " in found(HOST)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pages_have_no_more_bits_than_what_is_computed(checkpoint: Path, free_port: int, dtype: str) -> None:
    model = {"path": str(checkpoint), "dtype": dtype}
    checks = preflight(checkpoint, free_port, cache={"dtype": "float32"}, model=model)
    with pytest.raises(ConfigError, match=rf"cache.dtype is float32, but pages have the type .* {dtype}; leave"):
        checks.check_cache_dtype()


def test_what_this_host_multiplies_is_what_its_kernels_do() -> None:
    assert this_host().multiplies_bfloat16 == has_bfloat16_products()


def test_on_a_gpu_pages_get_a_share_of_what_weights_leave() -> None:
    config = from_dict({"cache": {"memory_share": 0.5}})
    assert share_of_gpu(config, total_bytes=90, free_bytes=80, weight_bytes=30, gpus=2.0) == 25
    assert share_of_gpu(config, total_bytes=90, free_bytes=80, weight_bytes=25, gpus=0.5) == 10
    assert share_of_gpu(config, total_bytes=90, free_bytes=50, weight_bytes=25, gpus=0.5) == 10, "the other one runs"
    assert share_of_gpu(config, total_bytes=90, free_bytes=40, weight_bytes=50, gpus=0.5) < 0


@pytest.mark.parametrize(
    ("config", "options", "bytes_each"),
    [
        ({}, {}, 2.0),
        ({}, {"dtype": "float32"}, 2.0),  # also computed so they stay as they are
        ({}, {"quantize": "int8"}, 3.0),  # while they are rounded
        ({"num_local_experts": 8}, {}, 2.0),  # experts too
        ({"dtype": "float32"}, {}, 2.0),  # what the tensors are counts, not what the config says
    ],
)
def test_memory_is_planned_for_weights_as_they_will_lie(
    checkpoint: Path, free_port: int, config: dict[str, Any], options: dict[str, str], bytes_each: float
) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    found = preflight(checkpoint, free_port, model={"path": str(checkpoint), **options})
    assert found.weight_bytes == int(512 * 512 * bytes_each)


#: Of one layer of 512 to 256 features.
AWQ = {
    "model.layers.0.q.qweight": ("I32", (512, 32)),
    "model.layers.0.q.qzeros": ("I32", (4, 32)),
    "model.layers.0.q.scales": ("F16", (4, 256)),
    "lm_head.weight": ("F16", (512, 1024)),
}


def test_memory_of_quantised_checkpoints_is_planned_by_what_becomes_of_them() -> None:
    heads = {name: TensorHead(*head) for name, head in AWQ.items()}
    awq = read_scheme({"quant_method": "awq", "bits": 4, "group_size": 128})
    # The layer as int8, and the head as it is; the layer six times in float32 for a while.
    assert loaded_bytes(heads, awq) == 512 * 256 + 2 * 512 * 1024 + 6 * 4 * 512 * 256
    gptq = read_scheme({"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert loaded_bytes(heads, gptq, "int8") == loaded_bytes(heads, awq)
    assert loaded_bytes(heads, gptq) == 512 * 256 * 5 // 8 + 2 * 512 * 1024 + 6 * 4 * 512 * 256


@pytest.mark.parametrize(
    ("said", "options", "error", "named"),
    [
        ({"quant_method": "bitsandbytes"}, {}, UnsupportedModelError, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"dtype": "bfloat16"}, ConfigError, "float32"),
    ],
)
def test_quantised_checkpoints_that_no_worker_would_load_are_refused(
    checkpoint: Path,
    free_port: int,
    said: dict[str, Any],
    options: dict[str, str],
    error: type[TandemError],
    named: str,
) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))
    with pytest.raises(error, match=named):
        preflight(checkpoint, free_port, model={"path": str(checkpoint), **options}).check_model()


def test_memory_is_shared_among_all_workers_and_capped(checkpoint: Path, free_port: int) -> None:
    pools = {"prefill": {"workers": 1}, "decode": {"workers": 3}}
    plan = preflight(checkpoint, free_port, pools=pools, cache={"max_memory_bytes": 0}).plan()
    weights = 512 * 512 * 2  # bfloat16, as in the checkpoint
    rest = 16 * GIB - 4 * (WORKER_OVERHEAD_BYTES + weights)
    assert plan.kv_bytes == {"prefill": int(0.7 * rest) // 4, "decode": int(0.7 * rest) // 4}
    capped = preflight(checkpoint, free_port, pools=pools, cache={"max_memory_bytes": GIB}).plan()
    assert set(capped.kv_bytes.values()) == {GIB}
    asked = preflight(checkpoint, free_port, pools=pools, cache={"memory_bytes": 2 * GIB}).plan()
    assert set(asked.kv_bytes.values()) == {2 * GIB}


@pytest.fixture
def drafted(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    """Sections with a draft for the checkpoint: of the same tokens, with 1 MiB of weights in bfloat16."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("config.json", "model.safetensors"):
        (draft / name).write_bytes((checkpoint / name).read_bytes())
    for directory in (checkpoint, draft):
        make_tokenizer(300).save_pretrained(directory)
    return {"speculation": {"draft_model": str(draft), "draft_memory_bytes": GIB}}


def test_the_draft_is_counted_at_decode(checkpoint: Path, free_port: int, drafted: dict[str, Any]) -> None:
    pools, cache = {"prefill": {"workers": 1}, "decode": {"workers": 3}}, {"max_memory_bytes": 0}
    weights = 512 * 512 * 2
    fixed = 4 * (WORKER_OVERHEAD_BYTES + weights) + 3 * (weights + GIB)
    checked = preflight(checkpoint, free_port, pools=pools, cache=cache, **drafted)
    assert set(checked.plan().kv_bytes.values()) == {int(0.7 * (16 * GIB - fixed)) // 4}
    finding = checked.check_draft()
    assert (finding.status, "draft: weights 512.0 KiB, pages 1.0 GiB" in finding.detail) == ("ok", True), finding
    pools = {"prefill": {"workers": 1}, "decode": {"workers": 12}}
    preflight(checkpoint, free_port, pools=pools).check_memory()
    with pytest.raises(ConfigError, match="start fewer workers"):
        preflight(checkpoint, free_port, pools=pools, **drafted).check_memory()
    rounded = drafted["speculation"] | {"draft_quantize": "int8"}
    config = from_dict({"model": {"path": str(checkpoint)}, "speculation": rounded})
    assert draft_bytes(config) == GIB + weights * 3 // 2
    kv_bytes = {"prefill": GIB, "decode": GIB}
    check_room(config, HOST, kv_bytes, {"prefill": 9})
    with pytest.raises(ConfigError, match="9 more workers need"):
        check_room(config, HOST, kv_bytes, {"decode": 9})


def test_workers_of_this_host_find_the_draft_where_it_was_checked(
    checkpoint: Path, free_port: int, drafted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Path(drafted["speculation"]["draft_model"])
    monkeypatch.chdir(draft.parent)
    drafted["speculation"]["draft_model"] = "./draft"
    plan = preflight(checkpoint, free_port, **drafted).plan()
    assert plan.config.speculation.draft_model == str(draft)
    monkeypatch.chdir("/")
    assert Preflight(plan.config, HOST).check_draft().status == "ok"


def test_a_draft_that_cannot_propose_is_refused_before_anything_starts(
    checkpoint: Path, free_port: int, drafted: dict[str, Any], tmp_path: Path
) -> None:
    draft = Path(drafted["speculation"]["draft_model"])

    def refusal(**sections: Any) -> TandemError:
        with pytest.raises(TandemError) as caught:
            Preflight(from_dict({"model": {"path": str(checkpoint)}, **drafted, **sections}), HOST).check_draft()
        return caught.value

    pools = {"decode": {"gpus": 1}, "prefill": {"gpus": 1}}
    assert "proposes on CPUs only" in refusal(pools=pools).message
    small = {"speculation": {"draft_model": str(draft), "draft_memory_bytes": 1 << 20}}
    pages = {"cache": {"page_size": 1024}, "scheduling": {"chunk_size": 1024}}
    assert "a page of draft takes 2097152" in refusal(**small, **pages).message
    assert "there is no directory" in refusal(speculation={"draft_model": str(tmp_path / "none")}).message
    make_tokenizer(301).save_pretrained(draft)
    error = refusal()
    assert isinstance(error, ConfigError)
    assert error.key == "speculation.draft_model"
    assert "it has 301 tokens, the model 300" in error.message
    (draft / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal().message


def test_a_simulated_engine_takes_no_draft() -> None:
    model = {"engine": "simulated", "time_model": "times.yaml"}
    with pytest.raises(ConfigError) as caught:
        from_dict({"model": model, "speculation": {"draft_model": "embedded"}})
    assert caught.value.key == "speculation.draft_model"


def test_threads_are_an_equal_share_unless_set(checkpoint: Path, free_port: int) -> None:
    pools = {"prefill": {"workers": 1, "threads": 5}, "decode": {"workers": 2}}
    assert preflight(checkpoint, free_port, pools=pools).plan().num_threads == {"prefill": 5, "decode": 2}


def test_without_prefill_workers_decode_has_all_memory_and_cores(checkpoint: Path, free_port: int) -> None:
    def plan(num_prefill: int) -> Plan:
        pools = {"prefill": {"workers": num_prefill}, "decode": {"workers": 1}}
        return preflight(checkpoint, free_port, pools=pools, cache={"max_memory_bytes": 0}).plan()

    split, colocated = plan(1), plan(0)
    assert (split.num_threads[Role.DECODE], colocated.num_threads[Role.DECODE]) == (4, 8)
    assert colocated.kv_bytes[Role.DECODE] > 1.9 * split.kv_bytes[Role.DECODE]
    said = "".join(ready_banner("http://127.0.0.1:1", 1, colocated, "/logs"))
    assert "tandem scale --port 1 --prefill 1 --decode 1" in said


@pytest.mark.parametrize(("served", "shown"), [((), "small"), (("a", "b"), "a"), (("*",), "small"), (("*", "b"), "b")])
def test_the_name_that_is_shown_is_one_that_requests_may_use(
    checkpoint: Path, free_port: int, served: tuple[str, ...], shown: str
) -> None:
    tree = {"model": {"path": str(checkpoint), "served_names": served}, "http": {"port": free_port}}
    plan = Preflight(from_dict(tree), HOST).plan()
    assert plan.model_name == shown
    assert f'"model": "{shown}"' in "".join(ready_banner("http://127.0.0.1:1", 1, plan, "/logs"))


@pytest.mark.parametrize("keys", ["", "sk-first-0123456789"])
def test_the_command_to_try_carries_a_key_where_one_is_needed(
    checkpoint: Path, free_port: int, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", keys)
    plan = Preflight(from_dict({"model": {"path": str(checkpoint)}, "http": {"port": free_port}}), HOST).plan()
    said = "".join(ready_banner("http://127.0.0.1:1", 1, plan, "/logs"))
    assert ("-H 'Authorization: Bearer KEY'" in said) == bool(keys)
    assert "sk-first" not in said


def test_served_names_default_to_the_models_own(checkpoint: Path, free_port: int) -> None:
    assert preflight(checkpoint, free_port).plan().config.model.served_names == ("small",)


def test_on_several_nodes_each_node_decides_for_itself(checkpoint: Path, free_port: int) -> None:
    tree = {"model": {"path": str(checkpoint)}, "http": {"port": free_port}, "pools": {"prefill": {"workers": 500}}}
    plan = Preflight(from_dict(tree), HOST, local=False).plan()
    assert set(plan.kv_bytes.values()) == {0}
    assert set(plan.num_threads.values()) == {0}


def test_more_workers_than_memory_are_refused(checkpoint: Path) -> None:
    config = from_dict({"model": {"path": str(checkpoint)}})
    kv_bytes = {"prefill": GIB, "decode": GIB}
    check_room(config, HOST, kv_bytes, {"prefill": 2, "decode": 3})
    with pytest.raises(ConfigError, match="20 more workers need") as caught:
        check_room(config, HOST, kv_bytes, {"prefill": 20})
    assert "scale to fewer" in caught.value.message


def test_a_missing_model_is_told_once(free_port: int) -> None:
    findings = preflight(Path("/no/such/model"), free_port).findings()
    assert [f.check for f in findings if f.status == "fail"] == ["model"]


def test_findings_list_every_check_with_its_remedy(checkpoint: Path, taken_port: int) -> None:
    findings = {f.check: f for f in preflight(checkpoint, taken_port, cache={"max_context": 4096}).findings()}
    assert findings["port"].status == findings["context"].status == "fail"
    assert findings["port"].remedy
    assert findings["memory"].status == findings["transport"].status == findings["model"].status == "ok"


@pytest.mark.parametrize(
    ("cuda", "there", "missing"),
    [
        (13, {"nixl_cu12"}, MissingBuild(13, "nixl-cu13", "cuda13")),
        (13, {"nixl_cu12", "nixl_cu13"}, None),
        (12, {"nixl_cu12"}, None),
        (None, {"nixl_cu12"}, None),
        (14, {"nixl_cu12"}, None),  # no extra brings one
    ],
)
def test_a_torch_for_cuda_13_wants_its_build_of_nixl(
    cuda: int | None, there: set[str], missing: MissingBuild | None
) -> None:
    assert missing_build(cuda, there.__contains__) == missing


@pytest.mark.parametrize(
    ("line", "cuda"),
    [("cuda: Optional[str] = '13.0'", 13), ("cuda = '12.8'", 12), ("cuda: Optional[str] = None", None)],
)
def test_torchs_version_file_names_its_cuda(line: str, cuda: int | None) -> None:
    assert cuda_of(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n") == cuda


@pytest.mark.processes
def test_torchs_cuda_is_found_without_torch() -> None:
    import torch

    assert torch_cuda() == (int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else None)
    code = "from tandem.cluster.checks.nixl_build import torch_cuda; torch_cuda()"
    assert loaded_by(code, "torch") == []


def test_gpus_without_nixls_build_for_them_are_warned_of(
    checkpoint: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.checks.preflight.torch_cuda", lambda: 13)
    monkeypatch.setattr("tandem.cluster.checks.preflight._is_installed", lambda module: module != "nixl_cu13")
    on_gpu = preflight(checkpoint, free_port, pools={"prefill": {"gpus": 1}, "decode": {"gpus": 1}}).check_transport()
    assert (on_gpu.status, on_gpu.remedy) == (
        "warn",
        "pip install 'tandem-serving[cuda13]' on the hosts with GPUs",
    )
    assert "built for CUDA 13, and pages on GPUs need nixl-cu13" in on_gpu.detail
    assert preflight(checkpoint, free_port).check_transport().status == "ok"


def test_the_embedded_model_passes_on_this_host(free_port: int) -> None:
    plan = Preflight(load(None, {"http.port": free_port}), this_host()).plan()
    assert plan.facts.name == "tandem-tiny"
    assert plan.facts.max_positions


def test_facts_of_a_checkpoint(checkpoint: Path) -> None:
    facts = read_facts(str(checkpoint), checkpoint)
    assert (facts.max_positions, facts.num_parameters, facts.head_dim) == (2048, 512 * 512, 32)
    assert facts.kv_bytes_per_token("float32") == 2 * 4 * 2 * 32 * 4
    assert facts.kv_bytes_per_token("int8") == 2 * 4 * 2 * (32 + 4)
    assert facts.weight_bytes("bfloat16") == 512 * 512 * 2


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("./nowhere", "there is no directory"),
        ("/no/such/dir", "there is no directory"),
        ("a-name-alone", "a hub id such as"),
    ],
)
def test_a_model_that_is_not_there(path: str, says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        resolve_model(path)


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="safetensors"):
        resolve_model(str(tmp_path))


def test_a_hub_id_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match="download it elsewhere and name its directory"):
        resolve_model("some-org/some-model")


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (1 << 41, "2.0 TiB")])
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def simulated(directory: Path, text: str) -> dict[str, Any]:
    file = directory / "times.yaml"
    file.write_text(text)
    return {"engine": "simulated", "time_model": str(file)}


def test_simulated_workers_need_no_weights_and_hardly_any_memory(checkpoint: Path, free_port: int) -> None:
    (checkpoint / "model.safetensors").unlink()
    model = {"path": str(checkpoint), **simulated(checkpoint, "decode: {tokens: 4000000}")}
    host = dataclasses.replace(HOST, available_bytes=10 * WORKER_OVERHEAD_BYTES)
    plan = preflight(checkpoint, free_port, host, model=model, pools={"prefill": {"workers": 4}}).plan()
    assert plan.kv_bytes == {Role.PREFILL: 64 * 100_000, Role.DECODE: 64 * 4_000_000}
    with pytest.raises(ConfigError, match="start fewer workers"):
        preflight(checkpoint, free_port, host, model=model, pools={"prefill": {"workers": 10}}).plan()


def test_simulated_workers_have_room_for_one_request(checkpoint: Path, free_port: int) -> None:
    model = {"path": str(checkpoint), **simulated(checkpoint, "prefill: {tokens: 1023}")}
    with pytest.raises(
        ConfigError, match=r"prefill worker room for 992 tokens, .* set cache.max_context to at most 992"
    ):
        preflight(checkpoint, free_port, model=model).plan()


@pytest.mark.parametrize(
    ("model", "pools", "key", "named"),
    [
        ({"engine": "simulated"}, {}, "model.time_model", "name a file"),
        ({"time_model": "times.yaml"}, {}, "model.time_model", "set model.engine to simulated"),
        ({"engine": "simulated", "time_model": "t"}, {"decode": {"gpus": 1}}, "pools.prefill.gpus", "takes no GPU"),
    ],
)
def test_a_simulated_engine_has_a_time_model_and_no_gpu(
    model: dict[str, Any], pools: dict[str, Any], key: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        from_dict({"model": model, "pools": pools})
    assert caught.value.key == key


def test_a_time_model_that_is_wrong_is_named(checkpoint: Path, free_port: int) -> None:
    model = {"path": str(checkpoint), **simulated(checkpoint, "card: {tflop: 7}")}
    with pytest.raises(ConfigError, match=r"times\.yaml: unknown key card.tflop; did you mean tflops"):
        preflight(checkpoint, free_port, model=model).check_model()


def test_workers_of_several_types_are_for_simulations_alone(checkpoint: Path, free_port: int) -> None:
    types = "types: {a: {card: h100}, b: {card: a100}}\nprefill: {type: a}\n"
    text = f"{types}decode: {{type: a, others: [{{workers: 1, type: b}}]}}"
    model = {"path": str(checkpoint), **simulated(checkpoint, text)}
    with pytest.raises(ConfigError, match=r"decode workers of several types \(decode.others\)"):
        preflight(checkpoint, free_port, model=model).check_model()


def test_a_checkpoint_that_gives_vectors_needs_a_prefill_worker(checkpoint: Path, free_port: int) -> None:
    write_modules(checkpoint, "last")
    with pytest.raises(ConfigError, match="gives vectors, which prefill workers alone make") as caught:
        preflight(checkpoint, free_port, pools={"prefill": {"workers": 0}}).plan()
    assert caught.value.key == "pools.prefill.workers"
    preflight(checkpoint, free_port).plan()


def test_quantised_checkpoints_may_be_multiplied_in_bfloat16_where_cpus_do(checkpoint: Path, free_port: int) -> None:
    file = checkpoint / "config.json"
    said = {"quant_method": "awq", "bits": 4, "group_size": 128}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))
    tree = {"model": {"path": str(checkpoint), "dtype": "bfloat16"}, "http": {"port": free_port}}
    Preflight(from_dict(tree), dataclasses.replace(HOST, multiplies_bfloat16=True)).check_model()
    with pytest.raises(ConfigError, match="on CPUs that multiply that"):
        Preflight(from_dict(tree), HOST).check_model()
