"""Attention that a window of queries pays to each candidate (SnapKV, arXiv 2404.14469; VASE, arXiv 2606.03928)."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows, or the KV heads of one row, are processed in slices whose float32 probabilities stay below this many
# elements (64 MiB), unless a single head holds more.
_SLICE_ELEMENTS = 1 << 24


def window_scores(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Mean over the window of the softmax over the candidates, for each query head:

        m[j, i] = 1/W * sum_w softmax_i(scaling * q[j, w] . k[i])

    The recent tokens are not among the candidates, hence not in the normalizer, and every window query comes
    after every candidate, so no mask is needed.

    Args:
        queries: (rows, heads, W, head_dim), any float dtype; heads is a multiple of kv_heads.
        keys: (rows, kv_heads, N, head_dim), same head_dim.
        scaling: factor on the logits, 1 / (temperature * sqrt(head_dim)) as a rule.

    Returns:
        (rows, kv_heads, group, N) float32, each [row, head, group] summing to 1; group = heads / kv_heads.
    """
    rows, heads, window, head_dim = queries.shape
    kv_heads, candidates = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    grouped = queries.float().reshape(rows, kv_heads, group * window, head_dim)
    out = torch.empty(rows, kv_heads, group, candidates, dtype=torch.float32, device=keys.device)
    per_head = max(1, group * window * candidates)
    row_step = max(1, _SLICE_ELEMENTS // (kv_heads * per_head))
    head_step = max(1, min(kv_heads, _SLICE_ELEMENTS // per_head))
    for row in range(0, rows, row_step):
        for head in range(0, kv_heads, head_step):
            part = (slice(row, row + row_step), slice(head, head + head_step))
            logits = torch.matmul(grouped[part] * scaling, keys[part].float().transpose(-1, -2))
            probabilities = torch.softmax(logits, dim=-1)
            out[part] = probabilities.unflatten(2, (group, window)).mean(dim=3)
    return out
