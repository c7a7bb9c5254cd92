"""Cases of :mod:`kvcompress.kernels.value_statistics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.value_statistics import Statistic, value_statistic

# (rows, kv_heads, N, value_dim): one token, lengths around a block, dims that are no power of two; and fewer axes.
SHAPES: list[tuple[int, ...]] = [(1, 1, 1, 16), (2, 2, 129, 20), (1, 3, 33, 80), (2, 1, 64, 64), (1, 1, 31, 96)]
FLAT = [(5,), (33, 2), (2, 3, 128)]


def cases() -> Iterator[Case]:
    for statistic in get_args(Statistic):
        for kind in (*KINDS, "minus", "huge", "NaN"):
            for shape in SHAPES if kind in ("normal", "offset") else SHAPES[1:3]:
                yield _case(statistic, shape, kind, torch.bfloat16 if kind == "huge" else torch.float16)
        for shape in FLAT:
            yield _case(statistic, shape, "normal", torch.float16)
        for dtype in (torch.bfloat16, torch.float32):
            yield _case(statistic, SHAPES[2], "normal", dtype)
    yield _case("var", (576, 8, 2112, 128), "normal", torch.bfloat16, heavy=True)


def _case(statistic: Statistic, shape: tuple[int, ...], kind: str, dtype: torch.dtype, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        values = _values(device, kind, shape, dtype)
        # Channels of wider vectors, as the values of latent attention are.
        values = within_poison(values, dim=-1)
        return {"values": within_poison(values, dim=-2) if len(shape) > 1 else values, "statistic": statistic}

    name = f"{statistic}, {kind}, {'x'.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
    return Case("value_statistic", name, value_statistic, make, heavy=heavy)


def _values(device: torch.device, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if kind == "minus":  # where padding with zeros would be the largest
        return -vectors(device, "offset", *shape, dtype=dtype)
    values = vectors(device, kind, *shape, dtype=dtype)
    if kind == "huge":  # widths, squares and sums of these overflow float32
        return values.sign() * 3e38
    if kind == "NaN":
        values[..., -1, 3] = torch.nan
    return values
