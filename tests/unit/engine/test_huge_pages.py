"""Where weights and pages lie."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from tandem.engine.huge_pages import WeightMemory

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float32]


def test_places_are_aligned_and_apart() -> None:
    memory = WeightMemory()
    shapes = [(3,), (1,), (5, 7), (1000, 3), (20_000_000,), (2, 2, 2)]
    tensors = [memory.empty(*shape, dtype=dtype) for shape, dtype in zip(shapes, TYPES, strict=True)]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()
        tensor.fill_(number)
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, TYPES[number])
        assert torch.all(tensor == number)


@pytest.mark.long
def test_memory_goes_with_its_last_tensor() -> None:
    process = psutil.Process()
    memory = WeightMemory()
    before = process.memory_info().rss
    for _ in range(5):
        memory.empty(15_000_000, dtype=torch.float32).fill_(1.0)  # 60 MB
        gc.collect()
    assert process.memory_info().rss - before < 90_000_000
