"""How Triton kernels are declared and launched.

Triton is optional: without it this module still imports, and only the torch references run. With ``TRITON_INTERPRET=1``
in the environment before the import, kernels run on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


class Tiling(NamedTuple):
    """How a kernel is cut up: tokens per block, warps per program, stages of the software pipeline."""

    block: int
    warps: int = 4
    stages: int = 2


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton has this too, but wrapped for use in kernels, at a microsecond a call."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (number - 1).bit_length()


class Compiled(NamedTuple):
    """A kernel compiled for a target, not launched: its name, what it was specialized for, and Triton's result."""

    name: str
    constants: dict[str, Any]
    tiling: Tiling
    kernel: Any


_compiling: ContextVar[list[Compiled] | None] = ContextVar("compiling", default=None)
_tilings: ContextVar[dict[str, Tiling] | None] = ContextVar("tilings", default=None)


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or the bare function where there is no Triton."""
    return function if triton is None else triton.jit(function)


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


if triton is not None:
    _INTERPRETED = tl.constexpr(is_interpreted())


@jit
def cast(x, TYPE: tl.constexpr):
    """``x.to(TYPE)``, rounded to the nearest, ties to even."""
    if _INTERPRETED and tl.bfloat16 == TYPE:
        # The interpreter cuts the lower bits off instead.
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@jit
def dot(a, b):
    """Product of matrices, or of batches of them, with sums in float32 and nothing rounded before."""
    if _INTERPRETED:
        # It would multiply the bits of bfloat16 numbers. In float32 their products are the same.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


def tiling(operation: str, default: Tiling) -> Tiling:
    """The tiling to use: the default unless :func:`tilings` says otherwise.

    There is a fixed one per kind of input rather than an autotuner, because the order of a sum depends on it: the same
    seed has to give the same tokens on the next run.
    """
    return (_tilings.get() or {}).get(operation, default)


@contextmanager
def tilings(**chosen: Tiling) -> Iterator[None]:
    """Use other tilings within the block, by operation; for tuning and for tests."""
    token = _tilings.set({**(_tilings.get() or {}), **chosen})
    try:
        yield
    finally:
        _tilings.reset(token)


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Within the block, launches compile their kernel for Triton's active target and collect the result instead."""
    compiled: list[Compiled] = []
    token = _compiling.set(compiled)
    try:
        yield compiled
    finally:
        _compiling.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], shape: Tiling, *args: Any, **constants: Any) -> None:
    """Run ``kernel`` once per point of ``grid``, on the device of its first tensor.

    Args:
        shape: its warps and stages; the block is for the caller to pass on.
        args: tensors, numbers and named tuples of them. constants: compile-time arguments.
    """
    if 0 in grid:
        return
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    compiled = _compiling.get()
    if compiled is not None:
        made = kernel.warmup(*args, grid=grid, **options, **constants)
        compiled.append(Compiled(kernel.__name__, constants, shape, made))
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    # Triton launches on the current device, which need not be that of a layer of a model spread over several.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **options, **constants)
