"""Cases of :mod:`kvcompress.kernels.decode_attention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvcompress.kernels import decode_attention as module
from kvcompress.kernels.checks.cases import KINDS, Arguments, Case, vectors, within_poison
from kvcompress.kernels.launch import Tiling, tilings
from kvcompress.kernels.segment_attention import Segment
from kvcompress.quant.codec import Codec
from kvcompress.quant.coded import Coded
from kvcompress.quant.float8 import Float8
from kvcompress.quant.formats import SHORT_NAMES
from kvcompress.quant.rotation import rotation_block
from kvcompress.quant.uniform import Uniform

INT8, INT4, INT3, INT2, FP8 = (SHORT_NAMES[name] for name in ("int8", "int4", "int3", "int2", "fp8"))
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Pool:
    """``tokens`` of a pool by a codec of keys and one of values; None for plain vectors of type ``dtype``.

    ``where`` is none, a mask by row (``mask``), one that leaves a single token (``one``), one that leaves none
    (``nothing``), or ragged lengths by KV head (``lengths``), some of them 0.
    """

    tokens: int
    keys: Codec | None = None
    values: Codec | None = None
    where: str = ""
    dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        codecs = "+".join(dict.fromkeys("vectors" if c is None else _label(c) for c in (self.keys, self.values)))
        return " ".join(filter(None, [str(self.tokens), codecs, self.where]))


def _label(codec: Codec) -> str:
    group = getattr(codec, "group", None)
    return codec.label + (f"g{group}" if group else "") + ("r" if codec.rotate else "")


@dataclass(frozen=True)
class Setting:
    """Shapes and options of one call."""

    pools: tuple[Pool, ...]
    rows: int = 2
    kv_heads: int = 2
    group: int = 4
    key_dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = HALF
    kind: str = "normal"
    softcap: float | None = None
    sinks: bool = False
    extreme: bool = False
    heavy: bool = False

    @property
    def name(self) -> str:
        pools = " | ".join(pool.label for pool in self.pools)
        dims = str(self.key_dim) + (f"/{self.value_dim}" if self.value_dim else "")
        options = [f"softcap {self.softcap:g}" if self.softcap else "", "sinks" if self.sinks else ""]
        options += ["extreme logits" if self.extreme else "", "heavy" if self.heavy else ""]
        shape = f"{self.rows}x{self.kv_heads}x{self.group} heads of {dims}"
        name = str(self.dtype).removeprefix("torch.")
        return ", ".join(filter(None, [pools, shape, name, self.kind if self.kind != "normal" else "", *options]))

    def make(self, device: torch.device) -> Arguments:
        value_dim = self.value_dim or self.key_dim
        heads = self.kv_heads * self.group
        queries = vectors(device, "normal", self.rows, heads, 1, self.key_dim, dtype=self.dtype, seed=1)
        segments = []
        for index, pool in enumerate(self.pools):
            parts: list[Any] = []
            for place, (dim, codec) in enumerate(((self.key_dim, pool.keys), (value_dim, pool.values))):
                shape = (self.rows, self.kv_heads, pool.tokens, dim)
                dtype = pool.dtype or self.dtype
                states = vectors(device, self.kind, *shape, dtype=dtype, seed=2 + 2 * index + place)
                if self.extreme and place == 0:
                    states[:, :, pool.tokens // 2] *= 300
                parts.append(self._stored(states, codec))
            mask, lengths = _where(pool, self.rows, self.kv_heads, device)
            segments.append(Segment(parts[0], parts[1], mask, lengths))
        sinks = vectors(device, "normal", heads, dtype=self.dtype) if self.sinks else None
        scaling = self.key_dim**-0.5
        return {
            "queries": queries, "segments": segments, "scaling": scaling, "softcap": self.softcap, "sinks": sinks,
        }  # fmt: skip

    def _stored(self, states: Tensor, codec: Codec | None) -> Tensor | Coded:
        if codec is None:
            return within_poison(states)
        parts = codec.encode(states, HALF if self.dtype == HALF else self.dtype)
        return Coded(codec, {name: within_poison(part) for name, part in parts.items()}, states.shape[-1])


def _where(pool: Pool, rows: int, kv_heads: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Mask and lengths."""
    token, row = torch.arange(pool.tokens), torch.arange(rows)[:, None]
    mask = lengths = None
    if pool.where == "mask":
        mask = (token * 7 + row) % 3 > 0
    elif pool.where == "one":
        mask = token == (pool.tokens - 1 - row)
    elif pool.where == "nothing":
        mask = (token < 0) & (row < 0)
    elif pool.where == "lengths":
        lengths = ((torch.arange(rows * kv_heads) * 37) % (pool.tokens + 1)).reshape(rows, kv_heads).int().to(device)
    return None if mask is None else mask[:, None, None].to(device), lengths


def cases() -> Iterator[Case]:
    for setting in (*_plain(), *_coded(), *_mixed(), *_large()):
        call = _attend if setting.heavy else _attend_in_small_blocks
        yield Case("decode_attention", setting.name, call, setting.make, _in_their_type, heavy=setting.heavy)


def configurations() -> Iterator[Case]:
    """What dispatch can choose, one property varied at a time, and the tilings to choose from. To be compiled."""
    for setting in _varied():
        name = f"configuration: {setting.name}"
        yield Case("decode_attention", name, _attend, setting.make, heavy=True)
    pools = (Pool(256), Pool(1024, INT4, INT4))
    setting = Setting(pools, rows=1, kv_heads=2, group=4, key_dim=128, dtype=BF16)
    for shape in module.SPACE[1:]:
        name = f"tiling {'x'.join(map(str, shape))}: {setting.name}"
        yield Case("decode_attention", name, functools.partial(_attend_by, shape), setting.make, heavy=True)


def _attend_by(shape: Tiling, **arguments: Any) -> tuple[Tensor, Tensor]:
    with tilings(decode_attention=shape):
        return _attend(**arguments)


def _varied() -> Iterator[Setting]:
    rotated, grouped = Uniform(bits=4, rotate=True), Uniform(bits=4, group=32)
    plain, mixed = Pool(1024), (Pool(256), Pool(1024, INT4, INT4))
    base: dict[str, Any] = {"rows": 1, "kv_heads": 2, "group": 4, "key_dim": 128, "dtype": BF16}
    for codec in (INT8, INT4, INT3, INT2, FP8, Float8(format="e5m2"), rotated, grouped):
        yield Setting((Pool(256), Pool(1024, codec, codec)), **base)
    yield Setting((Pool(256, where="mask"), Pool(1024, INT4, INT4, "lengths")), **base, softcap=30.0, sinks=True)
    ladder = (Pool(256), Pool(256, INT8, INT8), Pool(512, INT4, INT4), Pool(512, INT4, INT2))
    yield Setting(ladder, **base)
    for dim in (64, 80, 96, 128, 192, 256):
        yield Setting(mixed, **{**base, "key_dim": dim, "dtype": HALF})
    yield Setting((plain,), **{**base, "key_dim": 192}, value_dim=128)
    for group in (1, 16, 32, 64):
        yield Setting(mixed, **{**base, "group": group})
    for dtype in (HALF, FLOAT):
        yield Setting((plain,), **{**base, "dtype": dtype})
        yield Setting((Pool(256), Pool(1024, grouped, INT2)), **{**base, "dtype": dtype})
    yield Setting((Pool(1024, dtype=HALF),), **{**base, "dtype": FLOAT})


def _attend(**arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = module.decode_attention(**arguments, return_lse=True)
    assert lse is not None
    return out, lse


def _attend_in_small_blocks(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Blocks of 16 tokens and two splits or three, so that short pools have several splits of several blocks."""
    small = module.default_tiling(arguments["queries"].shape[-1])._replace(block=16)
    with tilings(decode_attention=small), patch.object(module, "LEAST_SPLITS", 2):
        return _attend(**arguments)


def _in_their_type(
    queries: Tensor,
    segments: list[Segment],
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What one would do without the kernel: decode all tokens to the type of the queries, then flash attention, which
    rounds weights to that type before they meet the values. Rotated keys are met by queries that are rotated first."""
    rows, heads = queries.shape[:2]
    logits = torch.cat([_logits_in_their_type(queries, segment.keys) for segment in segments], dim=-1)
    values = torch.cat(
        [(s.values if isinstance(s.values, Tensor) else s.values.vectors()).to(queries.dtype) for s in segments], dim=2
    ).float()
    logits = logits.reshape(rows, heads, 1, -1) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = torch.cat(
        [
            torch.ones(rows, heads, 1, s.tokens, dtype=torch.bool, device=queries.device)
            if (where := s.allowed(heads, 0, s.tokens)) is None
            else where.expand(rows, heads, 1, -1)
            for s in segments
        ],
        dim=-1,
    )
    logits = logits.masked_fill(~allowed, -torch.inf)
    largest = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.float().reshape(1, -1, 1, 1))
    base = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(logits - base)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float().reshape(1, -1, 1, 1) - base)
    rounded = weights.to(queries.dtype).float().reshape(rows, values.shape[1], -1, values.shape[2])
    out = torch.matmul(rounded, values).reshape(rows, heads, 1, -1) / total.masked_fill(total == 0, 1)
    return out.to(queries.dtype), (base + torch.log(total))[..., 0, 0]


def _logits_in_their_type(queries: Tensor, keys: Tensor | Coded) -> Tensor:
    """(rows, kv_heads, group, N) float32."""
    plain = queries
    if isinstance(keys, Tensor):
        decoded = keys
    elif keys.codec.rotate:
        root = math.sqrt(rotation_block(queries.shape[-1]))
        plain, decoded = keys.into_basis(queries.float()) / root, keys.block(0, keys.tokens) * root
    else:
        decoded = keys.vectors()
    grouped = plain.to(queries.dtype).float().reshape(queries.shape[0], decoded.shape[1], -1, queries.shape[-1])
    return torch.matmul(grouped, decoded.to(queries.dtype).float().transpose(-1, -2))


def _plain() -> Iterator[Setting]:
    for tokens in (1, 15, 16, 17, 33, 130):
        yield Setting((Pool(tokens),), key_dim=80)
    for group in (1, 2, 3, 5, 7, 16, 17, 40):
        yield Setting((Pool(37),), group=group, kv_heads=1, key_dim=64)
    for dim in (16, 20, 80, 96, 128, 192, 256):
        yield Setting((Pool(19),), key_dim=dim)
    yield Setting((Pool(35),), key_dim=96, value_dim=64)
    yield Setting((Pool(35),), key_dim=64, value_dim=128)
    for where in ("mask", "one", "nothing", "lengths"):
        yield Setting((Pool(70, where=where),), rows=3)
    for kind in KINDS:
        yield Setting((Pool(40),), kind=kind, dtype=BF16)
    for dtype in (HALF, BF16, FLOAT):
        yield Setting((Pool(40),), dtype=dtype, softcap=5.0)
        yield Setting((Pool(40, where="lengths"),), dtype=dtype, sinks=True)
        yield Setting((Pool(40),), dtype=dtype, extreme=True)
    yield Setting((Pool(40, where="nothing"),), sinks=True, softcap=30.0)
    yield Setting((Pool(40, dtype=HALF),), dtype=FLOAT)


def _coded() -> Iterator[Setting]:
    for codec in (INT8, INT4, INT3, INT2, FP8, Float8(format="e5m2")):
        for kind in KINDS:
            yield Setting((Pool(37, codec, codec),), kind=kind)
        yield Setting((Pool(37, codec, codec),), dtype=BF16)
        yield Setting((Pool(37, codec, codec, "lengths"),), dtype=FLOAT, group=5)
    for bits in (8, 4, 2):
        for group in (32, 16, 8):
            codec = Uniform(bits=bits, group=group)
            yield Setting((Pool(20, codec, codec),), kind="outlier")
    grouped = Uniform(bits=4, group=32)
    for dim in (96, 192, 256):
        yield Setting((Pool(18, grouped, INT4),), key_dim=dim)
        yield Setting((Pool(18, INT8, grouped),), key_dim=dim, kind="offset")
    for dim in (80, 96, 128, 192):
        rotated = Uniform(bits=4, rotate=True)
        yield Setting((Pool(18, rotated, rotated),), key_dim=dim)
    yield Setting((Pool(33, Uniform(bits=8, rotate=True), INT4),), extreme=True)
    yield Setting((Pool(33, INT8, Uniform(bits=2, rotate=True)),), key_dim=64, value_dim=32, softcap=5.0)
    for where in ("mask", "one", "nothing", "lengths"):
        yield Setting((Pool(85, INT4, INT2, where),), rows=3, sinks=where == "nothing")
    for tokens in (1, 16, 17):
        yield Setting((Pool(tokens, INT4, INT4),), kv_heads=1, group=20)


def _mixed() -> Iterator[Setting]:
    rotated = Uniform(bits=4, rotate=True)
    for dtype in (HALF, BF16, FLOAT):
        yield Setting((Pool(20, where="mask"), Pool(70, INT4, INT4, "lengths")), dtype=dtype, group=5)
        yield Setting((Pool(20), Pool(37, INT8, INT8), Pool(50, INT4, INT4), Pool(40, INT4, INT2)), dtype=dtype)
        yield Setting((Pool(40, rotated, rotated), Pool(20, where="one"), Pool(3, INT8, INT4)), dtype=dtype, sinks=True)
    yield Setting((Pool(33, where="nothing"), Pool(17, INT2, INT2, "nothing"), Pool(1)), kind="offset")
    yield Setting((Pool(20, dtype=HALF), Pool(20, INT4, INT4)), dtype=FLOAT)


def _large() -> Iterator[Setting]:
    big: dict[str, Any] = {"rows": 16, "kv_heads": 8, "group": 4, "key_dim": 128, "dtype": BF16, "heavy": True}
    yield Setting((Pool(4096),), **big)
    yield Setting((Pool(32768, INT4, INT4),), **{**big, "rows": 1})
    yield Setting((Pool(256, where="mask"), Pool(8192, INT8, INT8, "lengths"), Pool(8192, INT4, INT2)), **big)
    # More than 2**31 elements: an index of 32 bits would wrap.
    yield Setting((Pool(70000),), **{**big, "rows": 32, "group": 1})
