"""The Triton kernels compiled for GPUs that need not be there: what an interpreter cannot show, and what they take.

Needs Triton and no GPU: `pip install --no-deps triton` beside a CPU build of torch is enough.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tandem.engine.attention_reference import AttentionParams
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


@pytest.fixture(params=sorted(SHARED_BYTES))
def capability(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched is compiled for the device, and not run: all that was, in order."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tandem.engine import attention_triton

    found: list[Any] = []
    for kernel in (attention_triton._attend_kernel, attention_triton._combine_kernel):
        if not isinstance(kernel, JITFunction):
            pytest.skip("TRITON_INTERPRET is set: kernels are interpreted and not compiled")

        def compile_only(*args: Any, run: Any = kernel.run, **options: Any) -> Any:
            options["warmup"] = True
            found.append(run(*args, **options))
            return found[-1]

        monkeypatch.setattr(kernel, "run", compile_only)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))  # they hold their target
    monkeypatch.setattr(attention_triton, "_num_processors", lambda _: NUM_PROCESSORS[capability])
    monkeypatch.setattr(driver, "_active", _Target(capability))  # no GPU's driver is looked for meanwhile
    return found


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 64), (32, 8, 128), (8, 1, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile_and_fit(
    capability: int,
    compiled: list[Any],
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    params: AttentionParams,
) -> None:
    from tandem.engine.attention_triton import TritonAttention

    paged = Paged.make(torch.device("cpu"), dtype, 32, heads, kv_heads, head_dim)
    backend = TritonAttention()
    backend.attend(paged.batch, paged.arena, 0, paged.query, params)
    backend.attend_decode(paged.step, paged.arena, 0, paged.query[paged.last_rows], params)
    # Chunks; the parts of a decode step; their combination.
    assert len({kernel.hash for kernel in compiled}) == 3
    assert {kernel.metadata.target.arch for kernel in compiled} == {capability}
    assert max(kernel.metadata.shared for kernel in compiled) <= SHARED_BYTES[capability]
