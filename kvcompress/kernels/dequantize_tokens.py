"""Tokens out of their codes: the inverse of :mod:`kvcompress.kernels.quantize_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.affine import affine_values
from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.packing import unpack

_LARGEST_DIM = 1024


def dequantize_tokens_reference(codes: Tensor, scale: Tensor, offset: Tensor, bits: int, group: int) -> Tensor:
    """x = offset + scale * code, with one scale and one offset per group of channels.

    Args:
        codes: (..., N, dim * bits / 8) uint8, packed as in :mod:`kvcompress.kernels.packing`.
        scale, offset: (..., N, dim / group), any float dtype.
        bits: 8, 4, 3 or 2. group: channels per scale.

    Returns:
        (..., N, dim) float32, within the range of the type of scale; float64 for float64 scales.
    """
    return affine_values(unpack(codes, bits).unflatten(-1, (-1, group)), scale, offset).flatten(-2)


def dequantize_tokens(codes: Tensor, scale: Tensor, offset: Tensor, bits: int, group: int) -> Tensor:
    """:func:`dequantize_tokens_reference`, by its kernel where there is one for the device."""
    dim = codes.shape[-1] * 8 // bits
    supported = codes.dim() == 4 and dim <= _LARGEST_DIM and scale.dtype != torch.float64
    if not use_triton("dequantize_tokens", codes.device, supported):
        return dequantize_tokens_reference(codes, scale, offset, bits, group)
    codes, scale, offset = (t if t.stride(-1) == 1 else t.contiguous() for t in (codes, scale, offset))
    if offset.stride() != scale.stride():
        scale, offset = scale.contiguous(), offset.contiguous()
    rows, kv_heads, tokens, _ = codes.shape
    out = torch.empty(rows, kv_heads, tokens, dim, dtype=torch.float32, device=codes.device)
    shape = tiling("dequantize_tokens", Tiling(block=max(1, 2048 // power_of_2(dim))))
    launch(
        _dequantize, (rows * kv_heads, ceil_div(tokens, shape.block)), shape,
        codes, scale, offset, out, kv_heads, tokens, *codes.stride()[:3], *scale.stride()[:3],
        BITS=bits, GROUP=group, DIM=dim, BLOCK_DIM=power_of_2(dim), BLOCK=shape.block,
        LIMIT=torch.finfo(scale.dtype).max,
    )  # fmt: skip
    return out


@jit
def _dequantize(
    codes, scale, offset, out, kv_heads, tokens,
    code_row, code_head, code_token, scale_row, scale_head, scale_token,
    BITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row, head = pair // kv_heads, pair % kv_heads
    token = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    channel = tl.arange(0, BLOCK_DIM)
    real = (token < tokens)[:, None] & (channel < DIM)[None, :]
    base = codes + row * code_row + head * code_head + token[:, None] * code_token
    if BITS == 3:
        low = tl.load(base + (channel % (DIM // 4))[None, :], mask=real, other=0)
        low = low >> (channel // (DIM // 4) * 2).to(tl.uint8)[None, :] & 3
        high = tl.load(base + (DIM // 4 + channel % (DIM // 8))[None, :], mask=real, other=0)
        code = low | (high >> (channel // (DIM // 8)).to(tl.uint8)[None, :] & 1) << 2
    else:
        WIDTH: tl.constexpr = DIM * BITS // 8
        code = tl.load(base + (channel % WIDTH)[None, :], mask=real, other=0)
        if BITS < 8:
            code = code >> (channel // WIDTH * BITS).to(tl.uint8)[None, :] & (2**BITS - 1)
    place = row * scale_row + head * scale_head + token[:, None] * scale_token + (channel // GROUP)[None, :]
    # Half of everything, since code * scale can overflow where its sum with a negative offset doesn't.
    half_scale = tl.load(scale + place, mask=real, other=0.0).to(tl.float32) / 2
    half_offset = tl.load(offset + place, mask=real, other=0.0).to(tl.float32) / 2
    value = 2 * (code.to(tl.float32) * half_scale + half_offset)
    value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(out + (pair * tokens + token)[:, None] * DIM + channel[None, :], value, mask=real)
