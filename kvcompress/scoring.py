"""The scoring core: the candidates of an event, and the statistics that stages rank them by.

An *event* is one compression of one layer of one sequence. Its *candidates* are all cached tokens except the most
recent ``buffer`` ones. A :class:`TokenStatistics` carries the candidates of any number of (layer, sequence) pairs,
which it calls *rows*: they share the number of candidates and of survivors, nothing else. Statistics that several
stages use are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcompress.errors import KVCompressError
from kvcompress.kernels.philox import random_words, stream_of, to_gumbel, to_normal, to_uniform
from kvcompress.kernels.value_statistics import Statistic, value_statistic
from kvcompress.kernels.window_scores import window_scores


@dataclass(frozen=True)
class TokenStatistics:
    """The candidates of one event per row.

    Attributes:
        keys: (rows, kv_heads, N, head_dim), position baked in by RoPE where the model uses it.
        values: (rows, kv_heads, N, value_dim).
        queries: (rows, heads, W, head_dim), the last W queries in order of time, W >= 0; heads is a multiple of
            kv_heads.
        positions: (rows, kv_heads, N) int64, position of each candidate in its sequence, padding not counted.
            Stages see them in ascending order.
        prompt_length: (rows,) int64, tokens of the prompt.
        sequence, layer, event: (rows,) int64, what the random numbers of a row are keyed by.
        seed: the recipe's seed.
        budget, buffer: K and B of the recipe.
        scaling: factor on query-key products, 1 / sqrt(head_dim) as a rule.
        mass: (rows, kv_heads, N) float32, attention received so far, or None where nobody accumulates it.
        known: statistics of the value vectors by name, (rows, kv_heads, N) float32, taken when the tokens left the
            buffer; what is not known is computed from ``values``.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    positions: Tensor
    prompt_length: Tensor
    sequence: Tensor
    layer: Tensor
    event: Tensor
    seed: int
    budget: int
    buffer: int
    scaling: float
    mass: Tensor | None = None
    known: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, kv_heads, N)."""
        rows, kv_heads, candidates = self.keys.shape[:3]
        return rows, kv_heads, candidates

    @property
    def survivors(self) -> int:
        """M = min(N, K - B), the number of candidates that stay."""
        return min(self.keys.shape[2], self.budget - self.buffer)

    def value_statistic(self, statistic: Statistic) -> Tensor:
        """(rows, kv_heads, N) float32; see :func:`kvcompress.kernels.value_statistics.value_statistic`."""
        if statistic not in self.known:
            self.known[statistic] = value_statistic(self.values, statistic)
        return self.known[statistic]

    def window_scores(self, window: int | None = None, temperature: float = 1.0) -> Tensor:
        """(rows, kv_heads, group, N) float32: see :func:`kvcompress.kernels.window_scores.window_scores`.

        Args:
            window: use the last so many queries; None uses all that are given.
        """
        if self.queries.shape[2] == 0:
            raise KVCompressError("queries: this stage scores by attention and needs at least one query, got none")
        queries = self.queries if window is None else self.queries[:, :, -window:]
        return window_scores(queries, self.keys, self.scaling / temperature)

    def uniform(self, purpose: str) -> Tensor:
        """(rows, kv_heads, N) float64 in (0, 1), one independent draw per candidate and event."""
        return to_uniform(self._words(purpose)[0])

    def gumbel(self, purpose: str) -> Tensor:
        """(rows, kv_heads, N) float32 standard Gumbel, one independent draw per candidate and event."""
        return to_gumbel(self._words(purpose)[0])

    def normal_matrix(self, purpose: str, height: int, width: int, resample: bool) -> Tensor:
        """(rows, 1, height, width) float32 standard normal, one matrix per row, shared by its heads.

        Args:
            resample: draw a new matrix at every event; otherwise the same one at all events of a layer.
        """
        device = self.keys.device
        event = self.event if resample else torch.zeros_like(self.event)
        entry = torch.arange(height * width, device=device).unsqueeze(0)
        first, second, _, _ = random_words(
            self.seed,
            self.sequence[:, None],
            self.layer[:, None],
            torch.zeros(1, 1, dtype=torch.int64, device=device),
            event[:, None],
            entry,
            stream_of(purpose),
        )
        return to_normal(first, second).reshape(-1, 1, height, width)

    def _words(self, purpose: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads = torch.arange(self.keys.shape[1], device=self.keys.device)
        return random_words(
            self.seed,
            self.sequence[:, None, None],
            self.layer[:, None, None],
            heads[None, :, None],
            self.event[:, None, None],
            self.positions,
            stream_of(purpose),
        )

    def permuted(self, order: Tensor) -> TokenStatistics:
        """The same candidates in another order; ``order`` is (rows, kv_heads, N) int64."""
        wide = order.unsqueeze(-1)
        return replace(
            self,
            keys=self.keys.gather(2, wide.expand_as(self.keys)),
            values=self.values.gather(2, wide.expand_as(self.values)),
            positions=self.positions.gather(2, order),
            mass=None if self.mass is None else self.mass.gather(2, order),
            known={name: statistic.gather(2, order) for name, statistic in self.known.items()},
        )


def largest(ranks: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest entries along the last axis, largest first; equal ones by highest index.

    Candidates lie in order of position, so that ties keep the more recent token, on every device alike.

    Args:
        ranks: (..., N), no NaN.

    Returns:
        (..., count) int64, distinct.
    """
    last = ranks.shape[-1] - 1
    return last - torch.sort(ranks.flip(-1), dim=-1, descending=True, stable=True).indices[..., :count]
