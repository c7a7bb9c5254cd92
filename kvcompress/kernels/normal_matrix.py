"""Standard normal matrices that depend on what they are for alone: one per row, the same on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, tiling, tl
from kvcompress.kernels.philox import random_words, to_normal


def normal_matrix_reference(
    seed: int, sequence: Tensor, layer: Tensor, event: Tensor, height: int, width: int, stream: int
) -> Tensor:
    """Entry (i, j) of a row's matrix is drawn at head 0 and position i * width + j (:mod:`kvcompress.kernels.philox`).

    Args:
        seed: any integer; its low 64 bits count.
        sequence, layer, event: (rows,) int64.
        stream: a 32-bit number for this use of randomness.

    Returns:
        (rows, 1, height, width) float32.
    """
    return to_normal(*_words_reference(seed, sequence, layer, event, height, width, stream))


def normal_matrix(
    seed: int, sequence: Tensor, layer: Tensor, event: Tensor, height: int, width: int, stream: int
) -> Tensor:
    """:func:`normal_matrix_reference`, by its kernel where there is one for the device."""
    if not use_triton("normal_matrix", sequence.device):
        return normal_matrix_reference(seed, sequence, layer, event, height, width, stream)
    (out,) = _launch(seed, sequence, layer, event, height, width, stream, torch.float32, count=1)
    return out


def matrix_words(
    seed: int, sequence: Tensor, layer: Tensor, event: Tensor, height: int, width: int, stream: int
) -> tuple[Tensor, Tensor]:
    """The two random words behind each entry, (rows, 1, height, width) int64; their bits are equal on every device."""
    if not use_triton("normal_matrix", sequence.device):
        return _words_reference(seed, sequence, layer, event, height, width, stream)
    first, second = _launch(seed, sequence, layer, event, height, width, stream, torch.int64, count=2)
    return first, second


def _words_reference(
    seed: int, sequence: Tensor, layer: Tensor, event: Tensor, height: int, width: int, stream: int
) -> tuple[Tensor, Tensor]:
    entry = torch.arange(height * width, device=sequence.device).unsqueeze(0)
    head = torch.zeros(1, 1, dtype=torch.int64, device=sequence.device)
    words = random_words(seed, sequence[:, None], layer[:, None], head, event[:, None], entry, stream)
    first, second = (word.reshape(len(sequence), 1, height, width) for word in words[:2])
    return first, second


def _launch(
    seed: int,
    sequence: Tensor,
    layer: Tensor,
    event: Tensor,
    height: int,
    width: int,
    stream: int,
    dtype: torch.dtype,
    count: int,
) -> list[Tensor]:
    shape = tiling("normal_matrix", Tiling(block=256, stages=1))
    rows, entries = len(sequence), height * width
    out = [torch.empty(rows, 1, height, width, dtype=dtype, device=sequence.device) for _ in range(count)]
    blocks = ceil_div(entries, shape.block)
    sites = (sequence.contiguous(), layer.contiguous(), event.contiguous())
    words = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, stream & 0xFFFFFFFF)
    launch(
        _draw, (rows * blocks,), shape, *sites, out[0], out[-1], *words, entries, blocks,
        WORDS=count == 2, TWO_PI=2.0 * math.pi, BLOCK=shape.block,
    )  # fmt: skip
    return out


@jit
def _uniform(word):
    """As :func:`kvcompress.kernels.philox.to_uniform`."""
    return ((word >> 9).to(tl.float64) + 0.5) * 2.0**-23


@jit
def _draw(
    sequence, layer, event, out, second_out, seed_low, seed_high, stream, entries, blocks,
    WORDS: tl.constexpr, TWO_PI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    entry = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.uint32)
    name = tl.load(sequence + row).to(tl.int64)
    key, other_key, _, _ = tl.philox_impl(
        zero + name.to(tl.uint32), zero + (name >> 32).to(tl.uint32), zero, zero,
        zero + tl.full((), seed_low, tl.uint32), zero + tl.full((), seed_high, tl.uint32),
    )  # fmt: skip
    site = zero + (tl.load(layer + row).to(tl.int64) * 65536).to(tl.uint32)
    when = zero + tl.load(event + row).to(tl.uint32)
    first, second, _, _ = tl.philox_impl(
        entry.to(tl.uint32), when, site, zero + tl.full((), stream, tl.uint32), key, other_key
    )
    place = row.to(tl.int64) * entries + entry
    if WORDS:
        tl.store(out + place, first.to(tl.int64), mask=entry < entries)
        tl.store(second_out + place, second.to(tl.int64), mask=entry < entries)
    else:
        # In float64, so that devices with different logarithms agree after rounding.
        radius = tl.sqrt(-2.0 * tl.log(_uniform(first)))
        normal = radius * tl.cos(TWO_PI * _uniform(second))
        tl.store(out + place, normal.to(tl.float32), mask=entry < entries)
