"""Codes of 8, 4, 3 or 2 bits in bytes.

A byte holds codes of channels that are far apart: with L codes per byte, byte i holds channels i, i + d/L, i + 2d/L,
... from its lowest bits up. So the codes at one place of every byte are a contiguous run of channels, which unpacks by
one shift and one mask without interleaving. Three bits are packed as a plane of two and a plane of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# bits -> planes of bits that divide a byte evenly, lowest bits of the code first
_PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


def channel_multiple(bits: int) -> int:
    """What the number of channels must be a multiple of, so that every byte is full."""
    return max(8 // plane for plane in _PLANES[bits])


def packed_bytes(dim: int, bits: int) -> int:
    """Bytes of ``dim`` codes."""
    return dim * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """(..., dim) uint8 codes below 2**bits -> (..., dim * bits / 8) uint8."""
    packed = []
    shift = 0
    for plane in _PLANES[bits]:
        lanes = 8 // plane
        part = ((codes >> shift) & (2**plane - 1)).unflatten(-1, (lanes, -1))
        byte = part[..., 0, :].clone()
        for lane in range(1, lanes):
            byte |= part[..., lane, :] << (plane * lane)
        packed.append(byte)
        shift += plane
    return torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack`: (..., bytes) uint8 -> (..., bytes * 8 / bits) uint8."""
    dim = packed.shape[-1] * 8 // bits
    codes: Tensor | None = None
    start = shift = 0
    for plane in _PLANES[bits]:
        lanes = 8 // plane
        byte = packed[..., start : start + dim // lanes]
        part = torch.cat([(byte >> (plane * lane)) & (2**plane - 1) for lane in range(lanes)], dim=-1)
        codes = part if codes is None else codes | (part << shift)
        start += dim // lanes
        shift += plane
    assert codes is not None
    return codes
