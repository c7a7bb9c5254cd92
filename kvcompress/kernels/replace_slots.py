"""Overwrite the slots of evicted tokens with the tokens that come in (design section 5)."""

from __future__ import annotations

import torch
from torch import Tensor


def replacement_plan(keep: Tensor, newcomers: int) -> tuple[Tensor, Tensor]:
    """Match every surviving newcomer with the slot of an evicted old token.

    With M = keep.shape[-1] old slots, all in use, candidates 0 .. M - 1 are the tokens in them and candidates
    M .. M + newcomers - 1 come from outside. Since M candidates survive, exactly as many old tokens leave as
    newcomers come in.

    Args:
        keep: (rows, kv_heads, M) int64, the surviving candidates, distinct per head.
        newcomers: how many candidates come from outside.

    Returns:
        victims and sources, both (rows, kv_heads, min(M, newcomers)) int64: candidate ``sources[i]`` belongs in old
        slot ``victims[i]``. Heads with fewer replacements are filled up with distinct slots that receive
        themselves, so that every head copies the same number of rows.
    """
    rows, kv_heads, old = keep.shape
    width = min(old, newcomers)
    incoming = keep >= old
    kept = torch.zeros(rows, kv_heads, old + 1, dtype=torch.bool, device=keep.device)
    # Newcomers scatter into a spare last column, which is dropped.
    kept.scatter_(-1, keep.masked_fill(incoming, old), True)
    evicted = ~kept[..., :old]
    # A stable sort brings the evicted slots, and the surviving newcomers, to the front in slot order.
    victims = torch.sort(evicted.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :width]
    arrivals = torch.sort(incoming.to(torch.int8), dim=-1, descending=True, stable=True).indices[..., :width]
    live = torch.gather(incoming, -1, arrivals)
    sources = torch.where(live, torch.gather(keep, -1, arrivals), victims)
    return victims, sources


def replace_slots(pool: Tensor, victims: Tensor, rows: Tensor) -> None:
    """Write ``rows`` over the ``victims`` of ``pool``, in place.

    Args:
        pool: (rows, kv_heads, slots) or (rows, kv_heads, slots, dim).
        victims: (rows, kv_heads, W) int64 slot indices, distinct per head.
        rows: (rows, kv_heads, W) or (rows, kv_heads, W, dim), the dtype of pool.
    """
    index = victims if pool.dim() == 3 else victims.unsqueeze(-1).expand_as(rows)
    pool.scatter_(2, index, rows)
