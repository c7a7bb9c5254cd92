"""Attention of one new token per sequence over the pools of a store: flash decoding over mixed precision.

Each pool is cut into splits along its tokens. A program handles one split for one KV head and the whole query group,
so every key and value is read, and unpacked, once. Splits of all pools run in one launch, whatever their precision,
and leave outputs o_i and log-sum-exps L_i, which a second kernel merges:

    out = sum_i exp(L_i - L) o_i        L = log(exp(sink) + sum_i exp(L_i))

(split-K flash decoding; Dao et al. 2023; Milakov and Gimelshein, arXiv 1805.02867). Codes enter the products as they
are, and scale s[n] and offset z[n] of a token are applied to its logit and to its probability:

    q . k[n] = s[n] (q . c[n]) + z[n] sum(q)            sum_n p[n] v[n] = sum_n (p[n] s[n]) c[n] + sum_n p[n] z[n]

With groups of channels these are sums over groups of products as many channels wide. The weights p[n] s[n] are kept in
16 bits relative to their own running maximum, since scales can be smaller than a 16-bit number resolves; value codes
enter less the middle of their range, which goes to the offset.

Where a codec has rotated what it stores, the query meets the keys rotated, and the merged output of the rotated pools
is rotated back, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompress.kernels.backend import note, use_triton
from kvcompress.kernels.flash_attention import covered_by_flash_attn, flash_attention
from kvcompress.kernels.hadamard import hadamard
from kvcompress.kernels.launch import Tiling, cast, ceil_div, dot, jit, launch, power_of_2, tiling, tl
from kvcompress.kernels.precision import widened
from kvcompress.kernels.segment_attention import Segment, segment_attention_with_lse
from kvcompress.kernels.slot_attention import slot_attention
from kvcompress.quant.codec import Codec
from kvcompress.quant.coded import Coded
from kvcompress.quant.float8 import Float8
from kvcompress.quant.rotation import rotation_block
from kvcompress.quant.uniform import Uniform

LARGEST_DIM = 256
# Tilings for a head size of 128 in 16 bits that all targets can hold. `make gpu` times them; the first is the default.
SPACE = (
    Tiling(64, warps=4, stages=2),
    Tiling(64, warps=4, stages=3),
    Tiling(32, warps=4, stages=3),
    Tiling(128, warps=4, stages=2),
    Tiling(128, warps=8, stages=2),
    Tiling(64, warps=8, stages=3),
)
# Bytes of keys and values that one program reads. The outputs it leaves are a few per cent of that.
_SPLIT_BYTES = 1 << 17
# A pool is cut into so many splits at least, if it has so many blocks: enough programs for a batch of one.
LEAST_SPLITS = 8


def decode_attention_reference(
    queries: Tensor,
    segments: Sequence[Segment],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every token decoded, all of them joined, and attention written out: the specification.

    Args:
        queries: (rows, heads, 1, head_dim), any float dtype.
        segments: what is attended to, together.
        sinks: (heads,) logits of the learned attention sinks (gpt-oss), or None.

    Returns:
        (rows, heads, 1, value_dim) in the dtype of queries, zeros where there is nothing to look at; and L above,
        (rows, heads) float32 (float64 for float64 queries), sinks included.
    """
    keys, values = (
        torch.cat([s if isinstance(s, Tensor) else s.vectors() for s in states], dim=2)
        for states in ([segment.keys for segment in segments], [segment.values for segment in segments])
    )
    rows, heads = queries.shape[:2]
    q = widened(queries).reshape(rows, keys.shape[1], -1, queries.shape[-1])
    logits = torch.matmul(q, keys.to(q.dtype).transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.reshape(rows, heads, 1, -1)
    allowed = [segment.allowed(heads, 0, segment.tokens) for segment in segments]
    for segment, part, where in zip(segments, logits.split([s.tokens for s in segments], dim=-1), allowed, strict=True):
        if where is not None and segment.tokens:
            part.masked_fill_(~where, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).reshape(1, -1, 1, 1).expand_as(lse))
    weights = torch.exp(logits - lse).masked_fill(lse == -torch.inf, 0.0).reshape(*q.shape[:3], -1)
    out = torch.matmul(weights, values.to(q.dtype)).reshape(rows, heads, 1, -1)
    return out.to(queries.dtype), lse[..., 0, 0]


def decode_attention(
    queries: Tensor,
    segments: Sequence[Segment],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`decode_attention_reference`, with L only if asked for.

    One launch serves all pools where the kernel covers them: vectors, uniform codes and 8-bit floats, of head sizes up
    to 256. A single pool of vectors may go through flash-attn or scaled_dot_product_attention instead. What remains is
    decoded block by block (:mod:`kvcompress.kernels.segment_attention`).
    """
    segments = [segment for segment in segments if segment.tokens]
    alone = None if return_lse else _only_vectors(segments, queries.dtype)
    if alone and covered_by_flash_attn(queries, *alone, sinks):
        note("decode_attention", "flash_attn")
        return flash_attention(queries, alone[0], alone[1], scaling, softcap), None
    # The kernel has no backward pass.
    learns = torch.is_grad_enabled() and queries.requires_grad
    covered = bool(segments) and not learns and all(_is_covered(segment, queries.dtype) for segment in segments)
    if use_triton("decode_attention", queries.device, covered):
        return _launch(queries, segments, scaling, softcap, sinks)
    if alone:
        return slot_attention(queries, *alone, scaling, softcap, sinks), None
    out, lse = segment_attention_with_lse(queries, segments, scaling, softcap, sinks)
    return out, lse.squeeze(-1)


def _only_vectors(segments: Sequence[Segment], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Keys, values and mask, if there is but one pool and it holds vectors of type ``dtype``."""
    if len(segments) != 1:
        return None
    keys, values, mask, lengths = segments[0]
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dtype != dtype or lengths is not None:
        return None
    return keys, values, mask


def _is_covered(segment: Segment, dtype: torch.dtype) -> bool:
    for states in (segment.keys, segment.values):
        if isinstance(states, Tensor):
            fits = states.shape[-1] <= LARGEST_DIM and states.dtype != torch.float64
        else:
            fits = isinstance(states.codec, Uniform | Float8) and states.dim <= LARGEST_DIM and states.channels is None
        if not fits:
            return False
    same_kind = isinstance(segment.keys, Tensor) == isinstance(segment.values, Tensor)
    return same_kind and dtype in (torch.float16, torch.bfloat16, torch.float32)


# -- the launch --------------------------------------------------------------------------------------------------

# How a pool stores its vectors: plainly, in so many bits, or as 8-bit floats.
PLAIN, E4M3, E5M2 = 0, 43, 52


class _States(NamedTuple):
    """Compile-time properties of keys or values: how they are stored, channels per group, how many groups of how many
    channels a tile has (powers of two, the rest is masked), and whether they are rotated."""

    kind: int
    group: int
    groups: int
    block: int
    rotated: bool


class _Format(NamedTuple):
    """Compile-time properties of a pool; ``widen``: products are of float32, not of the type of the queries."""

    keys: _States
    values: _States
    widen: bool
    has_mask: bool
    has_lengths: bool


class _Pool(NamedTuple):
    """What the kernel gets of a pool; strides in elements.

    Tensors that it doesn't read are stood in for by others, since Triton 3.6 takes no None within a tuple.
    """

    tokens: int
    per_split: int
    splits: int
    mask: Tensor
    mask_row: int
    lengths: Tensor
    key_data: Tensor
    key_row: int
    key_head: int
    key_slot: int
    key_scale: Tensor
    key_offset: Tensor
    key_scale_row: int
    key_scale_head: int
    key_scale_slot: int
    value_data: Tensor
    value_row: int
    value_head: int
    value_slot: int
    value_scale: Tensor
    value_offset: Tensor
    value_scale_row: int
    value_scale_head: int
    value_scale_slot: int


def _launch(
    queries: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, heads, _, key_dim = queries.shape
    kv_heads = segments[0].kv_heads
    group = heads // kv_heads
    # Rotated pools last, so that the splits whose outputs have to be rotated back follow the others.
    segments = sorted(segments, key=_rotates_values)
    formats = [_format(segment, queries.dtype) for segment in segments]
    value_dim = _dim(segments[0].values)
    shape = tiling("decode_attention", default_tiling(max(key_dim, value_dim), any(form.widen for form in formats)))
    pools = [_pool(segment, shape.block) for segment in segments]
    splits = sum(pool.splits for pool in pools)
    plain = sum(pool.splits for pool, form in zip(pools, formats, strict=True) if not form.values.rotated)
    queries = queries.contiguous()
    rotated = queries
    if any(form.keys.rotated for form in formats):
        # Divided by the root, so that the rotation keeps lengths and fits into 16 bits; the kernel multiplies it back.
        block = rotation_block(key_dim)
        rotated = (hadamard(queries.float(), block) / math.sqrt(block)).to(queries.dtype)
    # Compile-time tuples cannot be nested.
    flat = tuple(number for keys, values, *flags in formats for number in (*keys, *values, *flags))
    outs = torch.empty(rows, heads, splits, value_dim, dtype=torch.float32, device=queries.device)
    lses = torch.empty(rows, heads, splits, dtype=torch.float32, device=queries.device)
    block_m = min(32, max(16, power_of_2(group)))
    launch(
        _attend_split,
        # Heads along the axis that may be longest: the others end at 65,535.
        (rows * kv_heads, splits, ceil_div(group, block_m)),
        shape,
        queries, rotated, outs, lses, tuple(pools), kv_heads, splits, scaling, softcap or 0.0,
        FORMATS=flat, GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, ROOT=math.sqrt(rotation_block(key_dim)),
        SOFTCAP=softcap is not None, BLOCK_M=block_m, BLOCK_N=shape.block,
    )  # fmt: skip
    whole = queries.dtype if plain == splits else torch.float32
    merged = torch.empty(2 if plain < splits else 1, rows, heads, 1, value_dim, dtype=whole, device=queries.device)
    total = torch.empty(rows, heads, dtype=torch.float32, device=queries.device)
    launch(
        _merge_splits,
        (rows * heads,),
        Tiling(16, warps=4 if value_dim >= 128 else 2, stages=1),
        outs, lses, sinks, merged, total, splits, plain, heads, rows * heads,
        ROTATED=plain < splits, VALUE_DIM=value_dim, BLOCK_DIM=power_of_2(value_dim), BLOCK=16,
    )  # fmt: skip
    if plain == splits:
        return merged[0], total
    return (merged[0] + hadamard(merged[1], rotation_block(value_dim))).to(queries.dtype), total


def default_tiling(dim: int, widen: bool = False) -> Tiling:
    """Tiles that fit the 64 KiB of shared memory of a CDNA 3 GPU, and registers without spilling.

    Args:
        dim: the larger head size. widen: products are of float32.
    """
    if widen or dim > 128 or dim & (dim - 1):
        return Tiling(32, warps=8, stages=2)
    return Tiling(64, warps=4, stages=3 if dim <= 64 else 2)


def _dim(states: Tensor | Coded) -> int:
    return states.shape[-1] if isinstance(states, Tensor) else states.dim


def _rotates_values(segment: Segment) -> bool:
    return not isinstance(segment.values, Tensor) and segment.values.codec.rotate


def _format(segment: Segment, dtype: torch.dtype) -> _Format:
    keys, values = (
        _format_of(None if isinstance(states, Tensor) else states.codec, _dim(states))
        for states in (segment.keys, segment.values)
    )
    return _Format(keys, values, _widens(segment, dtype), segment.mask is not None, segment.lengths is not None)


@functools.cache
def _format_of(codec: Codec | None, dim: int) -> _States:
    kind, group, rotated = PLAIN, dim, False
    if isinstance(codec, Uniform):
        kind, group, rotated = codec.bits, codec.group_size(dim), codec.rotate
    elif isinstance(codec, Float8):
        kind, group, rotated = {"e4m3": E4M3, "e5m2": E5M2}[codec.format], codec.group or dim, codec.rotate
    # A product of matrices is at least 16 wide.
    return _States(kind, group, power_of_2(dim // group), max(16, power_of_2(group)), rotated)


def _widens(segment: Segment, dtype: torch.dtype) -> bool:
    """Whether products are of float32, rather than of the type of the queries."""
    types = [states.dtype for states in (segment.keys, segment.values) if isinstance(states, Tensor)]
    return dtype == torch.float32 or any(kind != dtype for kind in types)


def _pool(segment: Segment, block: int) -> _Pool:
    keys, values = _parts(segment.keys), _parts(segment.values)
    mask, lengths, mask_row = keys[0], keys[0], 0
    if segment.mask is not None:
        mask = segment.mask.expand(segment.mask.shape[0], 1, 1, segment.tokens)[:, 0, 0].contiguous()
        mask_row = 0 if mask.shape[0] == 1 else mask.stride(0)
    if segment.lengths is not None:
        lengths = segment.lengths.to(torch.int32).contiguous()
    per_split = split_length(segment.tokens, _bytes_per_token(segment), block)
    splits = ceil_div(segment.tokens, per_split)
    return _Pool(segment.tokens, per_split, splits, mask, mask_row, lengths, *keys, *values)


def _parts(states: Tensor | Coded) -> tuple[Any, ...]:
    """Vectors or codes, scales and offsets, with strides of rows, heads and slots."""
    if isinstance(states, Tensor):
        states = _unit_stride(states)
        return states, *states.stride()[:3], states, states, 0, 0, 0
    codes, scale = _unit_stride(states.parts["codes"]), _unit_stride(states.parts["scale"])
    # 8-bit floats have no offset, and the kernel reads none.
    offset = states.parts.get("offset", scale)
    if offset.stride() != scale.stride():
        scale, offset = scale.contiguous(), offset.contiguous()
    return codes, *codes.stride()[:3], scale, offset, *scale.stride()[:3]


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bytes_per_token(segment: Segment) -> int:
    total = 0
    for states in (segment.keys, segment.values):
        parts = [states] if isinstance(states, Tensor) else list(states.parts.values())
        total += sum(part.shape[-1] * part.element_size() for part in parts)
    return total


def split_length(tokens: int, bytes_per_token: int, block: int) -> int:
    """Tokens per split: a function of the pool alone, so that a sequence's sums are the same bits in any batch."""
    wanted = min(_SPLIT_BYTES // bytes_per_token, tokens // LEAST_SPLITS)
    # No more than 64 splits, lest the outputs of the splits outweigh what they were computed from.
    return block * ceil_div(max(wanted, ceil_div(tokens, 64), 1), block)


# -- the kernels -------------------------------------------------------------------------------------------------


@jit
def _attend_split(
    queries, rotated, outs, lses, pools, kv_heads, splits, scaling, softcap,
    FORMATS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROOT: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One split of one pool, for one KV head of one row and BLOCK_M of its query heads."""
    pair, split = tl.program_id(0), tl.program_id(1)
    member = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = 0
    for index in tl.static_range(len(pools)):
        pool = pools[index]
        if (split >= first) & (split < first + pool.splits):
            begin = (split - first) * pool.per_split
            stop = tl.minimum(begin + pool.per_split, pool.tokens)
            if FORMATS[index * 13 + 12]:
                stop = tl.minimum(stop, tl.load(pool.lengths + pair))
            if FORMATS[index * 13] == 0:
                _attend_vectors(
                    queries, outs, lses, pool, split, begin, stop, pair, member, kv_heads, splits, scaling, softcap,
                    FORMATS, index * 13, GROUP, KEY_DIM, VALUE_DIM, SOFTCAP, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            else:
                _attend_codes(
                    rotated if FORMATS[index * 13 + 4] else queries, outs, lses, pool, split, begin, stop, pair, member,
                    kv_heads, splits, scaling * (ROOT if FORMATS[index * 13 + 4] else 1.0), softcap,
                    FORMATS, index * 13, GROUP, KEY_DIM, VALUE_DIM, SOFTCAP, BLOCK_M, BLOCK_N,
                )  # fmt: skip
        first += pool.splits


@jit
def _at(pointer, pair, kv_heads, row, head):
    """Where a KV head begins; 64-bit, since a pool can hold more than 2**31 elements."""
    return pointer + (pair // kv_heads).to(tl.int64) * row + (pair % kv_heads).to(tl.int64) * head


@jit
def _capped(logits, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        # tanh x = 1 - 2 / (exp(2 x) + 1), which saturates where the exponential overflows.
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))
    return logits


@jit
def _there(pool, token, stop, pair, kv_heads, HAS_MASK: tl.constexpr):
    """Which tokens of a block are there, and may be looked at."""
    there = token < stop
    if HAS_MASK:
        mask = pool.mask + (pair // kv_heads).to(tl.int64) * pool.mask_row + token
        there = there & (tl.load(mask, mask=there, other=0) != 0)
    return there


@jit
def _store_split(outs, lses, out, lse, split, splits, pair, member, GROUP: tl.constexpr, DIM: tl.constexpr, channel):
    place = (pair.to(tl.int64) * GROUP + member) * splits + split
    tl.store(lses + place, lse, mask=member < GROUP)
    inside = (member < GROUP)[:, None] & (channel < DIM)[None, :]
    tl.store(outs + place[:, None] * DIM + channel[None, :], out, mask=inside)


@jit
def _attend_vectors(
    queries, outs, lses, pool, split, begin, stop, pair, member, kv_heads, splits, scaling, softcap,
    FORMATS: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    BLOCK_K: tl.constexpr = FORMATS[AT + 3]
    BLOCK_V: tl.constexpr = FORMATS[AT + 8]
    WIDEN: tl.constexpr = FORMATS[AT + 10]
    key_channel, value_channel = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q = tl.load(
        queries + (pair.to(tl.int64) * GROUP + member)[:, None] * KEY_DIM + key_channel[None, :],
        mask=(member < GROUP)[:, None] & (key_channel < KEY_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    keys = _at(pool.key_data, pair, kv_heads, pool.key_row, pool.key_head)
    values = _at(pool.value_data, pair, kv_heads, pool.value_row, pool.value_head)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    weighted = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(begin, stop, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = _there(pool, token, stop, pair, kv_heads, FORMATS[AT + 11])
        k = tl.load(
            keys + token[None, :].to(tl.int64) * pool.key_slot + key_channel[:, None],
            mask=there[None, :] & (key_channel < KEY_DIM)[:, None],
            other=0.0,
        )
        logits = _capped(dot(q, k.to(q.dtype)) * scaling, softcap, SOFTCAP)
        logits = tl.where(there[None, :], logits, -float("inf"))
        raised = tl.maximum(largest, tl.max(logits, axis=1))
        # Nothing but masked tokens so far: any finite number does, since every weight is 0.
        base = tl.where(raised == -float("inf"), 0.0, raised)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(
            values + token[:, None].to(tl.int64) * pool.value_slot + value_channel[None, :],
            mask=there[:, None] & (value_channel < VALUE_DIM)[None, :],
            other=0.0,
        )
        v = v.to(q.dtype)
        weighted = weighted * shrink[:, None] + dot(cast(weights, v.dtype), v)
        largest = raised
    out = weighted / tl.where(total == 0, 1.0, total)[:, None]
    _store_split(outs, lses, out, largest + tl.log(total), split, splits, pair, member, GROUP, VALUE_DIM, value_channel)


@jit
def _attend_codes(
    queries, outs, lses, pool, split, begin, stop, pair, member, kv_heads, splits, scaling, softcap,
    FORMATS: tl.constexpr, AT: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As :func:`_attend_vectors`; tiles have a leading axis of groups of channels."""
    KEY_KIND: tl.constexpr = FORMATS[AT]
    KEY_GROUP: tl.constexpr = FORMATS[AT + 1]
    KEY_GROUPS: tl.constexpr = KEY_DIM // KEY_GROUP
    VALUE_KIND: tl.constexpr = FORMATS[AT + 5]
    VALUE_GROUP: tl.constexpr = FORMATS[AT + 6]
    VALUE_GROUPS: tl.constexpr = VALUE_DIM // VALUE_GROUP
    BLOCK_G: tl.constexpr = FORMATS[AT + 7]
    BLOCK_V: tl.constexpr = FORMATS[AT + 8]
    WIDEN: tl.constexpr = FORMATS[AT + 10]
    key_group, in_key_group = tl.arange(0, FORMATS[AT + 2]), tl.arange(0, FORMATS[AT + 3])
    value_group, in_value_group = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    key_real = (key_group < KEY_GROUPS)[:, None] & (in_key_group < KEY_GROUP)[None, :]
    value_real = (value_group < VALUE_GROUPS)[:, None] & (in_value_group < VALUE_GROUP)[None, :]
    key_channel = key_group[:, None] * KEY_GROUP + in_key_group[None, :]
    value_channel = value_group[:, None] * VALUE_GROUP + in_value_group[None, :]
    q = tl.load(
        queries + (pair.to(tl.int64) * GROUP + member)[None, :, None] * KEY_DIM + key_channel[:, None, :],
        mask=(member < GROUP)[None, :, None] & key_real[:, None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    q_sum = tl.sum(q.to(tl.float32), axis=2)
    keys = _at(pool.key_data, pair, kv_heads, pool.key_row, pool.key_head)
    values = _at(pool.value_data, pair, kv_heads, pool.value_row, pool.value_head)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    offsets = tl.zeros((BLOCK_G, BLOCK_M), tl.float32)
    largest_scaled = tl.full((BLOCK_G, BLOCK_M), -float("inf"), tl.float32)
    weighted = tl.zeros((BLOCK_G, BLOCK_M, BLOCK_V), tl.float32)
    for start in range(begin, stop, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        there = _there(pool, token, stop, pair, kv_heads, FORMATS[AT + 11])
        codes = _load_codes(
            keys, token[None, :, None], key_channel[:, None, :], there[None, :, None] & key_real[:, None, :],
            pool.key_slot, KEY_KIND, KEY_DIM, q.dtype, 0,
        )  # fmt: skip
        products = _grouped_dot(q, tl.permute(codes, (0, 2, 1)))
        place = _at(
            token[None, :].to(tl.int64) * pool.key_scale_slot, pair, kv_heads, pool.key_scale_row, pool.key_scale_head
        )
        real = there[None, :] & (key_group < KEY_GROUPS)[:, None]
        scale, offset = _load_scale(pool.key_scale, pool.key_offset, place + key_group[:, None], real, KEY_KIND)
        logits = tl.sum(products * scale[:, None, :] + q_sum[:, :, None] * offset[:, None, :], axis=0)
        logits = _capped(logits * scaling, softcap, SOFTCAP)
        logits = tl.where(there[None, :], logits, -float("inf"))
        raised = tl.maximum(largest, tl.max(logits, axis=1))
        base = tl.where(raised == -float("inf"), 0.0, raised)
        weights = tl.exp(logits - base[:, None])
        shrink = tl.exp(largest - base)
        total = total * shrink + tl.sum(weights, axis=1)
        largest = raised
        place = _at(
            token[None, :].to(tl.int64) * pool.value_scale_slot,
            pair,
            kv_heads,
            pool.value_scale_row,
            pool.value_scale_head,
        )
        real = there[None, :] & (value_group < VALUE_GROUPS)[:, None]
        scale, offset = _load_scale(pool.value_scale, pool.value_offset, place + value_group[:, None], real, VALUE_KIND)
        # Centred codes, so that what rounding the weights costs doesn't add up over the channels of a rotation.
        CENTER: tl.constexpr = 2 ** (VALUE_KIND - 1) if VALUE_KIND <= 8 else 0
        offset += scale * CENTER
        offsets = offsets * shrink[None, :] + tl.sum(weights[None, :, :] * offset[:, None, :], axis=2)
        # The weights p s, relative to their largest so far in each group of channels.
        scaled = logits[None, :, :] + tl.log(scale)[:, None, :]
        raised_scaled = tl.maximum(largest_scaled, tl.max(scaled, axis=2))
        base_scaled = tl.where(raised_scaled == -float("inf"), 0.0, raised_scaled)
        scaled_weights = tl.exp(scaled - base_scaled[:, :, None])
        codes = _load_codes(
            values, token[None, :, None], value_channel[:, None, :], there[None, :, None] & value_real[:, None, :],
            pool.value_slot, VALUE_KIND, VALUE_DIM, q.dtype, CENTER,
        )  # fmt: skip
        shrink_scaled = tl.exp(largest_scaled - base_scaled)
        weighted = weighted * shrink_scaled[:, :, None] + _grouped_dot(cast(scaled_weights, codes.dtype), codes)
        largest_scaled = raised_scaled
    base = tl.where(largest == -float("inf"), 0.0, largest)
    back = tl.exp(largest_scaled - base[None, :])
    divisor = tl.where(total == 0, 1.0, total)
    out = (weighted * back[:, :, None] + offsets[:, :, None]) / divisor[None, :, None]
    place = (pair.to(tl.int64) * GROUP + member) * splits + split
    tl.store(lses + place, largest + tl.log(total), mask=member < GROUP)
    inside = (member < GROUP)[None, :, None] & value_real[:, None, :]
    tl.store(outs + place[None, :, None] * VALUE_DIM + value_channel[:, None, :], out, mask=inside)


@jit
def _grouped_dot(a, b):
    """(G, M, K) x (G, K, N); a plain product where there is one group, which needs no batch of small ones."""
    if a.shape[0] == 1:
        flat = dot(a.reshape(a.shape[1], a.shape[2]), b.reshape(b.shape[1], b.shape[2]))
        return flat.reshape(1, a.shape[1], b.shape[2])
    return dot(a, b)


@jit
def _load_scale(scale, offset, place, real, KIND: tl.constexpr):
    """Scales and offsets (groups, tokens) float32, 0 where there is no token."""
    scales = tl.load(scale + place, mask=real, other=0.0).to(tl.float32)
    if KIND > 8:
        return scales, tl.zeros_like(scales)
    return scales, tl.load(offset + place, mask=real, other=0.0).to(tl.float32)


@jit
def _load_codes(
    base, token, channel, real, slot,
    FORMAT: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr, CENTER: tl.constexpr,
):  # fmt: skip
    """Codes of the given tokens and channels, less CENTER; see :mod:`kvcompress.kernels.packing` for the bytes."""
    base = base + token.to(tl.int64) * slot
    if FORMAT > 8:
        byte = tl.load(base + channel, mask=real, other=0).to(tl.uint16)
        if FORMAT == 43:
            # Its bits are those of a half with the exponent 8 too small; subnormal numbers come out right, too.
            half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
            return cast(half.to(tl.float16, bitcast=True) * 256, TYPE)
        return cast((byte << 8).to(tl.float16, bitcast=True), TYPE)
    if FORMAT == 3:
        low = tl.load(base + channel % (DIM // 4), mask=real, other=0) >> (channel // (DIM // 4) * 2).to(tl.uint8)
        high = tl.load(base + DIM // 4 + channel % (DIM // 8), mask=real, other=0)
        code = (low & 3) | ((high >> (channel // (DIM // 8)).to(tl.uint8) & 1) << 2)
    else:
        WIDTH: tl.constexpr = DIM * FORMAT // 8
        code = tl.load(base + channel % WIDTH, mask=real, other=0)
        if FORMAT < 8:
            code = code >> (channel // WIDTH * FORMAT).to(tl.uint8) & (2**FORMAT - 1)
    return cast(code.to(tl.int16) - CENTER, TYPE)


@jit
def _merge_splits(
    outs, lses, sinks, merged, total_lse, splits, plain, heads, pairs,
    ROTATED: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head; the outputs of those from ``plain`` on apart, since they are rotated."""
    pair = tl.program_id(0)
    first = pair.to(tl.int64) * splits
    largest = -float("inf")
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        lse = tl.load(lses + first + split, mask=split < splits, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(lse, axis=0))
    if sinks is not None:
        sink = tl.load(sinks + pair % heads).to(tl.float32)
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = 0.0
    if sinks is not None:
        total += tl.exp(sink - base)
    channel = tl.arange(0, BLOCK_DIM)
    out = tl.zeros((BLOCK_DIM,), tl.float32)
    out_rotated = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        weight = tl.exp(tl.load(lses + first + split, mask=split < splits, other=-float("inf")) - base)
        total += tl.sum(weight, axis=0)
        part = tl.load(
            outs + (first + split)[:, None] * VALUE_DIM + channel[None, :],
            mask=(split < splits)[:, None] & (channel < VALUE_DIM)[None, :],
            other=0.0,
        )
        weighted = part * weight[:, None]
        if ROTATED:
            out += tl.sum(tl.where((split < plain)[:, None], weighted, 0.0), axis=0)
            out_rotated += tl.sum(tl.where((split < plain)[:, None], 0.0, weighted), axis=0)
        else:
            out += tl.sum(weighted, axis=0)
    divisor = tl.where(total == 0, 1.0, total)
    place = merged + pair.to(tl.int64) * VALUE_DIM + channel
    tl.store(place, cast(out / divisor, merged.dtype.element_ty), mask=channel < VALUE_DIM)
    if ROTATED:
        tl.store(place + pairs.to(tl.int64) * VALUE_DIM, out_rotated / divisor, mask=channel < VALUE_DIM)
    tl.store(total_lse + pair, base + tl.log(total))
