"""Per-token uniform quantization: the grid of every group of channels, and codes packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.affine import affine_codes, affine_grid
from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.packing import channel_multiple, pack, packed_bytes

_LARGEST_DIM = 1024
_BITS_AS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def quantize_tokens_reference(
    vectors: Tensor, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets of vectors (:mod:`kvcompress.kernels.affine`, :mod:`kvcompress.kernels.packing`).

    Args:
        vectors: (..., dim) finite, computed with in float32; dim a multiple of group.
        bits: 8, 4, 3 or 2 per code. group: channels that share a scale. dtype: of scales and offsets.

    Returns:
        (..., dim * bits / 8) uint8, and twice (..., dim / group) of dtype.
    """
    groups = vectors.float().unflatten(-1, (-1, group))
    low, high = torch.aminmax(groups, dim=-1)
    scale, offset = affine_grid(low, high, bits, dtype)
    codes = affine_codes(groups, scale, offset, bits)
    return pack(codes.flatten(-2), bits), scale, offset


def quantize_tokens(vectors: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize_tokens_reference`, by its kernel where there is one for the device; equal to the bit."""
    *leading, dim = vectors.shape
    supported = dim <= _LARGEST_DIM and vectors.dtype in _BITS_AS and dtype in _BITS_AS
    if not use_triton("quantize_tokens", vectors.device, supported):
        return quantize_tokens_reference(vectors, bits, group, dtype)
    vectors = vectors.contiguous()
    codes = torch.empty(*leading, packed_bytes(dim, bits), dtype=torch.uint8, device=vectors.device)
    scale, offset = (torch.empty(*leading, dim // group, dtype=dtype, device=vectors.device) for _ in range(2))
    # Two launches, since the channels of a byte lie in different groups: the second one reads the grid of each channel.
    metadata = [part.view(_BITS_AS[dtype]) for part in (scale, offset)]
    kind = {"BITS": bits, "DTYPE": str(dtype).removeprefix("torch."), "GROUP": group}
    count, block_group = scale.numel(), power_of_2(group)
    shape = tiling("quantize_grids", Tiling(block=max(1, 2048 // block_group)))
    launch(
        _grids, (ceil_div(count, shape.block),), shape, vectors, *metadata, count,
        **kind, BLOCK_GROUP=block_group, BLOCK=shape.block,
    )  # fmt: skip
    count, lanes = vectors.numel() // dim, channel_multiple(bits)
    block_run = power_of_2(dim // lanes)
    shape = tiling("quantize_tokens", Tiling(block=max(1, 1024 // (lanes * block_run))))
    launch(
        _codes, (ceil_div(count, shape.block),), shape, vectors, codes, *metadata, count,
        **kind, LANES=lanes, RUN=dim // lanes, BLOCK_RUN=block_run, BLOCK=shape.block,
    )  # fmt: skip
    return codes, scale, offset


@jit
def _rounded(magnitude, up, DTYPE):
    """int32 bits of the number of DTYPE next to a nonnegative float32: not below it where ``up``, else not above."""
    bits = magnitude.to(tl.int32, bitcast=True)
    if DTYPE == "bfloat16":
        # The upper half of a float32.
        bits = tl.minimum(tl.where(up, bits + 0xFFFF, bits) >> 16, 0x7F7F)
    elif DTYPE == "float16":
        nearest = magnitude.to(tl.float16)
        bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
        nearest = nearest.to(tl.float32)
        bits += tl.where(up, (nearest < magnitude).to(tl.int32), -(nearest > magnitude).to(tl.int32))
        bits = tl.minimum(bits, 0x7BFF)
    return bits


@jit
def _number(bits, DTYPE):
    """float32 that int32 bits of a number of DTYPE stand for."""
    if DTYPE == "bfloat16":
        number = (bits << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = bits.to(tl.float32, bitcast=True)
    return number


@jit
def _grids(
    vectors, scales, offsets, count,
    BITS: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bits of scale and offset, as :func:`kvcompress.kernels.affine.affine_grid` has them, of ``count`` groups."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, BLOCK_GROUP)
    real = (group < count)[:, None] & (channel < GROUP)[None, :]
    tile = tl.load(vectors + group[:, None] * GROUP + channel[None, :], mask=real, other=0.0).to(tl.float32)
    low = tl.min(tl.where(real, tile, float("inf")), axis=1)
    high = tl.max(tl.where(real, tile, float("-inf")), axis=1)
    # Down is away from zero for a negative number.
    negative = low < 0
    bits = _rounded(tl.abs(low), negative, DTYPE)
    bits = tl.where(negative, bits | (-(2**31) if DTYPE == "float32" else 0x8000), bits)
    tl.store(offsets + group, bits.to(offsets.dtype.element_ty), mask=group < count)
    # Up to float32 and then on to DTYPE is up to DTYPE.
    width = tl.maximum(high.to(tl.float64) - _number(bits, DTYPE).to(tl.float64), 0.0)
    exact = width / (2.0**BITS - 1)
    single = exact.to(tl.float32)
    bits = single.to(tl.int32, bitcast=True)
    single = tl.where(single.to(tl.float64) < exact, bits + 1, bits).to(tl.float32, bitcast=True)
    tl.store(scales + group, _rounded(single, True, DTYPE).to(scales.dtype.element_ty), mask=group < count)


@jit
def _codes(
    vectors, codes, scales, offsets, count,
    BITS: tl.constexpr, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr, BLOCK_RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of ``count`` vectors; a byte takes them from each of the LANES runs of RUN channels."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    run = tl.arange(0, BLOCK_RUN)
    lane = tl.arange(0, LANES)[None, :, None]
    channel = lane * RUN + run[None, None, :]
    real = (token < count)[:, None, None] & (run < RUN)[None, None, :]
    number = tl.load(vectors + token[:, None, None] * (LANES * RUN) + channel, mask=real, other=0.0)
    place = token[:, None, None] * (LANES * RUN // GROUP) + channel // GROUP
    offset = _number(tl.load(offsets + place, mask=real, other=0).to(tl.int32), DTYPE)
    scale = _number(tl.load(scales + place, mask=real, other=0).to(tl.int32), DTYPE)
    # A constant group has scale 0 and is its own offset.
    steps = (number.to(tl.float64) - offset.to(tl.float64)) / tl.where(scale > 0, scale, 1.0).to(tl.float64)
    # Numbers near 2**52 have no fraction: adding it rounds to the nearest integer, halves to the even one.
    code = ((tl.minimum(tl.maximum(steps, 0.0), 2.0**BITS - 1) + 2.0**52) - 2.0**52).to(tl.int32)
    byte = codes + token[:, None] * (LANES * RUN * BITS // 8) + run[None, :]
    real = (token < count)[:, None] & (run < RUN)[None, :]
    if BITS == 3:
        # A plane of two bits with four lanes, twice as long, and one of one bit with eight.
        low = (code & 3) << (lane // 2 * 2)
        tl.store(byte, tl.sum(tl.where(lane % 2 == 0, low, 0), axis=1).to(tl.uint8), mask=real)
        tl.store(byte + RUN, tl.sum(tl.where(lane % 2 == 1, low, 0), axis=1).to(tl.uint8), mask=real)
        tl.store(byte + 2 * RUN, tl.sum((code >> 2) << lane, axis=1).to(tl.uint8), mask=real)
    else:
        tl.store(byte, tl.sum(code << (BITS * lane), axis=1).to(tl.uint8), mask=real)
