"""Hadamard rotation: spread an outlier channel over all channels before quantizing (QuaRot, arXiv 2404.00456).

The Sylvester-Hadamard matrix H of a power of two n is symmetric with entries +-1 and H H = n I, so for keys and
queries that both carry position already

    (H q) . (H k) / n = q . k

and a weighted sum of rotated values is the rotated weighted sum. Vectors whose size is no power of two are rotated in
blocks of the largest power of two that divides it (80 = 5 x 16, 96 = 3 x 32, 192 = 3 x 64). The transform itself is
:func:`kvcompress.kernels.hadamard.hadamard`.
"""

from __future__ import annotations


def rotation_block(dim: int) -> int:
    """Largest power of two that divides ``dim``."""
    return dim & -dim
