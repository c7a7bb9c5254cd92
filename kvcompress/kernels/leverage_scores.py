"""Approximate leverage of each token in the key and value matrices (CurDKV; VASE-DKV, arXiv 2606.03928)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, dot, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.precision import widened

_LARGEST_DIM = 256
# Exponent that stands for zero.
_NOTHING = -(1 << 20)


def leverage_scores_reference(keys: Tensor, values: Tensor, projection: Tensor | None) -> Tensor:
    """Product of the squared norms of the projected key and value, normalized over the candidates:

        p[i] = |k[i] G|^2 |v[i] G|^2 / sum_j |k[j] G|^2 |v[j] G|^2

    Both factors are divided by their largest value first, which leaves p unchanged and keeps squares and
    products from overflowing. Where every key or every value is zero, p is zero.

    Args:
        keys: (rows, kv_heads, N, head_dim). values: (rows, kv_heads, N, value_dim).
        projection: (rows, 1, max(head_dim, value_dim), rank) float32, or None for G = identity. The first
            head_dim (value_dim) rows of the same matrix multiply keys (values).

    Returns:
        (rows, kv_heads, N) float32; float64 for float64 keys or values.
    """
    return _normalized(_relative_square_norm(keys, projection) * _relative_square_norm(values, projection))


def _relative_square_norm(vectors: Tensor, projection: Tensor | None) -> Tensor:
    vectors = widened(vectors)
    tiny = torch.finfo(vectors.dtype).tiny
    vectors = vectors / vectors.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    if projection is not None:
        vectors = torch.matmul(vectors, projection[..., : vectors.shape[-1], :].to(vectors.dtype))
    square_norm = vectors.square().sum(dim=-1)
    return square_norm / square_norm.amax(dim=-1, keepdim=True).clamp_min(tiny)


def _normalized(product: Tensor) -> Tensor:
    return product / product.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(product.dtype).tiny)


def leverage_scores(keys: Tensor, values: Tensor, projection: Tensor | None) -> Tensor:
    """:func:`leverage_scores_reference`, by its kernel where there is one for the device."""
    rows, kv_heads, candidates, key_dim = keys.shape
    value_dim = values.shape[-1]
    supported = max(key_dim, value_dim) <= _LARGEST_DIM and min(rows, candidates) > 0
    if not use_triton("leverage_scores", keys.device, supported and torch.float64 not in (keys.dtype, values.dtype)):
        return leverage_scores_reference(keys, values, projection)
    keys, values = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (keys, values))
    rank, strides = 0, (0, 0)
    if projection is not None:
        projection = projection.float()
        projection = (projection if projection.stride(-1) == 1 else projection.contiguous()).expand(rows, -1, -1, -1)
        rank, strides = projection.shape[-1], (projection.stride(0), projection.stride(2))
    # Two warps: with more, and more tokens, Blackwell would multiply in TF32 whatever precision is asked for, since one
    # operand had 16 bits (Triton #10176).
    shape = tiling("leverage_scores", Tiling(block=32, warps=2))
    blocks = ceil_div(candidates, shape.block)
    factor = torch.empty(rows, kv_heads, candidates, dtype=torch.float32, device=keys.device)
    exponent = torch.empty(rows, kv_heads, candidates, dtype=torch.int32, device=keys.device)
    launch(
        _square_norms, (rows * kv_heads * blocks,), shape,
        keys, values, projection, factor, exponent, kv_heads, candidates, blocks,
        *keys.stride()[:3], *values.stride()[:3], *strides,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, RANK=rank, BLOCK=shape.block,
        BLOCK_RANK=min(32, max(16, power_of_2(rank))), SLICE=64, SLICE_DOT=16, NOTHING=_NOTHING,
    )  # fmt: skip
    return _normalized(torch.ldexp(factor, exponent - exponent.amax(dim=-1, keepdim=True)))


@jit
def _exponent(x):
    """Of float32 numbers >= 0; bounded, so that both 2**exponent and 2**-exponent have all their digits."""
    return tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 1), 253) - 127


@jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _vectors(base, token, candidates, stride, first, DIM, SLICE):
    """(tokens, SLICE) channels of vectors from ``first`` on, float32; zeros beyond the last token and channel."""
    channel = first + tl.arange(0, SLICE)
    real = (token < candidates)[:, None] & (channel < DIM)[None, :]
    tile = tl.load(base + token[:, None].to(tl.int64) * stride + channel[None, :], mask=real, other=0.0)
    return tile.to(tl.float32)


@jit
def _square_norm(
    vectors, token, candidates, stride, projection, projection_channel,
    DIM, RANK, BLOCK_RANK, SLICE, SLICE_DOT,
):  # fmt: skip
    """|v G|^2 = factor * 2**exponent of each vector, 1 <= factor < 2.

    Scaled by powers of two, which rounds nothing, rather than by logarithms, whose digits go to large exponents.
    """
    largest = tl.zeros((token.shape[0],), tl.float32)
    for first in range(0, DIM, SLICE):
        tile = _vectors(vectors, token, candidates, stride, first, DIM, SLICE)
        largest = tl.maximum(largest, tl.max(tl.abs(tile), axis=1))
    exponent = _exponent(largest)
    scale = _power_of_two(-exponent)[:, None]
    square = tl.zeros((token.shape[0],), tl.float32)
    if RANK == 0:
        for first in range(0, DIM, SLICE):
            tile = _vectors(vectors, token, candidates, stride, first, DIM, SLICE) * scale
            square += tl.sum(tile * tile, axis=1)
    else:
        for first_column in range(0, RANK, BLOCK_RANK):
            column = first_column + tl.arange(0, BLOCK_RANK)
            projected = tl.zeros((token.shape[0], BLOCK_RANK), tl.float32)
            for first in range(0, DIM, SLICE_DOT):
                tile = _vectors(vectors, token, candidates, stride, first, DIM, SLICE_DOT) * scale
                channel = first + tl.arange(0, SLICE_DOT)
                real = (channel < DIM)[:, None] & (column < RANK)[None, :]
                matrix = projection + channel[:, None] * projection_channel + column[None, :]
                projected += dot(tile, tl.load(matrix, mask=real, other=0.0))
            square += tl.sum(projected * projected, axis=1)
    scaled = _exponent(square)
    return square * _power_of_two(-scaled), 2 * exponent + scaled


@jit
def _square_norms(
    keys, values, projection, factor, exponent, kv_heads, candidates, blocks,
    key_row, key_head, key_token, value_row, value_head, value_token, projection_row, projection_channel,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    SLICE: tl.constexpr, SLICE_DOT: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    """|k G|^2 |v G|^2 = factor * 2**exponent of one block of tokens."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    token = block * BLOCK + tl.arange(0, BLOCK)
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    row, within = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    keys += row * key_row + within * key_head
    values += row * value_row + within * value_head
    if RANK > 0:
        projection += row * projection_row
    key_factor, key_exponent = _square_norm(
        keys, token, candidates, key_token, projection, projection_channel,
        KEY_DIM, RANK, BLOCK_RANK, SLICE, SLICE_DOT,
    )  # fmt: skip
    value_factor, value_exponent = _square_norm(
        values, token, candidates, value_token, projection, projection_channel,
        VALUE_DIM, RANK, BLOCK_RANK, SLICE, SLICE_DOT,
    )  # fmt: skip
    product = key_factor * value_factor
    place = head.to(tl.int64) * candidates + token
    tl.store(factor + place, product, mask=token < candidates)
    power = tl.where(product > 0, key_exponent + value_exponent, NOTHING)
    tl.store(exponent + place, power, mask=token < candidates)
