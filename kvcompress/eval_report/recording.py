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
from kvcompress.kernels.value_statistics import Statistic, value_statistic_reference
from kvcompress.model import apply, cache_keyword

VALUE_RANGE = "value_range"


@dataclass
class Recording:
    """What a cache held while a text went through it.

    Attributes:
        recipe, budget: as they are listed. prompt_tokens, tokens: of the text. statistic: which spread of values.
        seen: tokens read at each moment: after the prompt, after every event, and at the end.
        kept: at each moment, by layer: (kv_heads, held) int64 positions, ascending.
        spreads: by layer: (kv_heads, tokens) float32 spread of every value vector, as the model made it in this run.
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
        thresholds = _watch_protection(cache)
        start, stop, events = 0, len(prompt), 0
        while start < ids.shape[1]:
            model(input_ids=ids[:, start:stop], **{cache_keyword(model): cache})
            state = cache.rows[0]
            if start == 0 or state.events > events or stop == ids.shape[1]:
                recording.seen.append(stop)
                recording.kept.append({layer: cache.kept_positions(layer).cpu() for layer in chosen})
            events = state.events
            room = cache.until_event()
            start, stop = stop, ids.shape[1] if room is None else min(ids.shape[1], stop + max(1, room))
    recording.spreads = {layer: torch.cat(parts, dim=1) for layer, parts in spreads.items()}
    recording.thresholds = {layer: torch.stack(found) for layer, found in thresholds.items()}
    return recording


def _watch_values(cache: CompressedCache, statistic: Statistic) -> dict[int, list[Tensor]]:
    """By layer, the spread of the values of every call, taken where the model hands them over."""
    found: dict[int, list[Tensor]] = {}
    attend = cache.attend

    def watched(layer: int, call: Any) -> Tensor:
        found.setdefault(layer, []).append(value_statistic_reference(call.values[0].detach(), statistic).float().cpu())
        return attend(layer, call)

    cache.attend = watched  # type: ignore[method-assign]
    return found


class _Watched:
    """A stage that protects, and the least spread that it protected at each event."""

    def __init__(self, stage: Any, found: dict[int, list[Tensor]]) -> None:
        self.stage, self.found = stage, found

    def protect(self, tokens: Any, protected: Tensor) -> Tensor:
        after: Tensor = self.stage.protect(tokens, protected)
        spread = tokens.value_statistic(self.stage.statistic).float()
        least = spread.masked_fill(~(after & ~protected), torch.inf).amin(dim=-1)
        for layer, heads in zip(tokens.layer.tolist(), least.cpu(), strict=True):
            self.found.setdefault(layer, []).append(heads)
        return after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stage, name)


def _watch_protection(cache: CompressedCache) -> dict[int, list[Tensor]]:
    """By layer, a tensor (kv_heads,) for every event of the stage ``value_range``."""
    found: dict[int, list[Tensor]] = {}
    pipeline: Any = cache.pipeline
    pipeline.protect = tuple(_Watched(s, found) if s.stage == VALUE_RANGE else s for s in pipeline.protect)
    return found
