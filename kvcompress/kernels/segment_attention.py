"""Attention over tokens that lie in several pools of different precision, merged by log-sum-exp.

Each segment is attended to block by block, so that no more than one block is ever decoded. With m the largest logit
met so far, a block of logits l and values v updates

    m' = max(m, max l)      s' = s exp(m - m') + sum exp(l - m')      a' = a exp(m - m') + sum exp(l - m') v

and segments of outputs o_i = a_i / s_i and log-sum-exps L_i = m_i + log s_i merge into

    out = sum_i w_i o_i        w_i = exp(L_i) / (exp(sink) + sum_j exp(L_j))

(online softmax, Milakov and Gimelshein, arXiv 1805.02867; split-K merging as in flash decoding). Where a codec has
rotated what it stores, queries are rotated to meet the keys, and outputs are rotated back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvcompress.kernels.precision import widened
from kvcompress.quant.coded import Coded

# Tokens decoded at a time, or as many fewer as make whole blocks of the codecs' own.
BLOCK = 1024
# Queries are processed in slices whose float32 logits of one block stay below this many elements (64 MiB).
_SLICE_ELEMENTS = 1 << 24


class Segment(NamedTuple):
    """Tokens of one pool.

    Attributes:
        keys: (rows, kv_heads, N, head_dim), a tensor of any float dtype or codes.
        values: (rows, kv_heads, N, value_dim), likewise.
        mask: bool, broadcastable to (rows, 1, Q, N), True where a query may look; None means everywhere.
        lengths: (rows, kv_heads) int32, only the first so many tokens of each head are there; None means all.
    """

    keys: Tensor | Coded
    values: Tensor | Coded
    mask: Tensor | None
    lengths: Tensor | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return self.keys.shape[2] if isinstance(self.keys, Tensor) else self.keys.tokens

    @property
    def kv_heads(self) -> int:
        keys = self.keys if isinstance(self.keys, Tensor) else self.keys.parts["codes"]
        return keys.shape[1]

    def allowed(self, heads: int, start: int, stop: int) -> Tensor | None:
        """Where the queries of ``heads`` heads may look among tokens start to stop, of those that are there.

        Returns:
            bool, broadcastable to (rows, heads, Q, stop - start), or None for everywhere.
        """
        mask = None if self.mask is None else self.mask[..., start:stop]
        if self.lengths is None:
            return mask
        there = torch.arange(start, stop, device=self.lengths.device) < self.lengths.unsqueeze(-1)
        there = there.repeat_interleave(heads // self.kv_heads, dim=1).unsqueeze(2)
        return there if mask is None else there & mask


def segment_attention(
    queries: Tensor,
    segments: Sequence[Segment],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as :func:`kvcompress.kernels.slot_attention.attention_reference` over all segments joined.

    Args:
        queries: (rows, heads, Q, head_dim), any float dtype.
        sinks: (heads,) logits of the learned attention sinks (gpt-oss), or None.

    Returns:
        (rows, heads, Q, value_dim) in the dtype of queries. A query that may look nowhere gets zeros.
    """
    return segment_attention_with_lse(queries, segments, scaling, softcap, sinks)[0]


def segment_attention_with_lse(
    queries: Tensor,
    segments: Sequence[Segment],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`segment_attention`, and the logarithm of the softmax's denominator, the sink in it: (rows, heads, Q)."""
    outs, totals = [], []
    for part, chosen in _query_slices(queries, segments):
        pieces = [_attend(part, segment, scaling, softcap) for segment in chosen if segment.tokens]
        lses = torch.stack([lse for _, lse in pieces])
        weights = _weights(lses, sinks)
        outs.append(sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, pieces, strict=True)))
        totals.append(_with_sinks(torch.logsumexp(lses, dim=0), sinks))
    return torch.cat(outs, dim=2).to(queries.dtype), torch.cat(totals, dim=2)


def segment_mass(
    queries: Tensor,
    segments: Sequence[Segment],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attention probability that each key receives, summed over the queries and averaged over the query group.

    Arguments as in :func:`segment_attention`; values are not read.

    Returns:
        (rows, kv_heads, N) float32 per segment.
    """
    masses = [
        torch.zeros(queries.shape[0], s.kv_heads, s.tokens, dtype=torch.float32, device=queries.device)
        for s in segments
    ]
    for part, chosen in _query_slices(queries, segments):
        lses = [_log_sum_exp(part, segment, scaling, softcap) for segment in chosen]
        total = _with_sinks(torch.logsumexp(torch.stack(lses), dim=0), sinks)
        # A query that may look nowhere gives nothing.
        total = total.masked_fill(total == -torch.inf, torch.inf).unsqueeze(-1)
        for mass, segment in zip(masses, chosen, strict=True):
            for start, stop, logits in _logits(part, segment, scaling, softcap):
                received = torch.exp(logits - total).unflatten(1, (mass.shape[1], -1))
                mass[..., start:stop] += received.mean(dim=2).sum(dim=2)
    return masses


def _query_slices(queries: Tensor, segments: Sequence[Segment]) -> Iterator[tuple[Tensor, list[Segment]]]:
    """Slices of the query axis, with the part of each mask that belongs to them."""
    rows, heads, length, _ = queries.shape
    widest = max((min(_block_size(segment), segment.tokens) for segment in segments), default=1)
    step = max(1, _SLICE_ELEMENTS // max(1, rows * heads * widest))
    for start in range(0, length, step):
        part = slice(start, start + step)
        chosen = [
            segment if segment.mask is None or segment.mask.shape[2] == 1 else _masked(segment, part)
            for segment in segments
        ]
        yield queries[:, :, part], chosen


def _masked(segment: Segment, part: slice) -> Segment:
    assert segment.mask is not None
    return segment._replace(mask=segment.mask[:, :, part])


def _logits(
    queries: Tensor, segment: Segment, scaling: float, softcap: float | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks (start, stop, logits) of a segment, logits (rows, heads, Q, stop - start) float32."""
    rows, heads, length, _ = queries.shape
    kv_heads = segment.kv_heads
    q = widened(queries)
    if not isinstance(segment.keys, Tensor):
        q = segment.keys.into_basis(q)
    grouped = q.reshape(rows, kv_heads, -1, q.shape[-1]) * scaling
    size = _block_size(segment)
    for start in range(0, segment.tokens, size):
        stop = min(start + size, segment.tokens)
        keys = _block(segment.keys, start, stop)
        logits = torch.matmul(grouped, keys.transpose(-1, -2)).reshape(rows, heads, length, -1)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        allowed = segment.allowed(heads, start, stop)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        yield start, stop, logits


def _block_size(segment: Segment) -> int:
    """A multiple of the codecs' own blocks of tokens, at most BLOCK if one of them fits."""
    states = (segment.keys, segment.values)
    unit = math.lcm(*(s.codec.block_tokens for s in states if not isinstance(s, Tensor)))
    return max(1, BLOCK // unit) * unit


def _block(states: Tensor | Coded, start: int, stop: int) -> Tensor:
    return widened(states[:, :, start:stop]) if isinstance(states, Tensor) else states.block(start, stop)


def _attend(queries: Tensor, segment: Segment, scaling: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Output (rows, heads, Q, value_dim) and log-sum-exp (rows, heads, Q) of one segment, float32."""
    largest = torch.full(queries.shape[:3], -torch.inf, dtype=widened(queries).dtype, device=queries.device)
    total = torch.zeros_like(largest)
    weighted: Tensor | float = 0.0
    for start, stop, logits in _logits(queries, segment, scaling, softcap):
        raised = torch.maximum(largest, logits.amax(dim=-1))
        # Nothing but masked keys so far: any finite number does, since every weight is 0.
        base = raised.masked_fill(raised == -torch.inf, 0.0)
        weights = torch.exp(logits - base.unsqueeze(-1))
        shrink = torch.exp(largest - base)
        total = total * shrink + weights.sum(dim=-1)
        values = _block(segment.values, start, stop)
        summed = torch.matmul(weights.reshape(*values.shape[:2], -1, stop - start), values)
        weighted = weighted * shrink.unsqueeze(-1) + summed.reshape(*queries.shape[:3], -1)
        largest = raised
    assert isinstance(weighted, Tensor)
    out = weighted / total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    if not isinstance(segment.values, Tensor):
        out = segment.values.out_of_basis(out)
    return out, largest + torch.log(total)


def _log_sum_exp(queries: Tensor, segment: Segment, scaling: float, softcap: float | None) -> Tensor:
    """(rows, heads, Q) float32."""
    lses = [torch.logsumexp(logits, dim=-1) for _, _, logits in _logits(queries, segment, scaling, softcap)]
    if not lses:
        return torch.full(queries.shape[:3], -torch.inf, device=queries.device)
    return torch.logsumexp(torch.stack(lses), dim=0)


def _with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """(rows, heads, Q), the learned sinks added to the denominator."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype).reshape(1, -1, 1).expand_as(lse))


def _weights(lses: Tensor, sinks: Tensor | None) -> Tensor:
    """(segments, rows, heads, Q): share of the probability that lies in each segment."""
    if sinks is None:
        # Softmax over nothing is NaN. Only that is replaced: a NaN among the logits must show.
        return torch.softmax(lses, dim=0).masked_fill((lses == -torch.inf).all(dim=0), 0.0)
    sink = sinks.to(lses.dtype).reshape(1, 1, -1, 1).expand(1, *lses.shape[1:])
    return torch.softmax(torch.cat([lses, sink]), dim=0)[:-1]
