"""Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw is a pure function of *what it is for*, never of how many draws came before it:

    key     = first two words of Philox(counter = (sequence low, sequence high, 0, 0), key = (seed low, seed high))
    counter = (position, event, layer * 65536 + head, stream)

so the same token of the same sequence gets the same number whatever the batch size, the batch order, the order
in which layers run, or the device. ``stream`` separates the uses of randomness (one per stage).

Words are uint32 values carried in int64 tensors, since torch has no full uint32 arithmetic.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten Philox rounds.

    Args:
        counter: four int64 tensors holding uint32 words; shapes broadcast with each other and with ``key``.
        key: two int64 tensors holding uint32 words.

    Returns:
        Four int64 tensors of the broadcast shape holding uniformly distributed uint32 words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap in int64, but their bits are right: masking after the shift yields the high word.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def stream_of(name: str) -> int:
    """A 32-bit number for one use of randomness, from its name (CRC-32), so that stages never share draws."""
    return zlib.crc32(name.encode())


def sequence_key(seed: int, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Philox key of each sequence: two int64 tensors of ``sequence``'s shape holding uint32 words.

    Args:
        seed: any integer; its low 64 bits count.
        sequence: int64 tensor of 64-bit sequence identifiers.
    """
    zero = torch.zeros_like(sequence)
    seed_words = (zero + (seed & _MASK), zero + ((seed >> 32) & _MASK))
    k0, k1, _, _ = philox_4x32((sequence & _MASK, (sequence >> 32) & _MASK, zero, zero), seed_words)
    return k0, k1


def random_words(
    seed: int,
    sequence: Tensor,
    layer: Tensor,
    head: Tensor,
    event: Tensor,
    position: Tensor,
    stream: int,
) -> Words:
    """The four random words of every (sequence, layer, head, event, position), as in the module docstring.

    All tensors are int64 and broadcast together. ``layer`` and ``head`` must lie below 65536, ``event`` and
    ``position`` below 2**32.
    """
    k0, k1 = sequence_key(seed, sequence)
    site = layer * 65536 + head
    return philox_4x32((position, event, site, torch.full_like(position, stream)), (k0, k1))


def to_uniform(words: Tensor) -> Tensor:
    """uint32 words to float64 uniforms strictly inside (0, 1): the top 23 bits plus a half.

    23 bits, since 1 - 2**-25 (24 bits plus a half) would round to 1 in float32 and its Gumbel to infinity.
    """
    return ((words >> 9).to(torch.float64) + 0.5) * 2.0**-23


def to_gumbel(words: Tensor) -> Tensor:
    """uint32 words to standard Gumbel variates, -log(-log u), float32.

    Computed in float64 so that devices with different float32 logarithms agree after rounding.
    """
    return (-torch.log(-torch.log(to_uniform(words)))).to(torch.float32)


def to_normal(first: Tensor, second: Tensor) -> Tensor:
    """Two uint32 words to one standard normal variate (Box-Muller), float32."""
    radius = torch.sqrt(-2.0 * torch.log(to_uniform(first)))
    return (radius * torch.cos(2.0 * math.pi * to_uniform(second))).to(torch.float32)
