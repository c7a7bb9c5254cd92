"""Answers to a batch of prompts under compression, each as it would be alone.

Prompts are padded on the left. What is random is keyed, not drawn in turn: the recipe's own choices by the sequence
(:mod:`kvcompress.identity`), sampled tokens by (seed, sequence, step, token) through Philox, so an answer doesn't
depend on what else is in the batch. The one thing left is rounding: a batch of another size may run other matrix
kernels, whose logits differ in the last bits, which matters where two tokens are as likely to within that.

Sampling is Gumbel-max: the token of largest log-probability plus Gumbel noise is a draw from the distribution. Recipes
that answer the same sample share its noise, so that they differ by what they keep and not by luck.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from kvcompress.errors import KVCompressError
from kvcompress.kernels.philox import random_words, stream_of, to_gumbel
from kvcompress.model import Handle, cache_keyword

MAX_PERIOD = 200
REPETITIONS = 3
_STREAM = stream_of("evaluation: next token")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the likeliest token. top_p: draw from the likeliest tokens of this mass.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise KVCompressError(f"temperature: {self.temperature} must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise KVCompressError(f"top_p: {self.top_p} must be above 0 and at most 1")
        if self.top_p < 1 and not self.temperature:
            raise KVCompressError(f"top_p: {self.top_p} has no effect at temperature 0; set a temperature")
        if not 0 <= self.seed < 2**64:
            raise KVCompressError(f"seed: {self.seed} must be at least 0 and below 2**64")


@dataclass(frozen=True)
class Answer:
    """What a model wrote after one prompt.

    Attributes:
        tokens: ids, the end token left out. written: how many tokens that took, the end token counted.
        finished: whether the model ended its answer, rather than being cut off.
        seen: tokens that its cache has seen: all but the last one written. kept: slots in use then, per layer and KV
            head. events: compressions.
    """

    tokens: list[int]
    written: int
    finished: bool
    seen: int
    kept: int
    events: int


@torch.inference_mode()
def answer_batch(
    handle: Handle,
    prompts: Sequence[Sequence[int]],
    sequence_ids: Sequence[int],
    *,
    ends: Collection[int],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[Answer]:
    """Answer prompts of any lengths side by side.

    A row that has finished goes on beside the others until half of the batch has, and then leaves it.

    Args:
        handle: of a model under compression.
        prompts: token ids, without padding. sequence_ids: 64-bit integers that key all that is random, one per prompt.
        ends: ids of tokens that end an answer.
    """
    batch = _Batch(handle, prompts, sequence_ids, max_new_tokens)
    rows = list(range(len(prompts)))  # the prompt of each row that is left
    written: list[list[int]] = [[] for _ in prompts]
    answers: dict[int, Answer] = {}
    logits = batch.read_prompts()
    for step in range(max_new_tokens):
        chosen = choose(logits, batch.keys, step, sampling)
        for row, token in enumerate(chosen.tolist()):
            number = rows[row]
            if number in answers:
                continue
            written[number].append(token)
            if token in ends or step == max_new_tokens - 1:
                answers[number] = _answer(written[number], token in ends, batch.cache.rows[row])
        running = [row for row, number in enumerate(rows) if number not in answers]
        if not running:
            break
        if 2 * len(running) <= len(rows) and batch.can_drop:
            rows = [rows[row] for row in running]
            chosen = chosen[batch.keep(running)]
        logits = batch.read(chosen)
    return [answers[number] for number in range(len(prompts))]


def choose(logits: Tensor, sequence_ids: Tensor, step: int, sampling: Sampling) -> Tensor:
    """The next token of every row.

    Args:
        logits: (rows, vocabulary). sequence_ids: (rows,) int64. step: tokens written before this one.

    Returns:
        (rows,) int64.
    """
    scores = logits.float()
    if sampling.temperature:
        scores = scores / sampling.temperature
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        scores = scores + gumbel_noise(sampling.seed, sequence_ids, step, scores.shape[1])
    return scores.argmax(dim=-1)


def gumbel_noise(seed: int, sequence_ids: Tensor, step: int, vocabulary: int) -> Tensor:
    """(rows, vocabulary) standard Gumbel variates, float32, a function of (seed, sequence, step, token) alone."""
    blocks = torch.arange(-(-vocabulary // 4), device=sequence_ids.device)[None]
    zero = torch.zeros_like(blocks[:, :1])
    # One Philox call makes four words, for four tokens.
    words = random_words(seed, sequence_ids[:, None], zero, zero, zero + step, blocks, _STREAM)
    return to_gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocabulary])


def loop_of(tokens: Sequence[int]) -> tuple[int, int] | None:
    """(period, tokens) of the repetition that a text ends in, or None if it ends in none.

    A repetition is at least ``REPETITIONS`` copies of at most ``MAX_PERIOD`` tokens, one after the other. The last copy
    may be cut off: any stretch that long in which each token equals the one a period before it counts. Of several
    periods the shortest; ``tokens`` is the whole stretch, back to where it begins.
    """
    text = list(tokens)
    for period in range(1, min(MAX_PERIOD, len(text) // REPETITIONS) + 1):
        if text[-period * REPETITIONS : -period] == text[-period * (REPETITIONS - 1) :]:
            start = len(text) - period
            while start > 0 and text[start - 1] == text[start - 1 + period]:
                start -= 1
            return period, len(text) - start
    return None


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end an answer, by generation config and tokenizer."""
    ends = model.generation_config.eos_token_id
    found = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    return (found | {tokenizer.eos_token_id}) - {None}


def _answer(tokens: list[int], finished: bool, state: Any) -> Answer:
    kept = tokens[:-1] if finished else tokens
    return Answer(list(kept), len(tokens), finished, state.seen, state.held, state.events)


class _Batch:
    """The rows of a batch on the device: their cache, mask and positions."""

    def __init__(
        self, handle: Handle, prompts: Sequence[Sequence[int]], sequence_ids: Sequence[int], max_new_tokens: int
    ) -> None:
        self.model: Any = handle.model
        device = self.model.device
        self.cache = handle.new_cache(list(sequence_ids))
        self.keys = torch.tensor(list(sequence_ids), dtype=torch.int64, device=device)
        lengths = [len(prompt) for prompt in prompts]
        self.columns = max(lengths)
        self.ids = torch.tensor(
            [[0] * (self.columns - len(prompt)) + list(prompt) for prompt in prompts], device=device
        )
        # Of all columns there will ever be, 0 for padding.
        self.mask = torch.ones(len(prompts), self.columns + max_new_tokens, dtype=torch.int64, device=device)
        for row, length in enumerate(lengths):
            self.mask[row, : self.columns - length] = 0
        self.positions = torch.tensor(lengths, device=device)[:, None]
        known = inspect.signature(self.model.forward).parameters
        self._options: dict[str, Any] = {cache_keyword(self.model): self.cache, "use_cache": True}
        if "logits_to_keep" in known:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in known

    @property
    def can_drop(self) -> bool:
        """Whether all layers of the cache know how to leave rows out; those of linear attention don't."""
        return all(hasattr(layer, "batch_select_indices") for layer in self.cache.own_layers())

    def keep(self, rows: list[int]) -> Tensor:
        """Leave the other rows out; returns the kept ones as an index."""
        index = torch.tensor(rows, device=self.keys.device)
        self.cache.batch_select_indices(index)
        self.keys, self.mask, self.positions = self.keys[index], self.mask[index], self.positions[index]
        return index

    def read_prompts(self) -> Tensor:
        """(rows, vocabulary) logits after the prompts."""
        mask = self.mask[:, : self.columns]
        return self._forward(self.ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0))

    def read(self, tokens: Tensor) -> Tensor:
        """(rows, vocabulary) logits after one more token per row, given as (rows,)."""
        self.columns += 1
        logits = self._forward(tokens[:, None], self.mask[:, : self.columns], self.positions)
        self.positions = self.positions + 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        where = {"position_ids": positions} if self._takes_positions else {}
        return self.model(input_ids=ids, attention_mask=mask, **where, **self._options).logits[:, -1]
