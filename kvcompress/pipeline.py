"""The pipeline: protect, score and select the candidates of an event.

:func:`select_tokens` runs it on given tensors without a model: it is what the tests pin down and what a researcher
plays with. Inside a model the store calls :meth:`Pipeline.select` with the same candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcompress.config import CompressionConfig, load_config
from kvcompress.errors import KVCompressError, NonFiniteError
from kvcompress.kernels.value_statistics import Statistic
from kvcompress.layout import Layout
from kvcompress.scoring import TokenStatistics, largest
from kvcompress.stages import ProtectStage, ScoreStage, SelectStage, StoreStage


class Selection(NamedTuple):
    """Outcome of an event.

    Attributes:
        keep: (rows, kv_heads, M) int64, indices of the surviving candidates, in order of position.
        protected: (rows, kv_heads, N) bool, candidates that had to stay.
        scores: (rows, kv_heads, N) float32, combined score before the select stage drew or cut.
    """

    keep: Tensor
    protected: Tensor
    scores: Tensor


class Pipeline:
    """The stages of a config, ready to run."""

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config
        self.protect = config.of_role(ProtectStage)
        self.score = config.of_role(ScoreStage)
        selects = config.of_role(SelectStage)
        self.selector = selects[0] if selects else None
        stores = config.of_role(StoreStage)
        self.store = stores[0] if stores else None
        self.window = max((stage.queries_needed(config.buffer) for stage in config.stages), default=0)
        self.needs_mass = any(stage.needs_mass for stage in config.stages)
        # Codes don't give the statistics back, so they are kept.
        kept = {name for stage in config.stages for name in stage.statistics} if self.store else set()
        self.statistics: tuple[Statistic, ...] = tuple(sorted(kept))

    def layout(self, old: int, buffer: int) -> Layout:
        """Room for ``old`` tokens beside the ring, divided as the store stage wants it."""
        return Layout(old, buffer) if self.store is None else Layout(old, buffer, self._divide)

    def _divide(self, old: int) -> tuple[int, ...]:
        assert self.store is not None
        budget = self.config.budget if self.config.evicts else None
        assert not isinstance(budget, float)
        return self.store.divide(old, budget)

    def precision(self, tokens: TokenStatistics, scores: Tensor | None) -> Tensor:
        """(rows, kv_heads, N) float32 by which the store stage orders candidates, the highest precision first."""
        assert self.store is not None
        return self.store.rank(tokens, scores).nan_to_num(nan=-torch.inf)

    def score_all(self, tokens: TokenStatistics) -> Tensor:
        """(rows, kv_heads, N) float32 combined scores, for a store stage that ranks by them."""
        order = torch.argsort(tokens.positions, dim=-1)
        return self._combined_score(tokens.permuted(order)).gather(-1, torch.argsort(order, dim=-1))

    def select(self, tokens: TokenStatistics, in_order: bool = False) -> Selection:
        """Run the stages. The result doesn't depend on the order of the candidates.

        Args:
            tokens: candidates in any order, positions distinct per head.
            in_order: the candidates are known to lie in order of position, which saves a sort.
        """
        if self.selector is None:
            raise _nothing_to_select(self.config)
        if tokens.shape[-1] == 0:
            none = tokens.positions
            return Selection(none, none.bool(), none.float())
        order = None
        if not in_order:
            order = torch.argsort(tokens.positions, dim=-1)
            tokens = tokens.permuted(order)
        protected = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.positions.device)
        for protect in self.protect:
            protected = protect.protect(tokens, protected)
        scores = self._combined_score(tokens)
        ranks = self.selector.rank(scores, tokens)
        # A score that overflowed must neither outrank nor tie with the protected; one that is no number comes last.
        ranks = ranks.nan_to_num(nan=-torch.inf, posinf=torch.finfo(ranks.dtype).max, neginf=-torch.inf)
        ranks = ranks.masked_fill(protected, torch.inf)
        keep = largest(ranks, tokens.survivors).sort(dim=-1).values
        if order is None:
            return Selection(keep, protected, scores)
        back = torch.argsort(order, dim=-1)
        return Selection(order.gather(-1, keep), protected.gather(-1, back), scores.gather(-1, back))

    def _combined_score(self, tokens: TokenStatistics) -> Tensor:
        total: Tensor | None = None
        for stage in self.score:
            score = stage.weight * stage.score(tokens).float()
            if total is not None:
                score = total * score if stage.combine == "multiply" else total + score
            total = score
        assert total is not None
        return total.expand(tokens.shape)


def check_finite(keys: Tensor, values: Tensor, positions: Tensor, layers: Sequence[int]) -> None:
    """Refuse NaN and infinity among candidates.

    Args:
        keys, values: (rows, kv_heads, N, dim). positions: (rows, kv_heads, N). layers: layer of each row.

    Raises:
        NonFiniteError: naming tensor, layer, head and position of the first bad token.
    """
    for name, tensor in (("keys", keys), ("values", values)):
        finite = torch.isfinite(tensor)
        if bool(finite.all()):
            continue
        row, head, index, channel = (int(i) for i in (~finite).nonzero()[0])
        raise NonFiniteError(
            f"{name}: {float(tensor[row, head, index, channel])} at layer {layers[row]}, KV head {head}, position "
            f"{int(positions[row, head, index])}, channel {channel}; compression needs finite keys and values "
            "(check_finite: false turns this check off)"
        )


def select_tokens(
    config: str | Path | Mapping[str, Any] | CompressionConfig,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    *,
    positions: Tensor | None = None,
    prompt_length: int | Sequence[int] | Tensor | None = None,
    sequence_ids: Sequence[int] | Tensor | None = None,
    layer: int = 0,
    event: int = 0,
    scaling: float | None = None,
) -> Selection:
    """Choose which tokens survive, without a model.

    Args:
        config: anything :func:`kvcompress.load_config` takes; its budget must be a number of tokens.
        keys: (batch, kv_heads, N, head_dim), the candidates only: the recent buffer is not among them.
        values: (batch, kv_heads, N, value_dim).
        queries: (batch, heads, W, head_dim), the queries of the recent buffer in order of time.
        positions: (N,), (batch, N) or (batch, kv_heads, N) integers, distinct per head, in any order; 0 .. N - 1 if
            left out.
        prompt_length: tokens of the prompt, one number or one per sequence; N if left out.
        sequence_ids: (batch,) integers that key the random numbers; the batch index if left out.
        layer, event: what else keys the random numbers.
        scaling: factor on query-key products; 1 / sqrt(head_dim) if left out.

    Returns:
        A :class:`Selection` with M = min(N, budget - buffer).

    Raises:
        ConfigError: if the config is not possible.
        NonFiniteError: if keys or values, or queries that a stage looks at, hold NaN or infinity.
        KVCompressError: if the shapes don't fit together, or more tokens are protected than may stay.
    """
    config = load_config(config)
    pipeline = Pipeline(config)
    if not config.evicts:
        raise _nothing_to_select(config)
    if not isinstance(config.budget, int):
        raise KVCompressError(
            f"budget: {config.budget} is not a number of tokens; set one, or call config.resolve first"
        )
    batch, kv_heads, candidates, head_dim = _check_shapes(keys, values, queries)
    device = keys.device
    if positions is None:
        placed = torch.arange(candidates, device=device).expand(batch, kv_heads, candidates)
    else:
        placed = _check_positions(positions, (batch, kv_heads, candidates)).to(device)
    prompt = _per_sequence("prompt_length", candidates if prompt_length is None else prompt_length, batch, device)
    sequence = _per_sequence(
        "sequence_ids", torch.arange(batch) if sequence_ids is None else sequence_ids, batch, device
    )
    check_protected(config, int(prompt.max()) if batch else 0, candidates)
    if config.check_finite:
        check_finite(keys, values, placed, [layer] * batch)
        if pipeline.window or pipeline.needs_mass:
            _check_queries_finite(queries, layer)
    tokens = TokenStatistics(
        keys=keys,
        values=values,
        queries=queries,
        positions=placed,
        prompt_length=prompt,
        sequence=sequence,
        layer=torch.full((batch,), layer, device=device),
        event=torch.full((batch,), event, device=device),
        seed=config.seed,
        budget=config.budget,
        buffer=config.buffer,
        scaling=head_dim**-0.5 if scaling is None else scaling,
    )
    return pipeline.select(tokens, in_order=positions is None)


def _nothing_to_select(config: CompressionConfig) -> KVCompressError:
    return KVCompressError(f"{config.name}: has no select stage, so there is nothing to select")


def check_protected(config: CompressionConfig, prompt_length: int, candidates: int | None = None) -> None:
    """Refuse a prompt that the protect stages cannot keep within the budget.

    Raises:
        KVCompressError: naming the prompt length and the budget that would do.
    """
    assert isinstance(config.budget, int)
    room = config.budget - config.buffer
    if candidates is not None and candidates <= room:
        return
    protected = config.protected_bound(prompt_length)
    if protected > room:
        raise KVCompressError(
            f"budget: {config.budget} leaves {room} slots for tokens older than the buffer, but {config.name} protects "
            f"{protected} with a prompt of {prompt_length} tokens; raise budget to at least {protected + config.buffer}"
        )


def _check_shapes(keys: Tensor, values: Tensor, queries: Tensor) -> tuple[int, int, int, int]:
    for name, tensor in (("keys", keys), ("values", values), ("queries", queries)):
        if tensor.dim() != 4:
            raise KVCompressError(
                f"{name}: has shape {tuple(tensor.shape)}, must have 4 dimensions (batch, heads, tokens, dim)"
            )
        if not tensor.is_floating_point():
            raise KVCompressError(f"{name}: has dtype {tensor.dtype}, must be floating point")
    if keys.shape[:3] != values.shape[:3]:
        raise KVCompressError(
            f"values: shape {tuple(values.shape)} must agree with keys {tuple(keys.shape)} in batch, kv_heads and "
            "tokens"
        )
    if queries.shape[0] != keys.shape[0] or queries.shape[3] != keys.shape[3]:
        raise KVCompressError(
            f"queries: shape {tuple(queries.shape)} must agree with keys {tuple(keys.shape)} in batch and head_dim"
        )
    if keys.shape[1] == 0 or queries.shape[1] % keys.shape[1] != 0:
        raise KVCompressError(
            f"queries: {queries.shape[1]} heads must be a multiple of the {keys.shape[1]} heads of keys"
        )
    return keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]


def _check_queries_finite(queries: Tensor, layer: int) -> None:
    bad = (~torch.isfinite(queries)).nonzero()
    if len(bad):
        row, head, index, channel = (int(i) for i in bad[0])
        raise NonFiniteError(
            f"queries: {float(queries[row, head, index, channel])} at layer {layer}, sequence {row}, query head "
            f"{head}, query {index}, channel {channel}; scoring needs finite queries "
            "(check_finite: false turns this check off)"
        )


def _check_positions(positions: Tensor, shape: tuple[int, int, int]) -> Tensor:
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise KVCompressError(f"positions: has dtype {positions.dtype}, must be an integer type")
    wanted = [(shape[2],), (shape[0], shape[2]), shape]
    if tuple(positions.shape) not in wanted:
        raise KVCompressError(
            f"positions: has shape {tuple(positions.shape)}, must be one of {', '.join(map(str, wanted))}"
        )
    if positions.dim() == 2:
        positions = positions.unsqueeze(1)
    placed = positions.to(torch.int64).expand(shape)
    if placed.numel() and int(placed.min()) < 0:
        raise KVCompressError(f"positions: {int(placed.min())} is negative; positions count from 0")
    ordered = placed.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).nonzero()
    if len(repeated):
        row, head, index = (int(i) for i in repeated[0])
        raise KVCompressError(
            f"positions: {int(ordered[row, head, index])} occurs twice in sequence {row}, head {head}; "
            "each candidate needs its own"
        )
    return placed


def _per_sequence(name: str, given: int | Sequence[int] | Tensor, batch: int, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(given, device=device)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise KVCompressError(f"{name}: {given} must be whole numbers")
    tensor = tensor.to(torch.int64)
    if tensor.dim() == 0:
        return tensor.expand(batch)
    if tuple(tensor.shape) != (batch,):
        raise KVCompressError(
            f"{name}: has shape {tuple(tensor.shape)}, must be one number or ({batch},), one per sequence"
        )
    return tensor
