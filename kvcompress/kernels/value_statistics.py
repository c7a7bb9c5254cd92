"""Per-token spread of the value vectors: what VASE protects, and the step of per-token quantization.

For asymmetric b-bit per-token quantization the step is Range(v) / (2**b - 1) and the expected squared error
step**2 / 12, so the statistic that protects a token from eviction also predicts its quantization error.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.precision import widened

Statistic = Literal["range", "absmax", "l2", "var"]

_LARGEST = torch.finfo(torch.float32).max
_LARGEST_DIM = 1024
_SMALL = 1 / _LARGEST_DIM
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def value_statistic_reference(values: Tensor, statistic: Statistic) -> Tensor:
    """One number per token from its value vector (VASE section 2):

        range   max_c v[c] - min_c v[c]
        absmax  max_c |v[c]|
        l2      sqrt(sum_c v[c]**2)
        var     sum_c (v[c] - mean)**2 / (d - 1)

    Args:
        values: (..., head_dim), any float dtype.

    Returns:
        (...) float32, float64 for float64 values; what overflows float32 counts as its largest finite number, so that
        infinity stays free for the tokens that are protected whatever their values.
    """
    values = widened(values)
    if statistic == "range":
        low, high = torch.aminmax(values, dim=-1)
        spread = high - low
    elif statistic == "absmax":
        spread = values.abs().amax(dim=-1)
    elif statistic == "l2":
        spread = torch.linalg.vector_norm(values, dim=-1)
    else:
        # Scaled down, since partial sums of huge numbers can be infinities of both signs, and the sum of those is NaN.
        mean = (values * _SMALL).mean(dim=-1, keepdim=True) / _SMALL
        spread = (values - mean).square().sum(dim=-1) / (values.shape[-1] - 1)
    return spread.clamp_max(_LARGEST)


def value_statistic(values: Tensor, statistic: Statistic) -> Tensor:
    """:func:`value_statistic_reference`, by its kernel where there is one for the device."""
    supported = 2 <= values.shape[-1] <= _LARGEST_DIM and values.dim() <= 4 and values.dtype in _DTYPES
    if not use_triton("value_statistic", values.device, supported):
        return value_statistic_reference(values, statistic)
    if values.stride(-1) != 1:
        values = values.contiguous()
    out = torch.empty(values.shape[:-1], dtype=torch.float32, device=values.device)
    values = values[(None,) * (4 - values.dim())]
    rows, kv_heads, tokens, dim = values.shape
    block_dim = power_of_2(dim)
    shape = tiling("value_statistic", Tiling(block=4096 // block_dim))
    grid = (rows * kv_heads, ceil_div(tokens, shape.block))
    sizes = {"DIM": dim, "BLOCK_DIM": block_dim, "BLOCK": shape.block}
    launch(
        _statistic, grid, shape, values, out, kv_heads, tokens, *values.stride()[:3],
        **sizes, STATISTIC=statistic, LARGEST=_LARGEST, SMALL=_SMALL,
    )  # fmt: skip
    return out


@jit
def _statistic(
    values, out, kv_heads, tokens, value_row, value_head, value_token,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
    STATISTIC: tl.constexpr, LARGEST: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, BLOCK_DIM)
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    base = values + (head // kv_heads).to(tl.int64) * value_row + (head % kv_heads).to(tl.int64) * value_head
    real = (token < tokens)[:, None] & (channel < DIM)[None, :]
    tile = tl.load(base + token[:, None].to(tl.int64) * value_token + channel[None, :], mask=real, other=0.0)
    tile = tile.to(tl.float32)
    if STATISTIC == "range":
        high = tl.max(tl.where(real, tile, float("-inf")), axis=1)
        low = tl.min(tl.where(real, tile, float("inf")), axis=1)
        spread = high - low
    elif STATISTIC == "absmax":
        spread = tl.max(tl.abs(tile), axis=1)
    elif STATISTIC == "l2":
        spread = tl.sqrt_rn(tl.sum(tile * tile, axis=1))
    else:
        # Not the fast division, by which the mean of a constant could differ from it.
        mean = tl.div_rn(tl.sum(tile * SMALL, axis=1), DIM * 1.0) * (1 / SMALL)
        apart = tl.where(real, tile - mean[:, None], 0.0)
        spread = tl.sum(apart * apart, axis=1) / (DIM - 1)
    # The largest number of a row passes over NaN, and a comparison with NaN is false.
    spread = tl.where(tl.sum((tile != tile).to(tl.int32), axis=1) > 0, float("nan"), spread)
    spread = tl.where(spread > LARGEST, LARGEST, spread)
    tl.store(out + head.to(tl.int64) * tokens + token, spread, mask=token < tokens)
