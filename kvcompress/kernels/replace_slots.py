"""Overwrite the slots of tokens that leave with the tokens that come in (design section 5)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    # A stable sort brings the free slots, and the arrivals, to the front in ascending order.
    slots = torch.sort(stays.to(torch.int8), dim=-1, stable=True).indices[..., :width]
    arrivals = torch.sort(comes.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :width]
    return Replacement(slots, arrivals, torch.gather(comes, -1, arrivals))


def take(pool: Tensor, index: Tensor) -> Tensor:
    """Rows of a pool: (rows, kv_heads, N, *shape) and (rows, kv_heads, W) int64 -> (rows, kv_heads, W, *shape)."""
    wide = index.reshape(*index.shape, *[1] * (pool.dim() - 3)).expand(*index.shape, *pool.shape[3:])
    return pool.gather(2, wide)


def replace_slots(pool: Tensor, replacement: Replacement, rows: Tensor) -> None:
    """Write the live ``rows`` over slots of ``pool``, in place.

    Args:
        pool: (rows, kv_heads, slots, *shape). rows: (rows, kv_heads, W, *shape), the dtype of pool.
    """
    slots, _, live = replacement
    wide = slots.reshape(*slots.shape, *[1] * (pool.dim() - 3)).expand_as(rows)
    kept = live.reshape(*live.shape, *[1] * (pool.dim() - 3))
    pool.scatter_(2, wide, torch.where(kept, rows, pool.gather(2, wide)))
