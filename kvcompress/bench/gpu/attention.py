"""Roofline of decode attention: one new token per sequence over one pool, by the kernel and by what else there is.

Before a point is timed, the kernel's output is held against a float32 reference on the first and the last row, and
every contender's output against the kernel's: what differs by more than ``TOLERANCE`` is not timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvcompress.bench.gpu.timing import Clock, Row, difference, first_line, free, measure, rate
from kvcompress.kernels.backend import backend
from kvcompress.kernels.decode_attention import SPACE, decode_attention
from kvcompress.kernels.launch import tilings
from kvcompress.kernels.segment_attention import Segment, segment_attention
from kvcompress.kernels.slot_attention import slot_attention
from kvcompress.quant.coded import Coded
from kvcompress.quant.uniform import Bits, Uniform

# Largest |a - b| / |b|. Outputs and weights are rounded to bfloat16, by up to 0.4 % each.
TOLERANCE = 0.01

Contender = Callable[[Tensor, Segment, float], Tensor]


class Heads(NamedTuple):
    """Attention heads of one or more models."""

    models: str
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Grid:
    """Points to measure, the most telling first. ``bits`` of uniform codes, None for bfloat16 vectors."""

    heads: tuple[Heads, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    bits: tuple[Bits | None, ...] = (None, 4, 8, 2)

    @property
    def points(self) -> list[tuple[int, int]]:
        return [(batch, context) for batch in self.batches for context in self.contexts]


GRID = Grid(
    heads=(Heads("Qwen3-4B, Llama-3-8B", 32, 8, 128), Heads("Qwen3-14B", 40, 8, 128)),
    batches=(16, 64, 1),
    contexts=(4096, 32768, 131072),
)
TOY = Grid(heads=(Heads("toy", 4, 2, 32),), batches=(2, 1), contexts=(64,))


def pool_bytes(batch: int, kv_heads: int, tokens: int, dim: int, bits: int | None) -> int:
    """What attention has to read once: keys and values in bfloat16, or codes, and a scale and an offset in bfloat16 per
    token and head for each of the two."""
    per_vector = 2 * dim if bits is None else dim * bits // 8 + 2 + 2
    return 2 * batch * kv_heads * tokens * per_vector


def random_pool(batch: int, kv_heads: int, tokens: int, dim: int, bits: Bits | None, device: torch.device) -> Segment:
    """Normal vectors, or random codes that stand for numbers about as large; every byte is a code."""

    def states() -> Tensor | Coded:
        leading = (batch, kv_heads, tokens)
        if bits is None:
            return torch.randn(*leading, dim, dtype=torch.bfloat16, device=device)
        codec, parts = Uniform(bits=bits), {}
        for name, (shape, dtype, _) in codec.parts(dim, torch.bfloat16).items():
            if name == "codes":
                parts[name] = torch.randint(256, (*leading, *shape), dtype=dtype, device=device)
            else:
                parts[name] = torch.rand(*leading, *shape, dtype=dtype, device=device)
        parts["scale"].add_(0.5).mul_(4 / (2**bits - 1))
        parts["offset"].sub_(2.5)
        return Coded(codec, parts, dim)

    return Segment(states(), states(), None)


def some_rows(pool: Segment, rows: list[int]) -> Segment:
    """Copies of some rows of a pool."""

    def of(states: Tensor | Coded) -> Tensor | Coded:
        if isinstance(states, Tensor):
            return states[rows]
        return replace(states, parts={name: part[rows] for name, part in states.parts.items()})

    return Segment(of(pool.keys), of(pool.values), None)


# -- who computes it ---------------------------------------------------------------------------------------------


def by_kernel(queries: Tensor, pool: Segment, scaling: float) -> Tensor:
    """The kernel of this package."""
    ran: dict[str, str] = {}
    with backend("triton", ran):
        out, _ = decode_attention(queries, [pool], scaling)
    assert ran["decode_attention"] == "triton", ran
    return out


def by_sdpa(queries: Tensor, pool: Segment, scaling: float) -> Tensor:
    """scaled_dot_product_attention, the query group packed along the axis of queries."""
    keys, values = _vectors(pool)
    return slot_attention(queries, keys, values, None, scaling)


def by_flash_attn(queries: Tensor, pool: Segment, scaling: float) -> Tensor:
    """flash-attn's decode function, on views with tokens before heads."""
    from flash_attn import flash_attn_with_kvcache

    views = (tensor.transpose(1, 2) for tensor in (queries, *_vectors(pool)))
    out: Tensor = flash_attn_with_kvcache(*views, softmax_scale=scaling)
    return out.transpose(1, 2)


def by_flex_attention(queries: Tensor, pool: Segment, scaling: float) -> Tensor:
    """FlexAttention, compiled for the very shape."""
    return _flex_attention()(queries, *_vectors(pool), scale=scaling, enable_gqa=True)


_compiled: list[Callable[..., Tensor]] = []


def _flex_attention() -> Callable[..., Tensor]:
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention, dynamic=False))
    return _compiled[0]


def _vectors(pool: Segment) -> tuple[Tensor, Tensor]:
    assert isinstance(pool.keys, Tensor)
    assert isinstance(pool.values, Tensor)
    return pool.keys, pool.values


# -- measuring ---------------------------------------------------------------------------------------------------


def measure_all(device: torch.device, clock: Clock, copy: float, grid: Grid) -> Iterator[Row]:
    """One row per point, format and contender.

    Args:
        copy: bytes per second of a copy, which fractions are of.
    """
    contenders: dict[str, Contender] = {"SDPA": by_sdpa}
    if device.type != "cuda":
        yield {"note": "flash-attn and FlexAttention are measured on a GPU only"}
    elif importlib.util.find_spec("flash_attn") is None:
        yield {"note": "flash-attn is not installed"}
    else:
        contenders["flash-attn"] = by_flash_attn
    for batch, context in grid.points:
        for bits in grid.bits:
            yield from _point(device, clock, copy, grid, (batch, context, bits), contenders, with_kernel=True)
    if device.type == "cuda":
        for bits in (None, 4):
            yield from _tilings(device, clock, copy, grid, bits)
        # Last, since it compiles for seconds per shape.
        contenders = {"FlexAttention": by_flex_attention}
        for batch, context in grid.points:
            yield from _point(device, clock, copy, grid, (batch, context, None), contenders, with_kernel=False)


def _tilings(device: torch.device, clock: Clock, copy: float, grid: Grid, bits: Bits | None) -> Iterator[Row]:
    """The kernel in every tiling that could be the default, at the first point."""
    heads, (batch, context) = grid.heads[0], grid.points[0]
    where = {
        **heads._asdict(),
        "batch": batch,
        "context": context,
        "format": "vectors" if bits is None else f"int{bits}",
    }
    pool = random_pool(batch, heads.kv_heads, context, heads.dim, bits, device)
    queries = torch.randn(batch, heads.heads, 1, heads.dim, dtype=torch.bfloat16, device=device)
    expected = by_kernel(queries, pool, heads.dim**-0.5)
    nbytes = pool_bytes(batch, heads.kv_heads, context, heads.dim, bits)
    for shape in SPACE:
        row: Row = {**where, "by": f"kvcompress in blocks of {shape.block}, {shape.warps} warps, {shape.stages} stages"}
        if clock.is_over:
            yield row | {"skipped": "no time left"}
            continue
        try:
            with tilings(decode_attention=shape):
                error = difference(by_kernel(queries, pool, heads.dim**-0.5), expected)
                found = _judged(error, functools.partial(by_kernel, queries, pool, heads.dim**-0.5), device)
            if "us" in found:
                speed = rate(nbytes, found["us"])
                found |= {"bytes": nbytes, "bytes_per_s": speed, "of_copy": speed / copy}
        except Exception as error:
            found = {"failed": first_line(error)}
        yield row | found
    free(device)


def _point(
    device: torch.device,
    clock: Clock,
    copy: float,
    grid: Grid,
    point: tuple[int, int, Bits | None],
    contenders: dict[str, Contender],
    with_kernel: bool,
) -> Iterator[Row]:
    """All models and contenders over one pool."""
    batch, context, bits = point
    names = [*(["kvcompress"] if with_kernel else []), *(contenders if bits is None else ())]
    form = "vectors" if bits is None else f"int{bits}"

    def rows(heads: Heads, *by: str, **found: object) -> Iterator[Row]:
        where = {**heads._asdict(), "batch": batch, "context": context, "format": form}
        yield from ({**where, "by": name, **found} for name in by)

    if clock.is_over:
        for heads in grid.heads:
            yield from rows(heads, *names, skipped="no time left")
        return
    _, _, kv_heads, dim = grid.heads[0]
    assert all((heads.kv_heads, heads.dim) == (kv_heads, dim) for heads in grid.heads)
    nbytes = pool_bytes(batch, kv_heads, context, dim, bits)
    try:
        pool = random_pool(batch, kv_heads, context, dim, bits, device)
    except torch.OutOfMemoryError as error:
        for heads in grid.heads:
            yield from rows(heads, *names, skipped=f"does not fit: {first_line(error)}")
        free(device)
        return
    for heads in grid.heads:
        left = list(names)
        try:
            queries = torch.randn(batch, heads.heads, 1, dim, dtype=torch.bfloat16, device=device)
            for name, found in _compare(queries, pool, dim**-0.5, contenders, names):
                left.remove(name)
                if "us" in found:
                    speed = rate(nbytes, found["us"])
                    found |= {"bytes": nbytes, "bytes_per_s": speed, "of_copy": speed / copy}
                yield from rows(heads, name, **found)
        except torch.OutOfMemoryError as error:
            yield from rows(heads, *left, skipped=f"does not fit: {first_line(error)}")
        except Exception as error:
            # Of the kernel, which the others are held against.
            yield from rows(heads, *left, failed=first_line(error))
    del pool
    free(device)


def _compare(
    queries: Tensor, pool: Segment, scaling: float, contenders: dict[str, Contender], names: list[str]
) -> Iterator[tuple[str, Row]]:
    """Errors, and times of those whose error is small enough."""
    device = queries.device
    ours = by_kernel(queries, pool, scaling)
    if "kvcompress" in names:
        chosen = sorted({0, len(queries) - 1})
        expected = segment_attention(queries[chosen].float(), [some_rows(pool, chosen)], scaling)
        error = difference(ours[chosen], expected)
        yield "kvcompress", _judged(error, functools.partial(by_kernel, queries, pool, scaling), device)
    for name in names:
        if name == "kvcompress":
            continue
        contender = contenders[name]
        try:
            if name == "FlexAttention":
                # Compiled afresh for every shape: there is a limit on how many one function may have.
                torch._dynamo.reset()
            error = difference(contender(queries, pool, scaling), ours)
            found = _judged(error, functools.partial(contender, queries, pool, scaling), device)
        except torch.OutOfMemoryError as error:
            found = {"skipped": f"does not fit: {first_line(error)}"}
        except Exception as error:
            found = {"failed": first_line(error)}
        yield name, found


def _judged(error: float, call: Callable[[], Tensor], device: torch.device) -> Row:
    if not error <= TOLERANCE:
        return {"error": error, "failed": f"differs by {error:.2g}, more than {TOLERANCE:g}: not timed"}
    return {"error": error, **measure(call, device)}
