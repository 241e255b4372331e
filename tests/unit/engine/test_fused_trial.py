"""Why a trial refuses is said: quietly of a module of another kind, as a warning where the machine is at fault."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tandem.core.errors import UnsupportedModelError
from tandem.engine.fuse.trial import attempted, proved


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (TypeError("takes another argument"), logging.INFO),
        (UnsupportedModelError("of another kind"), logging.INFO),
        (torch.OutOfMemoryError("no memory"), logging.WARNING),
        (RuntimeError("Failed to find C compiler"), logging.WARNING),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_a_module_is_left_is_said(error: Exception, level: int, caplog: pytest.LogCaptureFixture) -> None:
    def attempt() -> nn.Module:
        raise error

    with caplog.at_level(logging.INFO):
        assert attempted(nn.Linear(1, 1), attempt) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"Linear is left as it is: {type(error).__name__}: {error}"


def test_a_replacement_with_other_numbers_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fused = proved(
            nn.ReLU(), lambda _: nn.Tanh(), lambda part, dtype: [part(torch.ones(2, dtype=dtype))], torch.float32
        )
    assert fused is None
    assert caplog.messages == ["ReLU is not replaced by Tanh: the numbers differ"]
