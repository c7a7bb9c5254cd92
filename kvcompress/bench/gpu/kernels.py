"""The other kernels at the size of an event that compresses all layers of a batch at once.

Bytes that must move are every argument read once and every result written once. Before an operation is timed, its
results for one layer are held against those of the torch reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcompress.bench.gpu.timing import Clock, Row, difference, first_line, free, measure, rate
from kvcompress.kernels.backend import backend
from kvcompress.kernels.dequantize_tokens import dequantize_tokens
from kvcompress.kernels.gumbel_scores import gumbel_scores
from kvcompress.kernels.hadamard import hadamard
from kvcompress.kernels.leverage_scores import leverage_scores
from kvcompress.kernels.normal_matrix import normal_matrix
from kvcompress.kernels.packing import packed_bytes
from kvcompress.kernels.philox import stream_of
from kvcompress.kernels.quantize_tokens import quantize_tokens
from kvcompress.kernels.redundancy import mean_similarity
from kvcompress.kernels.replace_slots import plan_replacement, replace_slots
from kvcompress.kernels.value_statistics import value_statistic
from kvcompress.kernels.window_scores import window_scores

# Largest |kernel - torch| / |torch|; both compute in float32 or wider.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Size:
    """An event: ``layers * batch`` rows, of which each KV head has ``candidates``, ``window`` of them new."""

    layers: int
    batch: int
    kv_heads: int
    group: int
    candidates: int
    dim: int
    window: int
    rank: int = 20
    bits: int = 4

    @property
    def rows(self) -> int:
        return self.layers * self.batch


EVENT = Size(layers=36, batch=16, kv_heads=8, group=4, candidates=2112, dim=128, window=64)
TOY = Size(layers=2, batch=1, kv_heads=2, group=2, candidates=64, dim=32, window=8)

Make = Callable[[Size, torch.device], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """What is called with what.

    Attributes:
        name: as in :mod:`kvcompress.kernels`. call: the dispatching function. make: its arguments.
        moved: bytes that must move, where that is not all arguments and results.
    """

    name: str
    call: Callable[..., Any]
    make: Make
    moved: Callable[[Mapping[str, Any]], int] | None = None


def _candidates(size: Size, device: torch.device) -> Tensor:
    """(rows, kv_heads, candidates, dim): a view within a larger pool, as in an event."""
    whole = torch.randn(
        size.rows, size.kv_heads, size.candidates + size.window, size.dim, dtype=torch.bfloat16, device=device
    )
    return whole[:, :, size.window :]


def _place(size: Size, device: torch.device) -> dict[str, Any]:
    """What the random numbers of each row are for."""
    row = torch.arange(size.rows, device=device)
    return {"seed": 7, "sequence": row % size.batch, "layer": row // size.batch, "event": torch.ones_like(row)}


def _window_scores(size: Size, device: torch.device) -> dict[str, Any]:
    heads = size.kv_heads * size.group
    queries = torch.randn(size.rows, heads, size.window, size.dim, dtype=torch.bfloat16, device=device)
    return {"queries": queries, "keys": _candidates(size, device), "scaling": size.dim**-0.5}


def _leverage_scores(size: Size, device: torch.device) -> dict[str, Any]:
    projection = torch.randn(size.rows, 1, size.dim, size.rank, device=device)
    return {"keys": _candidates(size, device), "values": _candidates(size, device), "projection": projection}


def _gumbel_scores(size: Size, device: torch.device) -> dict[str, Any]:
    shape = (size.rows, size.kv_heads, size.candidates)
    positions = torch.arange(size.candidates, device=device).expand(shape).contiguous()
    scores = torch.rand(shape, device=device)
    key = {**_place(size, device), "stream": stream_of("sample")}
    return {"scores": scores, "positions": positions, **key, "temperature": 1.0, "log": True}


def _normal_matrix(size: Size, device: torch.device) -> dict[str, Any]:
    key = {**_place(size, device), "stream": stream_of("leverage")}
    return {**key, "height": size.dim, "width": size.rank}


def _replace_slots(size: Size, device: torch.device) -> dict[str, Any]:
    """As many random tokens leave each head as new ones come in."""
    leaves = torch.rand(size.rows, size.kv_heads, size.candidates, device=device).topk(size.window).indices
    stays = torch.ones(size.rows, size.kv_heads, size.candidates, dtype=torch.bool, device=device)
    stays.scatter_(-1, leaves, False)
    comes = torch.ones(size.rows, size.kv_heads, size.window, dtype=torch.bool, device=device)
    arrivals = torch.randn(*comes.shape, size.dim, dtype=torch.bfloat16, device=device)
    replacement = plan_replacement(stays, comes, size.window)
    return {"pool": _candidates(size, device), "replacement": replacement, "rows": arrivals, "taken": False}


def _replaced(**arguments: Any) -> Tensor:
    replace_slots(**arguments)
    pool: Tensor = arguments["pool"]
    return pool


def _replaced_bytes(arguments: Mapping[str, Any]) -> int:
    """The plan read, the arrivals read and written."""
    return tensor_bytes(arguments["replacement"]) + 2 * tensor_bytes(arguments["rows"])


def _quantize_tokens(size: Size, device: torch.device) -> dict[str, Any]:
    vectors = torch.randn(size.rows, size.kv_heads, size.window, size.dim, device=device)
    return {"vectors": vectors, "bits": size.bits, "group": size.dim, "dtype": torch.bfloat16}


def _dequantize_tokens(size: Size, device: torch.device) -> dict[str, Any]:
    """As where codes of all layers are scored; every byte is a code."""
    leading = (size.rows, size.kv_heads, size.candidates)
    codes = torch.randint(256, (*leading, packed_bytes(size.dim, size.bits)), dtype=torch.uint8, device=device)
    scale, offset = (torch.rand(*leading, 1, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {"codes": codes, "scale": scale, "offset": offset, "bits": size.bits, "group": size.dim}


OPERATIONS = (
    Operation("window_scores", window_scores, _window_scores),
    Operation("leverage_scores", leverage_scores, _leverage_scores),
    Operation("redundancy", mean_similarity, lambda size, device: {"keys": _candidates(size, device)}),
    Operation(
        "value_statistic",
        value_statistic,
        lambda size, device: {"values": _candidates(size, device), "statistic": "range"},
    ),
    Operation("gumbel_scores", gumbel_scores, _gumbel_scores),
    Operation("normal_matrix", normal_matrix, _normal_matrix),
    Operation("replace_slots", _replaced, _replace_slots, _replaced_bytes),
    Operation("quantize_tokens", quantize_tokens, _quantize_tokens),
    Operation("dequantize_tokens", dequantize_tokens, _dequantize_tokens),
    Operation(
        "hadamard",
        hadamard,
        lambda size, device: {"vectors": _candidates(size, device).contiguous(), "block": size.dim & -size.dim},
    ),
)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value, what they are views of left out."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def measure_all(device: torch.device, clock: Clock, copy: float, size: Size) -> Iterator[Row]:
    """One row per operation.

    Args:
        copy: bytes per second of a copy, which fractions are of.
    """
    for operation in OPERATIONS:
        row: Row = {"operation": operation.name, "rows": size.rows, "layers": size.layers}
        if clock.is_over:
            yield row | {"skipped": "no time left"}
            continue
        try:
            row["error"] = compare(operation, replace(size, layers=1), device)
            if not row["error"] <= TOLERANCE:
                yield row | {"failed": f"differs by {row['error']:.2g}, more than {TOLERANCE:g}: not timed"}
                continue
            row |= _timed(operation, size, device, copy)
        except torch.OutOfMemoryError as error:
            row["skipped"] = f"does not fit: {first_line(error)}"
        except Exception as error:
            row["failed"] = first_line(error)
        free(device)
        yield row | _reference(operation, size, device)
        free(device)


def _run(operation: Operation, arguments: Mapping[str, Any], by: Any) -> Any:
    ran: dict[str, str] = {}
    with backend(by, ran):
        result = operation.call(**arguments)
    assert ran[operation.name] == by, ran
    return result


def compare(operation: Operation, size: Size, device: torch.device) -> float:
    """Largest difference between the results of the kernel and of torch."""
    results = []
    for by in ("triton", "torch"):
        torch.manual_seed(0)
        result = _run(operation, operation.make(size, device), by)
        results.append(result if isinstance(result, tuple) else (result,))
    return max(difference(*pair) for pair in zip(*results, strict=True))


def _timed(operation: Operation, size: Size, device: torch.device, copy: float) -> Row:
    arguments = operation.make(size, device)
    if operation.moved is None:
        nbytes = tensor_bytes(arguments) + tensor_bytes(_run(operation, arguments, "triton"))
    else:
        nbytes = operation.moved(arguments)
    found = measure(functools.partial(_run, operation, arguments, "triton"), device)
    speed = rate(nbytes, found["us"])
    return {**found, "bytes": nbytes, "bytes_per_s": speed, "of_copy": speed / copy}


def _reference(operation: Operation, size: Size, device: torch.device) -> Row:
    """Eager microseconds of the torch reference; of fewer layers, and scaled, where all of them don't fit."""
    layers = size.layers
    while layers:
        try:
            arguments = operation.make(replace(size, layers=layers), device)
            us = measure(functools.partial(_run, operation, arguments, "torch"), device, capture=False)["us"]
        except torch.OutOfMemoryError:
            arguments = {}
            free(device)
            layers //= 2
            continue
        return {"torch_us": us * size.layers / layers, "torch_layers": layers}
    return {}
