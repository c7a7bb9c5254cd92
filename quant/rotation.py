"""Hadamard rotation: spread an outlier channel over all channels before quantizing (QuaRot, arXiv 2404.00456).

The Sylvester-Hadamard matrix H of a power of two n is symmetric with entries +-1 and H H = n I, so for keys and
queries that both carry position already

    (H q) . (H k) / n = q . k

and a weighted sum of rotated values is the rotated weighted sum. Vectors whose size is no power of two are rotated in
blocks of the largest power of two that divides it (80 = 5 x 16, 96 = 3 x 32, 192 = 3 x 64).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_block(dim: int) -> int:
    """Largest power of two that divides ``dim``."""
    return dim & -dim


def hadamard(vectors: Tensor, block: int) -> Tensor:
    """H x for every block of the last axis, not normalized: applied twice it multiplies by ``block``.

    Args:
        vectors: (..., dim), dim a multiple of block. block: a power of two.

    Returns:
        The same shape and dtype, by log2(block) passes of sums and differences.
    """
    shape = vectors.shape
    x = vectors.reshape(*shape[:-1], shape[-1] // block, block)
    half = 1
    while half < block:
        pairs = x.reshape(*x.shape[:-1], block // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return x.reshape(shape)
