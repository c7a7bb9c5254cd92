"""Cases of :mod:`kvcompress.kernels.redundancy`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.redundancy import mean_similarity

# (rows, kv_heads, N, head_dim): one candidate, lengths around a block, dims that are no power of two.
SHAPES = [(1, 1, 1, 16), (2, 2, 63, 20), (1, 3, 65, 80), (2, 1, 130, 64), (1, 1, 64, 96)]


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for kind in KINDS:
            yield _case(shape, kind, torch.float16)
    for dtype in (torch.bfloat16, torch.float32):
        yield _case(SHAPES[2], "normal", dtype)
    yield _case((576, 8, 2112, 128), "normal", torch.bfloat16, heavy=True)


def _case(shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        return {"keys": within_poison(vectors(device, kind, *shape, dtype=dtype))}

    name = f"{kind}, {'x'.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
    return Case("redundancy", name, mean_similarity, make, heavy=heavy)
