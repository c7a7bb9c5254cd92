"""Cases of :mod:`kvcompress.kernels.dequantize_tokens`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.dequantize_tokens import dequantize_tokens
from kvcompress.kernels.quantize_tokens import quantize_tokens

Shape = tuple[int, int, int, int]
# (rows, kv_heads, N, head_dim): one token, odd lengths, more than a block, dims that are no power of two.
SHAPES: list[Shape] = [(1, 1, 1, 16), (2, 2, 33, 80), (1, 3, 65, 64), (2, 1, 5, 192), (1, 2, 9, 24)]


def cases() -> Iterator[Case]:
    for bits in (8, 4, 3, 2):
        for shape in SHAPES:
            yield _case(shape, bits, shape[-1], "normal")
        for kind in KINDS:
            yield _case(SHAPES[2], bits, 32, kind)
    for dtype in (torch.bfloat16, torch.float32):
        yield _case(SHAPES[1], 4, 16, "offset", dtype)
    yield _case((576, 8, 1856, 128), 4, 128, "normal", torch.bfloat16, heavy=True)


def _case(
    shape: Shape, bits: int, group: int, kind: str, dtype: torch.dtype = torch.float16, heavy: bool = False
) -> Case:
    def make(device: torch.device) -> Arguments:
        codes, scale, offset = quantize_tokens(vectors(device, kind, *shape, dtype=dtype).float(), bits, group, dtype)
        parts = {"codes": codes, "scale": scale, "offset": offset}
        return {**{name: within_poison(part) for name, part in parts.items()}, "bits": bits, "group": group}

    name = f"{bits} bits, groups of {group}, {kind}, {'x'.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
    return Case("dequantize_tokens", name, dequantize_tokens, make, heavy=heavy)
