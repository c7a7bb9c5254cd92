"""What every kernel has to pass: the same cases in the interpreter, on a GPU, and compiled ahead of time.

A case calls a dispatching function on data and shapes chosen to hurt. Its result by the kernel is held against the
result by the torch reference, and both against the reference in float64 where the result is a number:

    |kernel - float64|  <=  2 |torch - float64| + FLOOR eps |float64|_max        largest error over all elements

so a kernel may lose no more than twice what the same computation loses in torch. What is exact by nature (random bits,
codes, moved rows) has to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompress.kernels.backend import backend
from kvcompress.quant.coded import Coded

# Roundings of a float32 result that even an exact computation may be charged with.
FLOOR = 16.0
SEED = 0

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of one operation.

    Attributes:
        operation: as in the name of its file. name: what is special about it.
        call: the dispatching function, or one that calls it and returns a tensor or a tuple of tensors.
        make: its arguments on a device; the same ones every time.
        peer: what torch does in the same precision, where its reference computes in a higher one than the kernel.
        exact: the kernel's result has to be equal to torch's.
        heavy: too slow for the interpreter; runs on a GPU, and is compiled.
    """

    operation: str
    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Callable[[torch.device], Arguments] = field(repr=False)
    peer: Callable[..., Tensor | tuple[Tensor, ...]] | None = None
    exact: bool = False
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.operation}: {self.name}"


class Outcome(NamedTuple):
    """Largest errors against float64, of the kernel, of torch, and what the kernel may have."""

    kernel: float
    torch: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.kernel <= self.allowed  # false for NaN


def check(case: Case, device: torch.device) -> list[Outcome]:
    """Run a case by its kernel and by torch: one outcome per tensor that the call returns.

    Raises:
        AssertionError: if no kernel ran, or the results differ in shape or type.
    """
    arguments = case.make(device)
    expected = run(case, arguments, "torch")
    ran: dict[str, str] = {}
    results = run(case, arguments, "triton", ran)
    assert ran.get(case.operation) == "triton", f"{case}: ran {ran}, not the kernel of {case.operation}"
    exact = expected if case.exact else run(case, doubled(arguments), "torch")
    if case.peer is not None:
        expected = run(replace(case, call=case.peer), arguments, "torch")
    return [_compare(case, *tensors) for tensors in zip(results, expected, exact, strict=True)]


def run(case: Case, arguments: Arguments, name: Any, ran: dict[str, str] | None = None) -> tuple[Tensor, ...]:
    """What a case returns, by the named backend; on copies, since some operations write to their arguments."""
    with backend(name, ran):
        result = case.call(**copied(arguments))
    return result if isinstance(result, tuple) else (result,)


def _compare(case: Case, result: Tensor, expected: Tensor, exact: Tensor) -> Outcome:
    assert result.shape == expected.shape, f"{case}: shape {tuple(result.shape)}, must be {tuple(expected.shape)}"
    assert result.dtype == expected.dtype, f"{case}: {result.dtype}, must be {expected.dtype}"
    if case.exact:
        equal = torch.equal(result, expected)
        return Outcome(0.0 if equal else float("nan"), 0.0, 0.0)
    eps = torch.finfo(expected.dtype if expected.dtype.is_floating_point else torch.float32).eps
    ours, theirs = (_largest_difference(tensor, exact) for tensor in (result, expected))
    scale = float(exact.masked_fill(~exact.isfinite(), 0).abs().max()) if exact.numel() else 0.0
    return Outcome(ours, theirs, 2 * theirs + FLOOR * min(eps, 2**-20) * scale)


def _largest_difference(tensor: Tensor, exact: Tensor) -> float:
    """NaN if one holds NaN or infinity where the other doesn't."""
    ours = tensor.double()
    same = (ours == exact) | (ours.isnan() & exact.isnan())
    difference = (ours - exact).abs().masked_fill(same, 0)
    return float(difference.max()) if difference.numel() else 0.0


def doubled(arguments: Any) -> Any:
    """The same arguments with every floating-point tensor in float64."""
    return _mapped(arguments, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def copied(arguments: Any) -> Any:
    """The same arguments with storage of their own, strides kept: a view is copied with all it is a view of."""
    return _mapped(arguments, _copy)


def _copy(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, Coded):
        return replace(value, parts=_mapped(value.parts, change))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


# -- data that hurts ---------------------------------------------------------------------------------------------

KINDS = ("normal", "offset", "constant", "outlier", "zero", "tiny")


def vectors(
    device: torch.device, kind: str, *shape: int, dtype: torch.dtype = torch.float16, seed: int = SEED
) -> Tensor:
    """Vectors of a kind. Normal noise alone hides wrong offsets, scales and padding."""
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "offset":  # ranges that don't straddle zero
        normal = 5 + normal.sigmoid()
    elif kind == "constant":
        normal = torch.full(shape, 5.5)
    elif kind == "outlier":  # one channel far beyond the others
        normal[..., -1, 0] = 6e4
    elif kind == "zero":
        normal = torch.zeros(shape)
    elif kind == "tiny":
        normal = normal * 1e-4
    return normal.to(dtype).to(device)


def within_poison(tensor: Tensor, dim: int = 2) -> Tensor:
    """The same numbers as a view inside a larger tensor full of NaN (or of the largest integer), on both sides."""
    shape = list(tensor.shape)
    shape[dim] += 3
    poison = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    whole = torch.full(shape, poison, dtype=tensor.dtype, device=tensor.device)
    view = whole.narrow(dim, 1, tensor.shape[dim])
    view.copy_(tensor)
    return view
