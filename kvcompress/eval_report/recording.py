"""Watches a recipe while it reads a text: which positions each head keeps after every event, and why some are safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcompress.cache import CompressedCache
from kvcompress.config import CompressionConfig
from kvcompress.eval.generation import Sampling, answer_batch
from kvcompress.kernels.precision import coarse
from kvcompress.kernels.value_statistics import Statistic, value_statistic_reference
from kvcompress.model import apply, cache_keyword

VALUE_RANGE = "value_range"
# Why a position is held, where no stage of the recipe has protected it.
RECENT, SCORED = "recent", "by score"


@dataclass
class Recording:
    """What a cache held while a text went through it.

    Attributes:
        recipe, budget: as they are listed. prompt_tokens, tokens: of the text. statistic: which spread of values.
        seen: tokens read at each moment: after the prompt, after every event, and at the end.
        kept: at each moment, by layer: (kv_heads, held) int64 positions, ascending.
        reasons: at each moment, by layer: (kv_heads, held) int64, why each position of ``kept`` is held, as an index
            into ``names``: recent (within the buffer, or come since the last event), the stage that protected it at
            the last event, or by score.
        names: of the reasons: ``recent``, the recipe's protect stages, ``by score``.
        shares: (tokens,) float32, share of all compressed layers' KV heads that hold a position at the end.
        texts: what every token reads as; empty where that isn't known.
        spreads: by layer: (kv_heads, tokens) float32 spread of every value vector, as the model made it in this run and
            rounded as it is ranked.
        thresholds: by layer: (events, kv_heads) float32, the least spread among the candidates that the stage
            ``value_range`` protected, infinite where it protected none of its own; empty without that stage.
    """

    recipe: str
    budget: str
    prompt_tokens: int
    tokens: int
    statistic: Statistic
    seen: list[int] = field(default_factory=list)
    kept: list[dict[int, Tensor]] = field(default_factory=list)
    reasons: list[dict[int, Tensor]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shares: Tensor = field(default_factory=lambda: torch.zeros(0))
    texts: list[str] = field(default_factory=list)
    spreads: dict[int, Tensor] = field(default_factory=dict)
    thresholds: dict[int, Tensor] = field(default_factory=dict)


@torch.inference_mode()
def own_answer(
    model: Any, prompt: Sequence[int], sequence_id: int, *, ends: set[int], max_new_tokens: int
) -> list[int]:
    """Tokens that the model writes after a prompt with its full cache, greedily."""
    with apply(model, "full") as handle:
        answers = answer_batch(
            handle, [prompt], [sequence_id], ends=ends, max_new_tokens=max_new_tokens, sampling=Sampling()
        )
    return answers[0].tokens


@torch.inference_mode()
def record(
    model: Any,
    config: CompressionConfig,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    budget: str = "",
    sequence_id: int = 0,
    layers: Sequence[int] | None = None,
) -> Recording:
    """Feed a prompt, and then an answer that is given, under a recipe, and note what it keeps.

    The answer is read as many tokens at a time as come before the next event, which gives what one at a time gives.

    Args:
        config: its budget a number of tokens. sequence_id: keys what is random.
        layers: whose positions to note; all that are compressed by default.
    """
    stage = next((stage for stage in config.stages if stage.stage == VALUE_RANGE), None)
    statistic: Statistic = getattr(stage, "statistic", "range")
    recording = Recording(config.name, budget, len(prompt), len(prompt) + len(answer), statistic)
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with apply(model, config) as handle:
        cache = handle.new_cache([sequence_id])
        chosen = list(cache.compressed) if layers is None else list(layers)
        spreads = _watch_values(cache, statistic)
        watch = _watch_protection(cache)
        recording.names = [RECENT, *watch.names, SCORED]
        start, stop, events = 0, len(prompt), 0
        while start < ids.shape[1]:
            model(input_ids=ids[:, start:stop], **{cache_keyword(model): cache})
            state = cache.rows[0]
            if start == 0 or state.events > events or stop == ids.shape[1]:
                recording.seen.append(stop)
                kept = {layer: cache.kept_positions(layer).cpu() for layer in chosen}
                recording.kept.append(kept)
                recording.reasons.append({layer: watch.reasons(layer, held) for layer, held in kept.items()})
            events = state.events
            room = cache.until_event()
            start, stop = stop, ids.shape[1] if room is None else min(ids.shape[1], stop + max(1, room))
        recording.shares = _shares(cache, ids.shape[1])
    recording.spreads = {layer: torch.cat(parts, dim=1) for layer, parts in spreads.items()}
    recording.thresholds = {layer: torch.stack(found) for layer, found in watch.thresholds.items()}
    return recording


def _watch_values(cache: CompressedCache, statistic: Statistic) -> dict[int, list[Tensor]]:
    """By layer, the spread of the values of every call, taken where the model hands them over."""
    found: dict[int, list[Tensor]] = {}
    shadowed: Any = cache
    attend = cache.attend

    def watched(layer: int, call: Any) -> Tensor:
        # Rounded as ranks are, so that a threshold parts them as it did in the run.
        spread = coarse(value_statistic_reference(call.values[0].detach(), statistic))
        found.setdefault(layer, []).append(spread.float().cpu())
        return attend(layer, call)

    shadowed.attend = watched
    return found


def _shares(cache: CompressedCache, tokens: int) -> Tensor:
    """(tokens,) share of all compressed layers' heads that hold each position."""
    held = [cache.kept_positions(layer).cpu() for layer in cache.compressed]
    counts = torch.bincount(torch.cat([positions.flatten() for positions in held]), minlength=tokens)
    return counts.float() / sum(len(positions) for positions in held)


@dataclass
class _Watch:
    """What the protect stages did.

    Attributes:
        names: of the stages, in order.
        protected: by layer, for the last event: (positions (kv_heads, N), stage (kv_heads, N)), the stage as its number
            from 1 on, or 0 where none protected the candidate.
        thresholds: by layer, for every event: (kv_heads,) least spread that ``value_range`` protected.
    """

    names: list[str]
    protected: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    thresholds: dict[int, list[Tensor]] = field(default_factory=dict)

    def reasons(self, layer: int, kept: Tensor) -> Tensor:
        """(kv_heads, held) why positions are held now: 0 recent, a stage by its number, or one more for the score."""
        if layer not in self.protected:
            return torch.zeros_like(kept)
        positions, stages = self.protected[layer]
        # Every position up to the last one asked for: 0 for those that were no candidates.
        told = torch.zeros(len(kept), int(max(kept.max(), positions.max())) + 1, dtype=torch.int64)
        told.scatter_(1, positions, torch.where(stages == 0, len(self.names) + 1, stages))
        return told.gather(1, kept)


class _Watched:
    """A stage that protects, number ``number`` from 1 on, and is watched."""

    def __init__(self, stage: Any, number: int, watch: _Watch) -> None:
        self.stage, self.number, self.watch = stage, number, watch

    def protect(self, tokens: Any, protected: Tensor) -> Tensor:
        after: Tensor = self.stage.protect(tokens, protected)
        new = after & ~protected
        for row, layer in enumerate(tokens.layer.tolist()):
            if self.number == 1:
                positions = tokens.positions[row].cpu()
                self.watch.protected[layer] = positions, torch.zeros_like(positions)
            self.watch.protected[layer][1][new[row].cpu()] = self.number
        if self.stage.stage == VALUE_RANGE:
            spread = tokens.value_statistic(self.stage.statistic).float()
            least = spread.masked_fill(~new, torch.inf).amin(dim=-1)
            for layer, heads in zip(tokens.layer.tolist(), least.cpu(), strict=True):
                self.watch.thresholds.setdefault(layer, []).append(heads)
        return after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


class _Nothing:
    """A stage that protects nothing, so that recipes without such stages can be watched as well."""

    stage = "nothing"

    def protect(self, tokens: Any, protected: Tensor) -> Tensor:
        return protected


def _watch_protection(cache: CompressedCache) -> _Watch:
    """Note what the protect stages do at every event of the cache's pipeline."""
    pipeline: Any = cache.pipeline
    stages = list(pipeline.protect)
    watch = _Watch([stage.stage for stage in stages])
    pipeline.protect = tuple(_Watched(s, n, watch) for n, s in enumerate(stages or [_Nothing()], 1))
    return watch
