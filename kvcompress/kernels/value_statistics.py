"""Per-token spread of the value vectors: what VASE protects, and the step of per-token quantization.

For asymmetric b-bit per-token quantization the step is Range(v) / (2**b - 1) and the expected squared error
step**2 / 12, so the statistic that protects a token from eviction also predicts its quantization error.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Statistic = Literal["range", "absmax", "l2", "var"]


def value_statistic(values: Tensor, statistic: Statistic) -> Tensor:
    """One number per token from its value vector (VASE section 2):

        range   max_c v[c] - min_c v[c]
        absmax  max_c |v[c]|
        l2      sqrt(sum_c v[c]**2)
        var     sum_c (v[c] - mean)**2 / (d - 1)

    Args:
        values: (..., head_dim), any float dtype.

    Returns:
        (...) float32; what overflows counts as the largest finite number, so that infinity stays free for the
        tokens that are protected whatever their values.
    """
    values = values.float()
    if statistic == "range":
        low, high = torch.aminmax(values, dim=-1)
        spread = high - low
    elif statistic == "absmax":
        spread = values.abs().amax(dim=-1)
    elif statistic == "l2":
        spread = torch.linalg.vector_norm(values, dim=-1)
    else:
        spread = values.var(dim=-1, unbiased=True)
    return spread.clamp_max(torch.finfo(torch.float32).max)
