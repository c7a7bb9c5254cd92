"""Cases of :mod:`kvcompress.kernels.quantize_tokens`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.quantize_tokens import quantize_tokens

# Shape, bits and group: groups in one lane of bytes, across lanes and as wide as the vector; odd numbers of both.
SHAPES = [
    ((1, 16), 8, 16),
    ((2, 3, 11, 20), 4, 20),
    ((129, 16), 3, 8),
    ((1, 2, 65, 24), 2, 8),
    ((2, 1, 17, 80), 4, 16),
    ((15, 80), 3, 40),
    ((1, 1, 16, 80), 2, 10),
    ((1, 3, 17, 96), 2, 32),
    ((2, 2, 5, 96), 8, 12),
    ((1, 2, 15, 128), 4, 32),
    ((17, 128), 3, 128),
    ((2, 9, 192), 4, 64),
    ((7, 192), 2, 192),
    ((2, 5, 256), 3, 32),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        for dtype in DTYPES:
            for kind in ("normal", "offset", "minus"):
                yield _case(*shape, kind, dtype)
    for shape in (SHAPES[4], SHAPES[10]):
        for dtype in DTYPES:
            for kind in (*KINDS[2:], "wide", "subnormal", "smallest", "huge", "too huge", "largest", "representable"):
                yield _case(*shape, kind, dtype)
    for dtype in DTYPES[:2]:
        yield _case(*SHAPES[6], "16 bits", dtype)
    yield _case((576, 8, 64, 128), 4, 32, "normal", torch.bfloat16, heavy=True)
    yield _case((576, 8, 64, 128), 3, 128, "normal", torch.float16, heavy=True)


def _case(shape: tuple[int, ...], bits: int, group: int, kind: str, dtype: torch.dtype, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        numbers = within_poison(_numbers(device, kind, shape, dtype), dim=0)
        return {"vectors": numbers, "bits": bits, "group": group, "dtype": dtype}

    name = f"{kind}, {'x'.join(map(str, shape))}, {bits} bits by {group}, {str(dtype).removeprefix('torch.')}"
    return Case("quantize_tokens", name, quantize_tokens, make, exact=True, heavy=heavy)


def _numbers(device: torch.device, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """float32 as a rule, of all sizes that metadata of a type can or cannot describe."""
    info = torch.finfo(dtype)
    numbers = vectors(device, kind, *shape, dtype=torch.float32)
    if kind == "minus":  # below zero throughout, where rounding down is away from it
        return -5 - numbers.sigmoid()
    if kind == "wide":
        return numbers * 10.0 ** torch.arange(-6, 7, device=device).repeat(shape[-1])[: shape[-1]]
    if kind == "subnormal":
        return numbers * info.smallest_normal / 8
    if kind == "smallest":
        return numbers.sign() * info.smallest_normal * info.eps
    if kind == "huge":
        return numbers.sign() * (6e4 if dtype == torch.float16 else 3e38)
    if kind == "too huge":  # both ends of a range beyond the largest number of the metadata, for 16 bits
        sign = torch.where(numbers[..., :1] > 0, 1, -1)
        return sign * (1e30 if dtype == torch.float16 else 3.4e38) * (1 - numbers.sigmoid() / 1000)
    if kind == "largest":
        return numbers.sign() * info.max
    if kind == "16 bits":
        return numbers.to(dtype)
    return numbers.to(dtype).float() if kind == "representable" else numbers
