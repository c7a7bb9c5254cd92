"""The scoring core: the candidates of an event, and the statistics that stages rank them by.

An *event* is one compression of one layer of one sequence. Its *candidates* are all cached tokens except the most
recent ``buffer`` ones. A :class:`TokenStatistics` carries the candidates of any number of (layer, sequence) pairs,
which it calls *rows*: they share the number of candidates and of survivors, nothing else. Statistics that several
stages use are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from kvcompress.errors import KVCompressError
from kvcompress.kernels.gumbel_scores import gumbel_scores, token_words
from kvcompress.kernels.normal_matrix import normal_matrix
from kvcompress.kernels.philox import stream_of, to_gumbel, to_uniform
from kvcompress.kernels.precision import coarse
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
        rows, kv_heads, candidates = self.positions.shape
        return rows, kv_heads, candidates

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim, value_dim."""
        return self.keys.shape[-1], self.values.shape[-1]

    @property
    def survivors(self) -> int:
        """M = min(N, K - B), the number of candidates that stay."""
        return min(self.shape[2], self.budget - self.buffer)

    def per_token(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``function(keys, values)``, (rows, kv_heads, N), if it makes no difference in which order tokens lie.

        It spares bringing keys and values into order first, which costs as much as reading them several times.
        """
        return function(self.keys, self.values)

    def value_statistic(self, statistic: Statistic) -> Tensor:
        """(rows, kv_heads, N) float32, rounded to rank by: see
        :func:`kvcompress.kernels.value_statistics.value_statistic_reference` and
        :func:`kvcompress.kernels.precision.coarse`.
        """
        if statistic not in self.known:
            self.known[statistic] = coarse(value_statistic(self.values, statistic))
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
        return to_uniform(token_words(*self._place(purpose)))

    def gumbel(self, purpose: str) -> Tensor:
        """(rows, kv_heads, N) float32 standard Gumbel, one independent draw per candidate and event."""
        return to_gumbel(token_words(*self._place(purpose)))

    def gumbel_scores(self, purpose: str, scores: Tensor, temperature: float, log: bool) -> Tensor:
        """(rows, kv_heads, N) float32: see :func:`kvcompress.kernels.gumbel_scores.gumbel_scores_reference`.

        Args:
            scores: (rows, kv_heads, N) float32 weights if ``log``, otherwise their logarithms.
        """
        return gumbel_scores(scores, *self._place(purpose), temperature, log)

    def normal_matrix(self, purpose: str, height: int, width: int, resample: bool) -> Tensor:
        """(rows, 1, height, width) float32 standard normal, one matrix per row, shared by its heads.

        Args:
            resample: draw a new matrix at every event; otherwise the same one at all events of a layer.
        """
        event = self.event if resample else torch.zeros_like(self.event)
        return normal_matrix(self.seed, self.sequence, self.layer, event, height, width, stream_of(purpose))

    def _place(self, purpose: str) -> tuple[Tensor, int, Tensor, Tensor, Tensor, int]:
        """What the random numbers of the candidates are keyed by."""
        return self.positions, self.seed, self.sequence, self.layer, self.event, stream_of(purpose)

    def permuted(self, order: Tensor) -> TokenStatistics:
        """The same candidates in another order; ``order`` is (rows, kv_heads, N) int64.

        On an accelerator keys and values stay where they are until a stage asks for them, and statistics are computed
        there: moving them would take longer than scoring them. On the CPU they move first, so that sums over the
        candidates come out the same to the last bit wherever tokens lie.
        """
        permuted = _Permuted(self, order)
        if _moves_first(self.positions.device):
            return TokenStatistics(**{f.name: getattr(permuted, f.name) for f in fields(TokenStatistics)})
        return permuted


def _moves_first(device: torch.device) -> bool:
    return device.type == "cpu"


class _Permuted(TokenStatistics):
    """Candidates in another order than they lie in."""

    source: TokenStatistics
    order: Tensor

    def __init__(self, source: TokenStatistics, order: Tensor) -> None:
        moved = {name: getattr(source, name) for name in _UNMOVED}
        moved["positions"] = source.positions.gather(2, order)
        moved["mass"] = None if source.mass is None else source.mass.gather(2, order)
        moved["known"] = {name: statistic.gather(2, order) for name, statistic in source.known.items()}
        vars(self).update(moved, source=source, order=order)

    @cached_property
    def keys(self) -> Tensor:
        return self._moved(self.source.keys)

    @cached_property
    def values(self) -> Tensor:
        return self._moved(self.source.values)

    def _moved(self, vectors: Tensor) -> Tensor:
        return vectors.gather(2, self.order.unsqueeze(-1).expand(*self.order.shape, vectors.shape[-1]))

    @property
    def dims(self) -> tuple[int, int]:
        return self.source.dims

    def per_token(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return self.source.per_token(function).gather(2, self.order)

    def value_statistic(self, statistic: Statistic) -> Tensor:
        if statistic not in self.known:
            self.known[statistic] = self.source.value_statistic(statistic).gather(2, self.order)
        return self.known[statistic]

    def window_scores(self, window: int | None = None, temperature: float = 1.0) -> Tensor:
        scores = self.source.window_scores(window, temperature)
        return scores.gather(3, self.order.unsqueeze(2).expand_as(scores))


_UNMOVED = [f.name for f in fields(TokenStatistics) if f.name not in ("keys", "values", "positions", "mass", "known")]


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
