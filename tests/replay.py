"""Replay of a compressed run by the uncompressed model.

A recorder notes after every call which positions each full-attention layer and KV head still holds. The replay then
runs the model's own eager attention over the whole sequence in one pass, with a mask per layer and head under which
every token sees exactly what it saw in the compressed run. The logits must agree: eviction is nothing but a mask.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcompress.cache import CompressedCache


class Recorder:
    """Notes the calls of a model under compression until closed.

    Attributes:
        logits: (rows, columns, vocabulary) of each call.
        kept: per call, layer and row, the positions held afterwards: (kv_heads, tokens).
    """

    def __init__(self, model: PreTrainedModel, cache: CompressedCache) -> None:
        self.logits: list[Tensor] = []
        self.kept: list[dict[tuple[int, int], Tensor]] = []
        self._cache = cache
        self._hook = model.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        cache = self._cache
        self.logits.append(output.logits)
        held = [(layer, row) for layer in cache.compressed for row in range(len(cache.rows))]
        self.kept.append({(layer, row): cache.kept_positions(layer, row) for layer, row in held})

    def close(self) -> None:
        self._hook.remove()


def replay(model: PreTrainedModel, tokens: Tensor, lengths: list[int], recorder: Recorder, row: int) -> Tensor:
    """Logits (tokens, vocabulary) of one sequence by the uncompressed model with eager attention.

    Args:
        tokens: (1, tokens) of the sequence, without padding. lengths: how many of them came in each call.
        recorder: what was noted of the compressed run. row: row of the sequence in its batch.
    """
    total = tokens.shape[1]
    layers = sorted({layer for layer, _ in recorder.kept[0]})
    hooks = []
    for layer in layers:
        visible = torch.ones(recorder.kept[0][layer, row].shape[0], total, total, dtype=torch.bool).tril()
        start = lengths[0]
        for call, length in enumerate(lengths[1:]):
            visible[:, start : start + length, :start] = False
            for head, positions in enumerate(recorder.kept[call][layer, row]):
                visible[head, start : start + length, positions] = True
            start += length
        assert start == total
        hooks.append(_mask_attention(model, layer, visible))
    try:
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()


def _mask_attention(model: PreTrainedModel, layer: int, visible: Tensor) -> Any:
    """Make one layer attend by (kv_heads, tokens, tokens)."""
    modules = [m for m in model.modules() if getattr(m, "layer_idx", None) == layer and hasattr(m, "is_causal")]
    assert len(modules) == 1
    config = model.config.get_text_config()
    mask = visible.repeat_interleave(config.num_attention_heads // visible.shape[0], dim=0)[None]
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        assert "attention_mask" in bound.arguments
        bound.arguments["attention_mask"] = additive
        return bound.args[1:], bound.kwargs

    return modules[0].register_forward_pre_hook(replace, with_kwargs=True)
