"""Cases of :mod:`kvcompress.kernels.normal_matrix`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.checks.cases import Arguments, Case
from kvcompress.kernels.normal_matrix import matrix_words, normal_matrix

_WORD = 0xFFFFFFFF
# Seeds with words that are zero, one, the largest, or would be negative; the last one has more than 64 bits.
SEEDS = [0, 1, 2026, -1, 2**31, 2**32, 2**32 + 1, 2**63, -(2**63), 2**64 - 1, 2**64 + 5]
SEQUENCES = [0, 1, -1, 7, 2**31, 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63)]
# (rows, height, width): one entry, entries around a block.
SHAPES = [(1, 1, 1), (2, 16, 16), (3, 51, 5), (2, 257, 1), (10, 80, 20)]


def cases() -> Iterator[Case]:
    for seed in SEEDS:
        yield _case(SHAPES[2], seed, words=True)
    for stream in (0, 1, 2**31, _WORD):
        yield _case(SHAPES[2], 3, stream, words=True)
    for shape in SHAPES:
        yield _case(shape, -5, words=True)
        yield _case(shape, -5, words=False)
    yield _case((576, 128, 20), 2026, words=True, heavy=True)
    yield _case((576, 256, 33), 2026, words=False, heavy=True)


def _case(shape: tuple[int, int, int], seed: int, stream: int = 12345, words: bool = True, heavy: bool = False) -> Case:
    """
    Args:
        words: compare the random bits, exactly, rather than the normals, whose logarithms and cosines differ between
            libraries in the last digit of float64.
    """
    rows, height, width = shape

    def make(device: torch.device) -> Arguments:
        row = torch.arange(rows)
        return {
            "seed": seed,
            "sequence": torch.tensor(SEQUENCES)[(row + 2) % len(SEQUENCES)].to(device),
            "layer": torch.tensor([0, 1, 35, 65535])[row % 4].to(device),
            "event": torch.tensor([0, 1, _WORD])[row % 3].to(device),
            "height": height,
            "width": width,
            "stream": stream,
        }

    name = f"{'words' if words else 'normals'}, {'x'.join(map(str, shape))}, seed {seed}, stream {stream}"
    return Case("normal_matrix", name, matrix_words if words else normal_matrix, make, exact=words, heavy=heavy)
