"""The Triton kernels compiled for GPUs that need not be there: what an interpreter cannot show, what they take, and how
many of them a decode step has.

Needs Triton and no GPU: `pip install --no-deps triton` beside a CPU build of torch is enough.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.core.sampling import SamplingParams
from tandem.engine.arena import TORCH_DTYPES, KVArena
from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.engine.attention.reference import AttentionParams
from tandem.engine.batch import SequenceInput, build_batch
from tandem.engine.cuda.graphs import DecodeGraphs
from tandem.engine.layout import KVLayout
from tandem.engine.paged_model import PagedModel
from tandem.engine.torch_draw import Draws
from tests.gpu.test_gpu_attention import PARAMS, Paged

triton = pytest.importorskip("triton", reason="no Triton to compile its kernels")

#: Bytes of shared memory that one block may have, by compute capability: A100 and H100 (CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability").
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
NUM_PROCESSORS = {80: 108, 90: 132}


class _Target:
    """All that Triton asks of a driver to compile for its device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


#: A compilation takes seconds: the newer card and bfloat16 stand for all, but in `make test-faults`.
LATER = pytest.mark.faults


@pytest.fixture(params=[pytest.param(80, marks=LATER), 90])
def capability(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched is compiled for the device, and not run: all that was, in order."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tandem.engine.cuda import attention_triton, digests, draw, layer_kernels

    found: list[Any] = []
    of_pages = attention_triton._attend_kernel, attention_triton._combine_kernel, digests._digest_kernel
    others = *of_pages, draw._sum_kernel, draw._find_kernel
    for kernel in (*others, layer_kernels._norm_kernel, layer_kernels._gate_kernel, layer_kernels._place_kernel):
        if not isinstance(kernel, JITFunction):
            pytest.skip("TRITON_INTERPRET is set: kernels are interpreted and not compiled")

        def compile_only(*args: Any, run: Any = kernel.run, **options: Any) -> Any:
            options["warmup"] = True
            with _disable_current_modes():  # who counts torch's operations shall not see the compiler's
                found.append(run(*args, **options))
            return found[-1]

        monkeypatch.setattr(kernel, "run", compile_only)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))  # they hold their target
    monkeypatch.setattr(attention_triton, "_num_processors", lambda _: NUM_PROCESSORS[capability])
    monkeypatch.setattr(driver, "_active", _Target(capability))  # no GPU's driver is looked for meanwhile
    return found


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128), (8, 1, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=LATER)])
def test_kernels_compile_and_fit(
    capability: int,
    compiled: list[Any],
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    params: AttentionParams,
) -> None:
    from tandem.engine.cuda.attention_triton import TritonAttention

    paged = Paged.make(torch.device("cpu"), dtype, 32, heads, kv_heads, head_dim)
    backend = TritonAttention()
    backend.attend(paged.batch, paged.arena, 0, paged.query, params)
    backend.attend_decode(paged.step, paged.arena, 0, paged.query[paged.last_rows], params)
    # Chunks; the parts of a decode step; their combination.
    assert len({kernel.hash for kernel in compiled}) == 3
    assert {kernel.metadata.target.arch for kernel in compiled} == {capability}
    assert max(kernel.metadata.shared for kernel in compiled) <= SHARED_BYTES[capability]


@pytest.mark.parametrize("head_dim", [8, 66, 128])
def test_digests_compile_without_spills(compiled: list[Any], head_dim: int, tmp_path: Path) -> None:
    from tandem.engine.cuda.digests import DeviceDigests

    layout = KVLayout(num_layers=2, num_kv_heads=8, head_dim=head_dim, page_size=16, dtype="bfloat16")
    DeviceDigests(KVArena(layout, 4))([(0, (1, 2)), (1, (3,))])
    (kernel,) = compiled
    assert resources(kernel, tmp_path)[1] == 0


@pytest.mark.parametrize("vocab_size", [320, 128_256, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawing_compiles_without_spills(
    compiled: list[Any], dtype: torch.dtype, vocab_size: int, tmp_path: Path
) -> None:
    from tandem.engine.cuda.draw import draw

    logits = torch.zeros(2, vocab_size, dtype=dtype)
    draw(logits, logits[:, 0], Draws.of([SamplingParams()] * 2, [0.1, 0.2], logits.device))
    assert len(compiled) == 2
    assert [resources(kernel, tmp_path)[1] for kernel in compiled] == [0, 0]


#: A Llama of 1 B, Qwen3 of 0.6 B with its norms of heads, and heads of 96 and 256.
SHAPES = {
    "llama": (2048, 8192, 32, 8, 64, 64, False),
    "qwen3": (1024, 3072, 16, 8, 128, 128, True),
    "phi3": (3072, 8192, 32, 32, 96, 96, False),
    "gemma": (3072, 24_576, 16, 16, 256, 256, False),
    "partial": (4096, 14_336, 48, 8, 128, 64, False),
    "widest": (16_384, 53_248, 32, 8, 512, 512, False),
}


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=LATER), pytest.param("float32", marks=LATER)]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fused_kernels_compile_without_spills(
    capability: int, compiled: list[Any], shape: tuple[Any, ...], dtype: str, tmp_path: Path
) -> None:
    from tandem.engine.cuda import layer_kernels as kernels

    hidden, inner, num_heads, num_kv_heads, head_dim, rotary_dim, has_norms = shape
    # Their positions lie at odd and at even multiples of 8 bytes.
    batches = [build_batch([SequenceInput([0] * num, 2, (1, 0))], 16, torch.device("cpu")) for num in (3, 4)]
    arena = KVArena(KVLayout(1, num_kv_heads, head_dim, 16, dtype), 2)

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=TORCH_DTYPES[dtype])

    scale, norms = torch.ones(hidden), torch.ones(2, head_dim) if has_norms else None
    for batch in batches:
        num = batch.num_tokens
        x = empty(1, num, hidden)
        kernels.normalize(x, scale, 1e-5)
        kernels.add_and_normalize(x, x, scale, 1e-5)
        kernels.gate(empty(1, num, 2 * inner))
        heads = empty(1, num, (num_heads + 2 * num_kv_heads) * head_dim)
        for rows in (None, batch.positions):
            rotary = kernels.Rotary(empty(num, rotary_dim), empty(num, rotary_dim), rows)
            shape_ = kernels.HeadShape(num_heads, num_kv_heads, head_dim, rotary_dim)
            kernels.place_heads(heads, shape_, rotary, norms, 1e-6, batch, arena, 0)
    assert len({kernel.hash for kernel in compiled}) == 5
    for kernel in compiled:
        assert kernel.metadata.shared <= SHARED_BYTES[capability]
        registers, spilled = resources(kernel, tmp_path)
        assert spilled == 0, kernel.metadata.name
        assert registers * 32 * kernel.metadata.num_warps <= 65_536, kernel.metadata.name


def resources(kernel: Any, directory: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that it keeps in memory for want of them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not os.access(tool, os.X_OK):
        pytest.skip("this Triton brings no cuobjdump")
    file = directory / f"{kernel.hash}.cubin"
    file.write_bytes(kernel.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", file], check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return found["REG"], found["STACK"] + found["LOCAL"]


class _Operations(TorchDispatchMode):
    """What torch runs that is neither a view nor an allocation: on a GPU at least one kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        inputs = {part.untyped_storage().data_ptr() for part in tree_leaves(args) if isinstance(part, torch.Tensor)}
        is_view = not func._schema.is_mutable and result.untyped_storage().data_ptr() in inputs
        if not is_view and "empty" not in func.name():
            self.seen[func.name()] += 1
        return result


def launches_of_a_step(num_layers: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of a decode step of 4 sequences, from its inputs on the device to logits; by name."""
    from tandem.engine.cuda.attention_triton import TritonAttention
    from tandem.engine.cuda.decoder import CudaDecoder
    from tandem.engine.cuda.fusing import CudaKit
    from tandem.engine.fuse import recognise

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=num_layers, vocab_size=64)
    config._attn_implementation = ATTENTION_NAME
    model = LlamaForCausalLM(config).eval()
    layout = KVLayout(num_layers, 2, 32, 16, "float32")
    # Kernels that are not run prove nothing.
    monkeypatch.setattr(recognise, "proved", lambda module, make, call, dtype: make(module))
    assert recognise.fuse_parts(model, layout, CudaKit(torch.float32, torch.device("cpu"))).endswith("layer")
    base = model.model
    decoder = CudaDecoder(base.embed_tokens, base.rotary_emb, list(base.layers), base.norm, model.lm_head, 64)
    paged = PagedModel(model, KVArena(layout, 8), TritonAttention(), 64, 64, decoder=decoder)
    steps: list[Any] = []
    DecodeGraphs(paged, max_num_seqs=4, scratch_page=7, capture=lambda compute: steps.append(compute) or compute)
    return launches_of(steps[0], compiled)


def launches_of(compute: Callable[[], object], compiled: list[Any]) -> Counter[str]:
    compiled.clear()
    with _Operations() as torchs_own:
        compute()
    return torchs_own.seen + Counter(kernel.metadata.name for kernel in compiled)


def test_kernels_of_a_decode_step(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (launches_of_a_step(num_layers, compiled, monkeypatch) for num_layers in (1, 2))
    assert long - short == {
        "_norm_kernel": 2,
        "aten::linear": 4,
        "_place_kernel": 1,
        "_attend_kernel": 1,
        "_combine_kernel": 1,
        "_gate_kernel": 1,
    }
    around = short - (long - short)
    # The rows of its sequences are gathered from the block tables that are kept.
    assert around == {"aten::embedding": 1, "aten::index_select.out": 1, "_norm_kernel": 1, "aten::linear": 1}
