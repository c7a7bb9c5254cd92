"""The precision that references compute in, and the one that tokens are ranked in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """float32, or float64 for float64, so that a reference can judge itself and its kernel in higher precision."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


_RANKED_BITS = 11  # significant bits of float16


def coarse(tensor: Tensor) -> Tensor:
    """Rounded to 11 significant bits, for ranks that don't depend on the last bits of a matrix product.

    In the first layer a token has the same value vector, and a key of the same norm, wherever it stands, but for
    rounding, which differs with the shape of the batch. Rounded, equal tokens tie, and ties go by position.

    Args:
        tensor: any shape, float32 or float64, finite; stays finite.
    """
    mantissa, exponent = torch.frexp(tensor)
    scale = 2.0**_RANKED_BITS
    largest = torch.finfo(tensor.dtype).max
    return torch.ldexp((mantissa * scale).round() / scale, exponent).clamp(-largest, largest)
