"""How similar each key is to all the others (R-KV, arXiv 2505.24133), without the N x N matrix."""

from __future__ import annotations

from torch import Tensor

_EPSILON = 1e-8


def mean_similarity(keys: Tensor) -> Tensor:
    """Mean cosine similarity of each key to the others, self excluded, in O(N d):

        khat[i] = k[i] / (|k[i]| + 1e-8)
        c[i] = 1/N * sum_{j != i} khat[i] . khat[j] = (khat[i] . sum_j khat[j] - |khat[i]|^2) / N

    Args:
        keys: (rows, kv_heads, N, head_dim), any float dtype.

    Returns:
        (rows, kv_heads, N) float32.
    """
    keys = keys.float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + _EPSILON)
    total = unit.sum(dim=-2, keepdim=True)
    return ((unit * total).sum(dim=-1) - unit.square().sum(dim=-1)) / keys.shape[-2]
