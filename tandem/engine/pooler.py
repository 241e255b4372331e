"""From the hidden states of a prompt's tokens to the numbers of one vector."""

from __future__ import annotations

import torch

from tandem.core.errors import InternalError


def sum_rows(rows: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """`total` (`[N]`, float64, on any device; `None`: nothing yet) and all of `rows`, `[R, N]`.

    In float64 the sum does not show in which chunks the rows came.
    """
    added = rows.double().sum(dim=0)
    return added if total is None else total + added


def mean_of(total: torch.Tensor, num_rows: int) -> list[float] | InternalError:
    """The numbers of a vector. One with NaN gives an error: the model overflowed."""
    mean = total / num_rows
    return mean.tolist() if bool(torch.isfinite(mean).all()) else InternalError("the model gave NaN for a prompt")
