"""Cases of :mod:`kvcompress.kernels.window_scores`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.window_scores import window_scores


class Shape(NamedTuple):
    rows: int
    kv_heads: int
    group: int
    window: int
    candidates: int
    dim: int


# Lengths around a block, windows around a chunk, odd groups, dims that are no power of two.
SHAPES = [
    Shape(1, 1, 1, 1, 1, 16),
    Shape(2, 2, 3, 7, 63, 20),
    Shape(1, 2, 5, 17, 129, 80),
    Shape(2, 1, 4, 65, 65, 64),
]
# More of each, on one kind of data: a long window, large groups and dims, borders of both blocks.
MORE = [
    Shape(1, 1, 1, 200, 128, 96),
    Shape(1, 1, 20, 1, 127, 128),
    Shape(3, 1, 16, 2, 64, 192),
    Shape(1, 3, 4, 64, 33, 256),
    Shape(1, 2, 1, 128, 257, 16),
]
HEAVY = [Shape(576, 8, 4, 64, 2112, 128), Shape(64, 4, 5, 200, 4095, 80)]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for kind in (*KINDS, "spike"):
            yield _case(shape, kind, HALF)
    for shape in MORE:
        yield _case(shape, "normal", BRAIN)
    # One type for both is multiplied as it is; float32 and mixed types are multiplied in float32.
    for dtypes in ((FULL, FULL), (BRAIN, FULL), (FULL, HALF), (HALF, BRAIN)):
        yield _case(SHAPES[1], "normal", *dtypes)
        yield _case(SHAPES[3], "offset", *dtypes)
    yield _case(MORE[2], "normal", FULL)
    yield _case(SHAPES[0], "normal", FULL)
    yield _case(SHAPES[2], "spike", FULL)
    for dim in (1, 3):
        yield _case(SHAPES[1], "normal", HALF, poisoned=dim)
        yield _case(SHAPES[2], "normal", FULL, poisoned=dim)
    yield _case(SHAPES[2], "normal", HALF, transposed=True)
    yield _case(HEAVY[0], "normal", BRAIN, heavy=True)
    yield _case(HEAVY[1], "offset", BRAIN, FULL, heavy=True)


def _case(
    shape: Shape,
    kind: str,
    dtype: torch.dtype,
    key_dtype: torch.dtype | None = None,
    poisoned: int = 2,
    transposed: bool = False,
    heavy: bool = False,
) -> Case:
    """
    Args:
        kind: as in :func:`vectors`, or "spike" for one logit far above the others.
        poisoned: the dimension before and beyond which there is NaN.
        transposed: channels are not neighbours in memory.
    """
    key_dtype = key_dtype or dtype

    def make(device: torch.device) -> Arguments:
        rows, kv_heads, group, window, candidates, dim = shape
        like = "normal" if kind == "spike" else kind
        queries = vectors(device, like, rows, kv_heads * group, window, dim, dtype=dtype)
        keys = vectors(device, like, rows, kv_heads, candidates, dim, dtype=key_dtype, seed=1)
        if kind == "spike":
            queries[..., 0] = 100
            keys[:, :, candidates // 2, 0] = 100
        both = (within_poison(tensor, poisoned) for tensor in (queries, keys))
        if transposed:
            both = (tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in both)
        return {**dict(zip(("queries", "keys"), both, strict=True)), "scaling": 1.0 if kind == "spike" else dim**-0.5}

    types = " by ".join(str(name).removeprefix("torch.") for name in dict.fromkeys((dtype, key_dtype)))
    name = f"{kind}, {'x'.join(map(str, shape))}, {types}"
    name += "" if poisoned == 2 else f", poison along {poisoned}"
    name += ", transposed" if transposed else ""
    return Case("window_scores", name, window_scores, make, heavy=heavy)
