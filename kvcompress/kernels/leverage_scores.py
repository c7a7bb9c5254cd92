"""Approximate leverage of each token in the key and value matrices (CurDKV; VASE-DKV, arXiv 2606.03928)."""

from __future__ import annotations

import torch
from torch import Tensor


def leverage_scores(keys: Tensor, values: Tensor, projection: Tensor | None) -> Tensor:
    """Product of the squared norms of the projected key and value, normalized over the candidates:

        p[i] = |k[i] G|^2 |v[i] G|^2 / sum_j |k[j] G|^2 |v[j] G|^2

    Both factors are divided by their largest value first, which leaves p unchanged and keeps squares and
    products from overflowing. Where every key or every value is zero, p is zero.

    Args:
        keys: (rows, kv_heads, N, head_dim). values: (rows, kv_heads, N, value_dim).
        projection: (rows, 1, max(head_dim, value_dim), rank) float32, or None for G = identity. The first
            head_dim (value_dim) rows of the same matrix multiply keys (values).

    Returns:
        (rows, kv_heads, N) float32.
    """
    product = _relative_square_norm(keys, projection) * _relative_square_norm(values, projection)
    return product / product.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _relative_square_norm(vectors: Tensor, projection: Tensor | None) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    vectors = vectors.float()
    vectors = vectors / vectors.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    if projection is not None:
        vectors = torch.matmul(vectors, projection[..., : vectors.shape[-1], :])
    square_norm = vectors.square().sum(dim=-1)
    return square_norm / square_norm.amax(dim=-1, keepdim=True).clamp_min(tiny)
