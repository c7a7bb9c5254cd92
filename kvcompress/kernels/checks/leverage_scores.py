"""Cases of :mod:`kvcompress.kernels.leverage_scores`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.leverage_scores import leverage_scores


class Shape(NamedTuple):
    rows: int
    kv_heads: int
    candidates: int
    key_dim: int
    value_dim: int
    rank: int | None


# One candidate, lengths around a block, dims that are no power of two, ranks around a block of columns.
SHAPES = [
    Shape(1, 1, 1, 16, 16, 20),
    Shape(2, 2, 31, 20, 64, 1),
    Shape(1, 3, 33, 80, 20, 33),
    Shape(2, 1, 65, 64, 80, None),
]
MORE = [
    Shape(1, 1, 32, 128, 96, 16),
    Shape(1, 2, 5, 256, 192, 20),
    Shape(3, 1, 17, 96, 128, 32),
    Shape(1, 1, 34, 192, 256, None),
]
HEAVY = [Shape(576, 8, 2112, 128, 128, 20), Shape(64, 4, 4095, 192, 128, 33), Shape(576, 8, 2112, 128, 128, None)]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for kind in KINDS:
            yield _case(shape, kind, HALF)
    for shape in MORE:
        yield _case(shape, "normal", BRAIN)
    for dtypes in ((FULL, FULL), (BRAIN, FULL), (FULL, HALF)):
        yield _case(SHAPES[2], "offset", *dtypes)
    # Squares and products of these over- and underflow, their ratios don't.
    for shape in (SHAPES[1], SHAPES[3]):
        yield _case(shape, "normal", FULL, scales=(1e30, 1e-25))
        yield _case(shape, "normal", FULL, scales=(1e-30, 1e-30))
        yield _case(shape, "normal", BRAIN, scales=(1e37, 1e37))
    yield _case(SHAPES[2], "normal", BRAIN, projection_scale=1e-15)
    for dim in (1, 3):
        yield _case(SHAPES[2], "normal", HALF, poisoned=dim)
    yield _case(SHAPES[2], "normal", HALF, transposed=True)
    for shape in HEAVY:
        yield _case(shape, "normal", BRAIN, heavy=True)


def _case(
    shape: Shape,
    kind: str,
    dtype: torch.dtype,
    value_dtype: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    projection_scale: float = 1.0,
    poisoned: int = 2,
    transposed: bool = False,
    heavy: bool = False,
) -> Case:
    """
    Args:
        scales: of keys and values.
        poisoned: the dimension before and beyond which there is NaN.
        transposed: channels are not neighbours in memory.
    """
    value_dtype = value_dtype or dtype

    def make(device: torch.device) -> Arguments:
        rows, kv_heads, candidates, key_dim, value_dim, rank = shape
        keys = vectors(device, kind, rows, kv_heads, candidates, key_dim, dtype=dtype) * scales[0]
        values = vectors(device, kind, rows, kv_heads, candidates, value_dim, dtype=value_dtype, seed=1) * scales[1]
        projection = None
        if rank is not None:
            height = max(key_dim, value_dim)
            projection = vectors(device, "normal", rows, 1, height, rank, dtype=FULL, seed=2) * projection_scale
        tensors = [within_poison(tensor, poisoned) for tensor in (keys, values)]
        if transposed:
            tensors = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in tensors]
        return {"keys": tensors[0], "values": tensors[1], "projection": projection}

    types = " by ".join(str(name).removeprefix("torch.") for name in dict.fromkeys((dtype, value_dtype)))
    name = f"{kind}, {'x'.join(map(str, shape))}, {types}"
    name += "" if scales == (1.0, 1.0) else f", times {scales[0]:g} and {scales[1]:g}"
    name += "" if projection_scale == 1.0 else f", G times {projection_scale:g}"
    name += "" if poisoned == 2 else f", poison along {poisoned}"
    name += ", transposed" if transposed else ""
    return Case("leverage_scores", name, leverage_scores, make, heavy=heavy)
