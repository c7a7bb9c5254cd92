"""The Hadamard transform (:mod:`kvcompress.quant.rotation`) in O(d log d): sums and differences of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, cast, ceil_div, jit, launch, tiling, tl
from kvcompress.kernels.precision import widened

_LARGEST_BLOCK = 1024
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def hadamard_reference(vectors: Tensor, block: int) -> Tensor:
    """H x for every block of the last axis, not normalized: applied twice it multiplies by ``block``.

    Args:
        vectors: (..., dim), dim a multiple of block, any float dtype. block: a power of two.

    Returns:
        The same shape and dtype, by log2(block) passes of sums and differences in float32 (float64 for float64
        vectors), rounded once at the end.
    """
    shape = vectors.shape
    x = widened(vectors).reshape(*shape[:-1], shape[-1] // block, block)
    half = 1
    while half < block:
        pairs = x.reshape(*x.shape[:-1], block // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return x.reshape(shape).to(vectors.dtype)


def hadamard(vectors: Tensor, block: int) -> Tensor:
    """:func:`hadamard_reference`, by its kernel where there is one for the device; equal to the bit."""
    supported = block <= _LARGEST_BLOCK and vectors.dtype in _DTYPES
    if not use_triton("hadamard", vectors.device, supported):
        return hadamard_reference(vectors, block)
    vectors = vectors.contiguous()
    out = torch.empty_like(vectors)
    count = vectors.numel() // block
    shape = tiling("hadamard", Tiling(block=2048 // block))
    grid = (ceil_div(count, shape.block),)
    launch(_hadamard, grid, shape, vectors, out, count, DIM=block, LEVELS=block.bit_length() - 1, BLOCK=shape.block)
    return out


@jit
def _hadamard(vectors, out, count, DIM: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Transform ``count`` vectors of size DIM = 2**LEVELS that lie one after the other."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, DIM)
    place = vector[:, None] * DIM + channel[None, :]
    real = (vector < count)[:, None] & (channel < DIM)[None, :]
    x = tl.load(vectors + place, mask=real, other=0.0).to(tl.float32)
    for _ in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(x, (BLOCK, DIM // 2, 2)))
        # Sums before differences: the lowest bit of the channel becomes the highest one, so that the next pass finds
        # its pairs side by side too, and after the last one all bits are back in their place.
        pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        x = tl.reshape(pairs, (BLOCK, DIM))
    tl.store(out + place, cast(x, out.dtype.element_ty), mask=real)
