"""Cases of :mod:`kvcompress.kernels.hadamard`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.hadamard import hadamard

# Shape and block: all blocks from 1 to 256, one vector, one block more or less than a program takes, any leading axes.
SHAPES = [
    ((3, 5), 1),
    ((2, 3, 6), 2),
    ((1, 1, 127, 20), 4),
    ((129, 24), 8),
    ((2, 5, 13, 80), 16),
    ((96,), 32),
    ((1, 3, 11, 192), 64),
    ((17, 128), 128),
    ((2, 4, 1, 256), 256),
    ((3, 512), 512),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def cases() -> Iterator[Case]:
    for shape, block in SHAPES:
        for dtype in DTYPES:
            yield _case(shape, block, "normal", dtype)
    for kind in KINDS[1:]:
        for dtype in DTYPES:
            yield _case(*SHAPES[4], kind, dtype)
    yield _case((576, 8, 2112, 128), 128, "normal", torch.bfloat16, heavy=True)


def _case(shape: tuple[int, ...], block: int, kind: str, dtype: torch.dtype, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        return {"vectors": within_poison(vectors(device, kind, *shape, dtype=dtype), dim=0), "block": block}

    name = f"{kind}, {'x'.join(map(str, shape))} in {block}, {str(dtype).removeprefix('torch.')}"
    # Sums and differences in the same order, rounded alike.
    return Case("hadamard", name, hadamard, make, exact=True, heavy=heavy)
