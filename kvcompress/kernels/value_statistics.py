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
        (...) float32.
    """
    values = values.float()
    if statistic == "range":
        low, high = torch.aminmax(values, dim=-1)
        return high - low
    if statistic == "absmax":
        return values.abs().amax(dim=-1)
    if statistic == "l2":
        return torch.linalg.vector_norm(values, dim=-1)
    return values.var(dim=-1, unbiased=True)
