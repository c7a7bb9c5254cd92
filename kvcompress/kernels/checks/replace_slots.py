"""Cases of :mod:`kvcompress.kernels.replace_slots`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvcompress.kernels.checks.cases import KINDS, SEED, Arguments, Case, vectors, within_poison
from kvcompress.kernels.replace_slots import Replacement, plan_replacement, replace_slots

# Rows and kv_heads, slots, arrivals, W, shape of a slot: one slot, W around a block, all replaced, numbers and vectors.
SHAPES = [
    ((1, 1), 1, 1, 1, ()),
    ((2, 3), 40, 33, 31, (20,)),
    ((1, 2), 200, 150, 129, ()),
    ((2, 1), 20, 17, 17, (80,)),
    ((1, 2), 16, 16, 16, (128,)),
    ((1, 1), 5, 9, 3, (2, 24)),
    ((1, 2), 6, 5, 3, (1040,)),
    ((2, 2), 9, 7, 5, (1,)),
]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8)
BITS_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def cases() -> Iterator[Case]:
    for taken in (True, False):
        for shape in SHAPES:
            yield _case(shape, "normal", torch.float16, taken)
        for kind in KINDS[1:]:
            yield _case(SHAPES[1], kind, torch.float16, taken)
        for dtype in DTYPES[1:]:
            yield _case(SHAPES[1], "normal", dtype, taken)
            yield _case(SHAPES[2], "normal", dtype, taken)
        yield _case(SHAPES[1], "one head", torch.float16, taken)
        yield _case(((576, 8), 2112, 2176, 64, (128,)), "normal", torch.bfloat16, taken, heavy=True)


def _replaced(whole: Tensor, pool: Tensor, replacement: Replacement, rows: Tensor, taken: bool) -> Tensor:
    """Bits of all that the pool is a part of, afterwards: what isn't named keeps them, NaN or not."""
    within = whole.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    replace_slots(within, replacement, rows, taken)
    return whole.view(BITS_AS[whole.dtype.itemsize])


def _case(
    shape: tuple[tuple[int, int], int, int, int, tuple[int, ...]],
    kind: str,
    dtype: torch.dtype,
    taken: bool,
    heavy: bool = False,
) -> Case:
    leading, slots, arrivals, width, of_slot = shape

    def make(device: torch.device) -> Arguments:
        pool = within_poison(_numbers(device, kind, dtype, *leading, slots, *of_slot))
        whole = torch.empty(0, dtype=dtype, device=device).set_(pool.untyped_storage())
        count = width if taken else arrivals
        rows = within_poison(_numbers(device, kind, dtype, *leading, count, *of_slot, seed=SEED + 1))
        stays, comes = _marks(kind, leading, slots, arrivals, width)
        replacement = plan_replacement(stays.to(device), comes.to(device), width)
        return {"whole": whole, "pool": pool, "replacement": replacement, "rows": rows, "taken": taken}

    size = "x".join(map(str, (*leading, f"{width} of {slots}", *of_slot)))
    name = f"{kind}, {size}, {str(dtype).removeprefix('torch.')}, {'taken' if taken else f'of {arrivals}'}"
    return Case("replace_slots", name, _replaced, make, exact=True, heavy=heavy)


def _numbers(device: torch.device, kind: str, dtype: torch.dtype, *shape: int, seed: int = SEED) -> Tensor:
    if not dtype.is_floating_point:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(torch.iinfo(dtype).max, shape, generator=generator, dtype=dtype).to(device)
    # With an axis of channels for the outlier, where slots hold bare numbers.
    return vectors(device, kind, *shape, *[1] * (len(shape) == 3), dtype=dtype, seed=seed).reshape(shape)


def _marks(kind: str, leading: tuple[int, int], slots: int, arrivals: int, width: int) -> tuple[Tensor, Tensor]:
    """Which slots stay and which arrivals come: W of them in the first head, fewer in the others."""
    generator = torch.Generator().manual_seed(SEED)
    stays = torch.ones(*leading, slots, dtype=torch.bool)
    comes = torch.zeros(*leading, arrivals, dtype=torch.bool)
    for row in range(leading[0]):
        for head in range(leading[1]):
            index = row * leading[1] + head
            leave = width if index == 0 else 0 if kind == "one head" else max(0, width - index % 5)
            stays[row, head, torch.randperm(slots, generator=generator)[:leave]] = False
            comes[row, head, torch.randperm(arrivals, generator=generator)[:leave]] = True
    return stays, comes
