"""Attention of new queries over the slots of a store, and the attention mass each slot receives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompress.kernels.precision import widened


def attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention written out, the specification of every other path:

        l[q, n] = cap(scaling * q . k[n])         cap(x) = softcap * tanh(x / softcap), or x
        p[q, n] = exp(l[q, n]) / (exp(s) + sum_m exp(l[q, m]))       s = learned sink logit, if any
        out[q]  = sum_n p[q, n] v[n]

    Args:
        queries: (rows, heads, Q, head_dim). keys: (rows, kv_heads, N, head_dim). values: (rows, kv_heads, N,
            value_dim).
        mask: bool, broadcastable to (rows, 1, Q, N), True where a query may look; None means everywhere.
        sinks: (heads,) logits of the learned attention sinks (gpt-oss), or None.

    Returns:
        out (rows, heads, Q, value_dim) in the dtype of queries, and p (rows, heads, Q, N) float32 (float64 for
        float64 queries). A query that may look nowhere gets zeros.
    """
    rows, heads, length, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = widened(queries).reshape(rows, kv_heads, -1, head_dim)
    logits = torch.matmul(grouped, keys.to(grouped.dtype).transpose(-1, -2)) * scaling
    logits = logits.reshape(rows, heads, length, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink_logits = sinks.to(logits.dtype).reshape(1, heads, 1, 1).expand(rows, heads, length, 1)
        probabilities = torch.softmax(torch.cat([logits, sink_logits], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(logits, dim=-1)
        if mask is not None:
            # Softmax over nothing is NaN. Only that is replaced: a NaN among the logits must show.
            probabilities = probabilities.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    weights = probabilities.reshape(rows, kv_heads, -1, keys.shape[2])
    out = torch.matmul(weights, values.to(weights.dtype)).reshape(rows, heads, length, -1)
    return out.to(queries.dtype), probabilities


def slot_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Same result as :func:`attention_reference`, through scaled_dot_product_attention where it can express it.

    A single query per sequence packs its group into the query axis, so that keys and values are read once per
    group and never repeated. Shapes as in :func:`attention_reference`.
    """
    if softcap is not None or sinks is not None:
        return attention_reference(queries, keys, values, mask, scaling, softcap, sinks)[0]
    rows, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    if length == 1 and group > 1:
        packed = queries.reshape(rows, keys.shape[1], group, queries.shape[-1])
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, 1, out.shape[-1])
    if group > 1 and mask is not None and keys.device.type != "cpu":
        # On accelerators only the kernel that holds all logits at once takes both a mask and grouped heads.
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        group = 1
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=group > 1)


# Queries are processed in slices whose float32 probabilities stay below this many elements (64 MiB).
_SLICE_ELEMENTS = 1 << 24


def attention_mass(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention probability that each key receives, summed over the queries and averaged over the query group.

    Shapes as in :func:`attention_reference`; returns (rows, kv_heads, N) float32. Never holds more than a slice
    of the (Q, N) probabilities.
    """
    rows, heads, length, _ = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    mass = torch.zeros(rows, kv_heads, slots, dtype=torch.float32, device=keys.device)
    empty = keys[..., :0]
    step = max(1, _SLICE_ELEMENTS // max(1, rows * heads * slots))
    for start in range(0, length, step):
        part = slice(start, min(start + step, length))
        part_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
        _, probabilities = attention_reference(queries[:, :, part], keys, empty, part_mask, scaling, softcap, sinks)
        mass += probabilities.unflatten(1, (kv_heads, -1)).mean(dim=2).sum(dim=2)
    return mass
