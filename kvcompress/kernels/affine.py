"""Asymmetric uniform quantization of groups of numbers: x ~ offset + scale * code.

    offset = min, rounded down to its storage type
    scale  = (max - offset) / (2**b - 1), rounded up to its storage type
    code   = round((x - offset) / scale), 0 .. 2**b - 1

With the offset a plain minimum, a range need not straddle zero. Rounding the two numbers outwards makes the stored
grid cover the whole group, so the error is at most scale / 2 and a constant that its storage type can hold is exact.

Error model: an element falls anywhere between two grid points, so its squared error is scale**2 / 12 on average
(VASE section 6.4). The minimum and the maximum lie on the grid, which leaves (size - 2) / size of that for a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.precision import widened

_BITS_AS = {2: torch.int16, 4: torch.int32}


def affine_grid(low: Tensor, high: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and offset of groups with the given extremes, both in ``dtype`` and finite for finite extremes.

    Args:
        low, high: float32, same shape.
    """
    offset = _rounded_down(low, dtype)
    # In float64, since the width of a range can overflow what its ends fit into; negative if both ends overflow dtype.
    width = (high.double() - offset.double()).clamp_min(0)
    scale = rounded_up(width / (2**bits - 1), dtype)
    return scale, offset


def affine_codes(groups: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """uint8 codes of (..., size) float32 groups; scale and offset (...)."""
    scale, offset = scale.double().unsqueeze(-1), offset.double().unsqueeze(-1)
    # A constant group has scale 0; any code will do.
    steps = torch.where(scale > 0, (groups.double() - offset) / scale, 0.0)
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8)


def affine_values(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """float32 values of (..., size) codes (float64 for float64 scales); scale and offset (...)."""
    limit = torch.finfo(scale.dtype).max
    # Half of everything, since code * scale can overflow where its sum with a negative offset doesn't.
    wide = widened(scale)
    halves = codes.to(wide.dtype) * (wide / 2).unsqueeze(-1) + (widened(offset) / 2).unsqueeze(-1)
    # The outermost grid point can lie a hair beyond what the pools' type can hold.
    return (2 * halves).clamp(-limit, limit)


def affine_error(scale: Tensor, size: int) -> Tensor:
    """Expected mean squared error of groups of ``size`` numbers with the given scales: float32, the error model."""
    return (scale.float() * (max(size - 2, 0) / size / 12) ** 0.5).square()


def rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nonnegative float64 -> the smallest number of ``dtype`` that is not below, or else the largest there is."""
    nearest = x.to(dtype)
    bits = nearest.view(_BITS_AS[dtype.itemsize])
    return torch.where(nearest.double() < x, bits + 1, bits).view(dtype).clamp_max(torch.finfo(dtype).max)


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> the largest number of ``dtype`` that is not above."""
    if dtype == torch.float32:
        return x
    limit = torch.finfo(dtype).max
    nearest = x.to(dtype).clamp(-limit, limit)
    bits = nearest.view(_BITS_AS[dtype.itemsize])
    # Away from zero is one up in the bits of a floating-point number, whatever its sign.
    below = torch.where(torch.signbit(nearest), bits + 1, bits - 1)
    return torch.where(nearest.float() > x, below, bits).view(dtype).clamp_min(-limit)
