"""How similar each key is to all the others (R-KV, arXiv 2505.24133), without the N x N matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.precision import widened

_EPSILON = 1e-8
_LARGEST_DIM = 1024


def mean_similarity_reference(keys: Tensor) -> Tensor:
    """Mean cosine similarity of each key to the others, self excluded, in O(N d):

        khat[i] = k[i] / (|k[i]| + 1e-8)
        c[i] = 1/N * sum_{j != i} khat[i] . khat[j] = (khat[i] . sum_j khat[j] - |khat[i]|^2) / N

    Args:
        keys: (rows, kv_heads, N, head_dim), any float dtype.

    Returns:
        (rows, kv_heads, N) float32; float64 for float64 keys.
    """
    keys = widened(keys)
    unit = keys / (keys.norm(dim=-1, keepdim=True) + _EPSILON)
    total = unit.sum(dim=-2, keepdim=True)
    return ((unit * total).sum(dim=-1) - unit.square().sum(dim=-1)) / keys.shape[-2]


def mean_similarity(keys: Tensor) -> Tensor:
    """:func:`mean_similarity_reference`, by its kernel where there is one for the device."""
    if not use_triton("redundancy", keys.device, supported=keys.shape[-1] <= _LARGEST_DIM):
        return mean_similarity_reference(keys)
    rows, kv_heads, candidates, dim = keys.shape
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    shape = tiling("redundancy", Tiling(block=64))
    blocks = ceil_div(candidates, shape.block)
    # Heads along the axis that may be longest: the others end at 65,535.
    grid = (rows * kv_heads, blocks)
    sizes = {"DIM": dim, "BLOCK_DIM": power_of_2(dim), "BLOCK": shape.block}
    partial = torch.empty(rows * kv_heads, blocks, dim, dtype=torch.float32, device=keys.device)
    strides = keys.stride()[:3]
    launch(_sum_unit_keys, grid, shape, keys, partial, kv_heads, candidates, *strides, **sizes, EPSILON=_EPSILON)
    total = partial.sum(dim=1)
    out = torch.empty(rows, kv_heads, candidates, dtype=torch.float32, device=keys.device)
    launch(_similarity, grid, shape, keys, total, out, kv_heads, candidates, *strides, **sizes, EPSILON=_EPSILON)
    return out


@jit
def _unit_keys(keys, head, kv_heads, candidates, key_row, key_head, key_token, DIM, BLOCK_DIM, BLOCK, EPSILON):
    """(BLOCK, BLOCK_DIM) float32 normalized keys of one block of candidates; zeros beyond the last."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, BLOCK_DIM)
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    base = keys + (head // kv_heads).to(tl.int64) * key_row + (head % kv_heads).to(tl.int64) * key_head
    real = (token < candidates)[:, None] & (channel < DIM)[None, :]
    tile = tl.load(base + token[:, None].to(tl.int64) * key_token + channel[None, :], mask=real, other=0.0)
    tile = tile.to(tl.float32)
    return tile / (tl.sqrt(tl.sum(tile * tile, axis=1)) + EPSILON)[:, None]


@jit
def _sum_unit_keys(
    keys, partial, kv_heads, candidates, key_row, key_head, key_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Sum of the normalized keys of one block, so that the order of summation never depends on the launch."""
    head = tl.program_id(0)
    unit = _unit_keys(keys, head, kv_heads, candidates, key_row, key_head, key_token, DIM, BLOCK_DIM, BLOCK, EPSILON)
    channel = tl.arange(0, BLOCK_DIM)
    row = partial + (head.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * DIM
    tl.store(row + channel, tl.sum(unit, axis=0), mask=channel < DIM)


@jit
def _similarity(
    keys, total, out, kv_heads, candidates, key_row, key_head, key_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    unit = _unit_keys(keys, head, kv_heads, candidates, key_row, key_head, key_token, DIM, BLOCK_DIM, BLOCK, EPSILON)
    channel = tl.arange(0, BLOCK_DIM)
    summed = tl.load(total + head.to(tl.int64) * DIM + channel, mask=channel < DIM, other=0.0)
    similarity = (tl.sum(unit * summed[None, :], axis=1) - tl.sum(unit * unit, axis=1)) / candidates
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + head.to(tl.int64) * candidates + token, similarity, mask=token < candidates)
