"""The type that references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """float32, or float64 for float64, so that a reference can judge itself and its kernel in higher precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
