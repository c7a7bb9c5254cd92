"""Random numbers of tokens, and the ranks by which they are sampled.

Keyed as in :mod:`kvcompress.kernels.philox`, so a token's number depends on nothing but its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompress.kernels.backend import use_triton
from kvcompress.kernels.launch import Tiling, ceil_div, jit, launch, tiling, tl
from kvcompress.kernels.philox import random_words, to_uniform

_MASK = 0xFFFFFFFF


def token_words_reference(
    positions: Tensor, seed: int, sequence: Tensor, layer: Tensor, event: Tensor, stream: int
) -> Tensor:
    """The first of the random words of every token.

    Args:
        positions: (rows, kv_heads, N) int64, below 2**32.
        seed: any integer; its low 64 bits count. stream: what the numbers are for, 32 bits.
        sequence, layer, event: (rows,) int64; layer below 65536, event below 2**32.

    Returns:
        (rows, kv_heads, N) int64 holding uint32 words.
    """
    sequence, layer, event = (tensor[:, None, None] for tensor in (sequence, layer, event))
    head = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    return random_words(seed, sequence, layer, head, event, positions, stream)[0]


def gumbel_scores_reference(
    scores: Tensor,
    positions: Tensor,
    seed: int,
    sequence: Tensor,
    layer: Tensor,
    event: Tensor,
    stream: int,
    temperature: float,
    log: bool,
) -> Tensor:
    """Ranks whose largest ones are a sample without replacement, weighted by w (Yellott 1977):

        rank[i] = log w[i] / temperature - log(-log u[i]),        u[i] uniform in (0, 1)

    Args:
        scores: (rows, kv_heads, N) float32, w if ``log``, otherwise log w.
        positions, seed, sequence, layer, event, stream: as in :func:`token_words_reference`.

    Returns:
        (rows, kv_heads, N) float32, computed in float64 and rounded once, since logarithms of float32 differ from
        device to device; float64 for float64 scores.
    """
    uniform = to_uniform(token_words_reference(positions, seed, sequence, layer, event, stream))
    wide = scores.double()
    ranks = (torch.log(wide) if log else wide) / temperature - torch.log(-torch.log(uniform))
    return ranks if scores.dtype == torch.float64 else ranks.float()


def token_words(positions: Tensor, seed: int, sequence: Tensor, layer: Tensor, event: Tensor, stream: int) -> Tensor:
    """:func:`token_words_reference`, by its kernel where there is one for the device; equal to the bit."""
    if not use_triton("token_words", positions.device):
        return token_words_reference(positions, seed, sequence, layer, event, stream)
    out = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    shape = tiling("token_words", Tiling(block=512))
    grid, place = _place(shape, positions, seed, sequence, layer, event)
    launch(_token_words, grid, shape, out, *place, STREAM=stream, BLOCK=shape.block)
    return out


def gumbel_scores(
    scores: Tensor,
    positions: Tensor,
    seed: int,
    sequence: Tensor,
    layer: Tensor,
    event: Tensor,
    stream: int,
    temperature: float,
    log: bool,
) -> Tensor:
    """:func:`gumbel_scores_reference`, by its kernel where there is one for the device."""
    if not use_triton("gumbel_scores", scores.device, supported=scores.dtype == torch.float32):
        return gumbel_scores_reference(scores, positions, seed, sequence, layer, event, stream, temperature, log)
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    shape = tiling("gumbel_scores", Tiling(block=512))
    grid, place = _place(shape, positions, seed, sequence, layer, event)
    # A number that a kernel is called with is rounded to float32; one that it is compiled for is not.
    constants = {"STREAM": stream, "TEMPERATURE": temperature, "LOG": log, "BLOCK": shape.block}
    launch(_gumbel_scores, grid, shape, scores, *scores.stride()[:2], out, *place, **constants)
    return out


def _place(
    shape: Tiling, positions: Tensor, seed: int, sequence: Tensor, layer: Tensor, event: Tensor
) -> tuple[tuple[int, int], tuple[Tensor | int, ...]]:
    """The grid, and the arguments that say what a random number is for."""
    rows, kv_heads, tokens = positions.shape
    positions = positions if positions.stride(-1) == 1 else positions.contiguous()
    keys = (tensor.to(torch.int64).contiguous() for tensor in (sequence, layer, event))
    grid = (rows * kv_heads, ceil_div(tokens, shape.block))
    sizes = (kv_heads, tokens, *positions.stride()[:2])
    return grid, (positions, *keys, seed & _MASK, (seed >> 32) & _MASK, *sizes)


@jit
def _words(
    positions, sequences, layers, events, seed_low, seed_high, kv_heads, position_row, position_head,
    token, exists, STREAM, BLOCK,
):  # fmt: skip
    """(BLOCK,) uint32 first words of tokens of the head at hand."""
    row, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    zero = tl.cast(0, tl.uint32)
    sequence = tl.load(sequences + row)
    low, high = sequence.to(tl.uint32), (sequence >> 32).to(tl.uint32)
    seed_low, seed_high = tl.cast(seed_low, tl.uint32), tl.cast(seed_high, tl.uint32)
    first_key, second_key, _, _ = tl.philox_impl(low, high, zero, zero, seed_low, seed_high)
    # 64-bit, since all layers of a store can hold more than 2**31 elements together.
    base = positions + row.to(tl.int64) * position_row + head.to(tl.int64) * position_head
    position = tl.load(base + token, mask=exists, other=0).to(tl.uint32)
    event = tl.load(events + row).to(tl.uint32)
    site = (tl.load(layers + row) * 65536 + head).to(tl.uint32)
    stream = tl.full((BLOCK,), STREAM, tl.uint32)
    word, _, _, _ = tl.philox_impl(position, event, site, stream, first_key, second_key)
    return word


@jit
def _token_words(
    out, positions, sequences, layers, events, seed_low, seed_high, kv_heads, tokens, position_row, position_head,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    word = _words(
        positions, sequences, layers, events, seed_low, seed_high, kv_heads, position_row, position_head,
        token, exists, STREAM, BLOCK,
    )  # fmt: skip
    tl.store(out + tl.program_id(0).to(tl.int64) * tokens + token, word.to(tl.int64), mask=exists)


@jit
def _gumbel_scores(
    scores, score_row, score_head, out,
    positions, sequences, layers, events, seed_low, seed_high, kv_heads, tokens, position_row, position_head,
    STREAM: tl.constexpr, TEMPERATURE: tl.constexpr, LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < tokens
    word = _words(
        positions, sequences, layers, events, seed_low, seed_high, kv_heads, position_row, position_head,
        token, exists, STREAM, BLOCK,
    )  # fmt: skip
    uniform = ((word >> 9).to(tl.float64) + 0.5) * 2.0**-23
    row, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    base = scores + row.to(tl.int64) * score_row + head.to(tl.int64) * score_head
    weight = tl.load(base + token, mask=exists, other=1.0).to(tl.float64)
    if LOG:
        weight = tl.log(weight)
    rank = weight / TEMPERATURE - tl.log(-tl.log(uniform))
    tl.store(out + tl.program_id(0).to(tl.int64) * tokens + token, rank.to(tl.float32), mask=exists)
