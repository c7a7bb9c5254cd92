"""Attention that a window of queries pays to each candidate (SnapKV, arXiv 2404.14469; VASE, arXiv 2606.03928)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, dot, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.precision import widened

# Rows, or the KV heads of one row, are processed in slices whose float32 probabilities stay below this many
# elements (64 MiB), unless a single head holds more.
_SLICE_ELEMENTS = 1 << 24
_LARGEST_DIM = 256
_LOWEST = float(torch.finfo(torch.float32).min)


def window_scores_reference(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
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
        float64 for float64 queries.
    """
    rows, heads, window, head_dim = queries.shape
    kv_heads, candidates = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    grouped = widened(queries).reshape(rows, kv_heads, group * window, head_dim)
    out = torch.empty(rows, kv_heads, group, candidates, dtype=grouped.dtype, device=keys.device)
    per_head = max(1, group * window * candidates)
    row_step = max(1, _SLICE_ELEMENTS // (kv_heads * per_head))
    head_step = max(1, min(kv_heads, _SLICE_ELEMENTS // per_head))
    for row in range(0, rows, row_step):
        for head in range(0, kv_heads, head_step):
            part = (slice(row, row + row_step), slice(head, head + head_step))
            logits = torch.matmul(grouped[part] * scaling, keys[part].to(grouped.dtype).transpose(-1, -2))
            probabilities = torch.softmax(logits, dim=-1)
            out[part] = probabilities.unflatten(2, (group, window)).mean(dim=3)
    return out


def window_scores(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """:func:`window_scores_reference`, by its kernels where there are some for the device.

    Two passes over the keys, since no (heads, W, N) tensor may exist: the first finds the normalizer of each query,
    the second recomputes the logits and sums the probabilities.
    """
    rows, heads, window, dim = queries.shape
    kv_heads, candidates = keys.shape[1], keys.shape[2]
    supported = dim <= _LARGEST_DIM and min(rows, window, candidates) > 0
    if not use_triton("window_scores", keys.device, supported and torch.float64 not in (queries.dtype, keys.dtype)):
        return window_scores_reference(queries, keys, scaling)
    queries, keys = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (queries, keys))
    wide = queries.dtype != keys.dtype or keys.element_size() != 2
    padded_dim, padded_window = max(16, power_of_2(dim)), max(16, power_of_2(window))
    shape = tiling("window_scores", Tiling(block=64 if wide or dim > 128 else 128))
    sizes = {"GROUP": heads // kv_heads, "DIM": dim, "BLOCK": shape.block, "WIDE": wide}
    if wide:
        # NVIDIA multiplies float32 in registers, which hold few channels at a time. Fewer than 64 queries, with which
        # Blackwell would take TF32 where one operand had 16 bits, whatever precision is asked for (Triton #10176).
        sizes |= {"CHUNK": min(padded_window, 32), "SLICE": 16}
    else:
        sizes |= {"CHUNK": min(padded_window, 64), "SLICE": padded_dim}
    sizes["CHUNKS"] = ceil_div(window, sizes["CHUNK"])
    blocks = ceil_div(candidates, shape.block)
    grid = (rows * kv_heads * blocks,)
    numbers = (float(scaling), kv_heads, candidates, window, blocks, *queries.stride()[:3], *keys.stride()[:3])
    largest, total = (
        torch.empty(blocks, rows * heads * window, dtype=torch.float32, device=keys.device) for _ in range(2)
    )
    launch(_block_normalizers, grid, shape, queries, keys, largest, total, *numbers, **sizes, LOWEST=_LOWEST)
    # Not one log-sum-exp: added to a large logit, the logarithm of the sum would lose its digits.
    top = largest.amax(dim=0)
    total = (total * (largest - top).exp()).sum(dim=0)
    out = torch.empty(rows, kv_heads, heads // kv_heads, candidates, dtype=torch.float32, device=keys.device)
    launch(_mean_probabilities, grid, shape, queries, keys, top, total, out, *numbers, **sizes)
    return out


@jit
def _block_of_head(keys, queries, kv_heads, blocks, key_row, key_head, query_row, query_head, GROUP):
    """Block of candidates and KV head, counted over all rows, of a program, and where its keys and queries begin."""
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    row, within = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    keys += row * key_row + within * key_head
    queries += row * query_row + within * GROUP * query_head
    return block, head.to(tl.int64), keys, queries


@jit
def _vectors(base, place, count, stride, first, DIM, SLICE, WIDE):
    """(places, SLICE) channels of vectors from ``first`` on; zeros beyond the last vector and the last channel."""
    channel = first + tl.arange(0, SLICE)
    real = (place < count)[:, None] & (channel < DIM)[None, :]
    tile = tl.load(base + place[:, None].to(tl.int64) * stride + channel[None, :], mask=real, other=0.0)
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@jit
def _products(queries, place, window, query_token, keys, token, candidates, key_token, tile, DIM, SLICE, WIDE):
    """(places, tokens) float32 products of queries and keys. ``tile`` holds the first SLICE channels of the keys."""
    query = _vectors(queries, place, window, query_token, 0, DIM, SLICE, WIDE)
    products = dot(query, tl.trans(tile))
    for first in range(SLICE, DIM, SLICE):
        query = _vectors(queries, place, window, query_token, first, DIM, SLICE, WIDE)
        key = _vectors(keys, token, candidates, key_token, first, DIM, SLICE, WIDE)
        products += dot(query, tl.trans(key))
    return products


@jit
def _block_normalizers(
    queries, keys, largest, total, scaling, kv_heads, candidates, window, blocks,
    query_row, query_head, query_token, key_row, key_head, key_token,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SLICE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Largest logit, and sum of exp(logit - largest), of each query within one block of candidates."""
    block, head, keys, queries = _block_of_head(
        keys, queries, kv_heads, blocks, key_row, key_head, query_row, query_head, GROUP
    )
    token = block * BLOCK + tl.arange(0, BLOCK)
    queries_of_all = (tl.num_programs(0) // blocks).to(tl.int64) * GROUP * window
    tile = _vectors(keys, token, candidates, key_token, 0, DIM, SLICE, WIDE)
    for step in range(GROUP * CHUNKS):
        member = step // CHUNKS
        place = (step % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
        asking = queries + member.to(tl.int64) * query_head
        logits = scaling * _products(
            asking, place, window, query_token, keys, token, candidates, key_token, tile, DIM, SLICE, WIDE
        )
        logits = tl.where((token < candidates)[None, :], logits, float("-inf"))
        # Finite, so that a block whose logits are all -inf adds zero rather than NaN.
        top = tl.maximum(tl.max(logits, axis=1), LOWEST)
        query = block * queries_of_all + (head * GROUP + member) * window + place
        tl.store(largest + query, top, mask=place < window)
        tl.store(total + query, tl.sum(tl.exp(logits - top[:, None]), axis=1), mask=place < window)


@jit
def _mean_probabilities(
    queries, keys, top, total, out, scaling, kv_heads, candidates, window, blocks,
    query_row, query_head, query_token, key_row, key_head, key_token,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """One block of candidates; one loop over members and chunks, since the compiler overlaps loads within a loop."""
    block, head, keys, queries = _block_of_head(
        keys, queries, kv_heads, blocks, key_row, key_head, query_row, query_head, GROUP
    )
    token = block * BLOCK + tl.arange(0, BLOCK)
    tile = _vectors(keys, token, candidates, key_token, 0, DIM, SLICE, WIDE)
    summed = tl.zeros((BLOCK,), tl.float32)
    for step in range(GROUP * CHUNKS):
        member = step // CHUNKS
        place = (step % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
        real = place < window
        asking = queries + member.to(tl.int64) * query_head
        logits = scaling * _products(
            asking, place, window, query_token, keys, token, candidates, key_token, tile, DIM, SLICE, WIDE
        )
        line = head * GROUP + member
        largest = tl.load(top + line * window + place, mask=real, other=0.0)
        share = 1.0 / tl.load(total + line * window + place, mask=real, other=1.0)
        probabilities = tl.exp(logits - largest[:, None]) * share[:, None]
        summed += tl.sum(tl.where(real[:, None], probabilities, 0.0), axis=0)
        last = step % CHUNKS == CHUNKS - 1
        tl.store(out + line * candidates + token, summed / window, mask=(token < candidates) & last)
        summed = tl.where(last, 0.0, summed)
