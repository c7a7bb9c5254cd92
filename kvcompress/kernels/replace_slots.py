"""Overwrite the slots of tokens that leave with the tokens that come in (design section 5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, power_of_2, tiling, tl

_LARGEST_BLOCK = 1024


class Replacement(NamedTuple):
    """Which arrival goes to which slot.

    Attributes:
        slots: (rows, kv_heads, W) int64, distinct per head.
        arrivals: (rows, kv_heads, W) int64, the arrival that belongs there.
        live: (rows, kv_heads, W) bool, False where a head has fewer arrivals than W and the slot keeps its token.
    """

    slots: Tensor
    arrivals: Tensor
    live: Tensor


def plan_replacement(stays: Tensor, comes: Tensor, width: int) -> Replacement:
    """Match every arrival with a slot that is free, or whose token leaves, both in ascending order.

    Args:
        stays: (rows, kv_heads, slots) bool, slots whose token stays.
        comes: (rows, kv_heads, arrivals) bool; per head as many as there are slots whose token does not stay.
        width: W, at least the largest number of arrivals in a head and at most the number of slots and of arrivals.
            Every head handles so many slots, so that heads with fewer arrivals are padded with slots that stay.
    """
    slots, arrivals = _first(~stays, width), _first(comes, width)
    return Replacement(slots, arrivals, torch.gather(comes, -1, arrivals))


def _first(marked: Tensor, width: int) -> Tensor:
    """(..., width) int64: indices of what is marked in ascending order, then those of the rest, likewise."""
    index = torch.arange(marked.shape[-1], device=marked.device).expand(marked.shape)
    # Marked ones up to and including each; a stable sort would give the same and take several times as long.
    count = marked.cumsum(dim=-1)
    place = torch.where(marked, count - 1, count[..., -1:] + index - count)
    return torch.empty_like(place).scatter_(-1, place, index)[..., :width].contiguous()


def take(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of a pool: (rows, kv_heads, N, *shape) and (rows, kv_heads, W) int64 -> (rows, kv_heads, W, *shape)."""
    wide = index.reshape(*index.shape, *[1] * (pool.dim() - 3)).expand(*index.shape, *pool.shape[3:])
    return pool.gather(2, wide)


def replace_slots_reference(pool: Tensor, replacement: Replacement, rows: Tensor, taken: bool = True) -> None:
    """Write the live ``rows`` over slots of ``pool``, in place; nothing else of it changes.

    Args:
        pool: (rows, kv_heads, slots, *shape).
        rows: (rows, kv_heads, W, *shape), the dtype of pool; if not ``taken``, all arrivals (rows, kv_heads, arrivals,
            *shape), of which the replacement names W. None of them may lie in a slot that is written.
    """
    slots, arrivals, live = replacement
    if not taken:
        rows = take(rows, arrivals)
    wide = slots.reshape(*slots.shape, *[1] * (pool.dim() - 3)).expand_as(rows)
    kept = live.reshape(*live.shape, *[1] * (pool.dim() - 3))
    pool.scatter_(2, wide, torch.where(kept, rows, pool.gather(2, wide)))


def replace_slots(pool: Tensor, replacement: Replacement, rows: Tensor, taken: bool = True) -> None:
    """:func:`replace_slots_reference`, by its kernel where there is one for the device."""
    supported = _is_flat(pool) and rows.dtype == pool.dtype
    if not use_triton("replace_slots", pool.device, supported):
        replace_slots_reference(pool, replacement, rows, taken)
        return
    rows = rows if _is_flat(rows) else rows.contiguous()
    slots, arrivals, live = (tensor.contiguous() for tensor in replacement)
    count, kv_heads, width = slots.shape
    size = math.prod(pool.shape[3:])
    block_size = min(power_of_2(size), _LARGEST_BLOCK)
    shape = tiling("replace_slots", Tiling(block=max(1, 2048 // max(block_size, 16))))
    grid = (count * kv_heads, ceil_div(width, shape.block), ceil_div(size, block_size))
    launch(
        _replace, grid, shape, pool, rows, slots, arrivals, live, kv_heads, width,
        *pool.stride()[:3], *rows.stride()[:3],
        SIZE=size, BLOCK_SIZE=block_size, BLOCK=shape.block, TAKEN=taken,
    )  # fmt: skip


def _is_flat(pool: Tensor) -> bool:
    """Whether the numbers of each slot lie side by side."""
    step = 1
    for size, stride in zip(reversed(pool.shape[3:]), reversed(pool.stride()[3:]), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


@jit
def _replace(
    pool, rows, slots, arrivals, live, kv_heads, width,
    pool_row, pool_head, pool_slot, from_row, from_head, from_token,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.program_id(2) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    plan = head.to(tl.int64) * width + entry
    exists = entry < width
    slot = tl.load(slots + plan, mask=exists, other=0)
    token = entry.to(tl.int64) if TAKEN else tl.load(arrivals + plan, mask=exists, other=0)
    lives = exists & (tl.load(live + plan, mask=exists, other=0) != 0)
    real = lives[:, None] & (number < SIZE)[None, :]
    source = rows + (head // kv_heads).to(tl.int64) * from_row + (head % kv_heads).to(tl.int64) * from_head
    tile = tl.load(source + token[:, None] * from_token + number[None, :], mask=real)
    target = pool + (head // kv_heads).to(tl.int64) * pool_row + (head % kv_heads).to(tl.int64) * pool_head
    tl.store(target + slot[:, None] * pool_slot + number[None, :], tile, mask=real)
