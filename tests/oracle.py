"""An independent reading of what compression means, for comparison with the real thing.

The oracle keeps every token. Each (layer, sequence, KV head) has a plain Python set of the positions that are still
alive; attention is written out with an explicit mask over the full cache, one sequence at a time and without padding;
an event shrinks the sets. It shares nothing with the store, the layout, the plan or the wrapper; only which tokens an
event keeps comes from ``kvcompress.select_tokens``, which has tests of its own.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from kvcompress import CompressionConfig, select_tokens
from kvcompress.model import cache_keyword

# The oracle attends in float64, the model in float32.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
_ACTIVE: list[Oracle] = []


class Oracle:
    """Runs one unpadded sequence through a model, call by call."""

    def __init__(self, model, config: CompressionConfig, sequence_id: int = 0, prompt_length: int | None = None):
        self.model, self.config, self.sequence_id = model, config, sequence_id
        self.declared = prompt_length
        self.prompt: int | None = None
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.alive: dict[int, list[set[int]]] = {}
        self.events: dict[int, int] = {}
        self.queries: dict[int, torch.Tensor] = {}
        self.mass: dict[int, list[dict[int, float]]] = {}
        self.seen = 0

    def __call__(self, ids: list[int]) -> torch.Tensor:
        """Logits (len(ids), vocab) of the next tokens."""
        config = self.model.config.get_text_config(decoder=True)
        original = config._attn_implementation_internal
        if self.prompt is None:
            self.prompt = self.declared or len(ids)
        config._attn_implementation_internal = "oracle"
        _ACTIVE.append(self)
        try:
            with torch.no_grad():
                positions = torch.arange(self.seen, self.seen + len(ids))[None]
                out = self.model(
                    input_ids=torch.tensor([ids]),
                    position_ids=positions,
                    use_cache=True,
                    **{cache_keyword(self.model): self.cache},
                )
        finally:
            _ACTIVE.pop()
            config._attn_implementation_internal = original
        self.seen += len(ids)
        return out.logits[0]

    def attention(self, layer: int, query, key, value, scaling: float):
        kv_heads, total, new = key.shape[1], key.shape[2], query.shape[2]
        group = query.shape[1] // kv_heads
        alive = self.alive.setdefault(layer, [set() for _ in range(kv_heads)])
        mass = self.mass.setdefault(layer, [{} for _ in range(kv_heads)])
        out = torch.zeros(1, query.shape[1], new, value.shape[3], dtype=query.dtype)
        for head in range(kv_heads):
            for step in range(new):
                visible = sorted(alive[head]) + list(range(total - new, total - new + step + 1))
                q = query[0, head * group : (head + 1) * group, step].double()
                weights = torch.softmax(q @ key[0, head, visible].double().T * scaling, dim=-1)
                received = mass[head]
                for position, share in zip(visible, weights.mean(dim=0).tolist(), strict=True):
                    received[position] = received.get(position, 0.0) + share
                out[0, head * group : (head + 1) * group, step] = (weights @ value[0, head, visible].double()).to(
                    out.dtype
                )
        past = self.queries.get(layer)
        self.queries[layer] = query if past is None else torch.cat([past, query], dim=2)
        held = len(alive[0])
        for positions in alive:
            positions.update(range(total - new, total))
        if self._fires(layer, held, new, total - new):
            self._compress(layer, key, value, total, scaling)
        return out

    def _fires(self, layer: int, held: int, new: int, seen: int) -> bool:
        budget, buffer = self.config.budget, self.config.buffer
        if held + new < budget + buffer:
            return False
        if self.config.prefill == "defer" and not self.events.get(layer):
            if seen < self.prompt:
                return False
            if held >= budget + buffer:
                return any((length - budget) % buffer == 0 for length in range(held + 1, held + new + 1))
        return True

    def _compress(self, layer: int, key, value, total: int, scaling: float) -> None:
        budget, buffer = self.config.budget, self.config.buffer
        recent = set(range(total - buffer, total))
        per_head = [sorted(positions - recent) for positions in self.alive[layer]]
        gather = torch.tensor(per_head)
        selection = self._select(layer, gather, key, value, scaling)
        self.events[layer] = self.events.get(layer, 0) + 1
        assert selection.shape[-1] == budget - buffer
        self.alive[layer] = [
            {per_head[head][i] for i in selection[head].tolist()} | recent for head in range(len(per_head))
        ]

    def _select(self, layer: int, gather: torch.Tensor, key, value, scaling: float) -> torch.Tensor:
        """(kv_heads, M) indices into gather."""
        buffer = self.config.buffer
        if self.config.name == "h2o":
            # Nothing but bare tensors goes into select_tokens, so the one recipe with a history is written out.
            keep = []
            for head, positions in enumerate(gather.tolist()):
                room = self.config.budget - buffer
                local = self.config.budget // 2 - buffer
                must = {p for p in positions if p < 4} | set(positions[len(positions) - local :] if local else [])
                rest = sorted(set(positions) - must, key=lambda p: (self.mass[layer][head][p], p))
                survivors = sorted(must | set(rest[len(rest) - (room - len(must)) :]))
                keep.append([positions.index(p) for p in survivors])
            return torch.tensor(keep)
        index = gather[None, :, :, None]
        return select_tokens(
            self.config,
            key.gather(2, index.expand(-1, -1, -1, key.shape[3])),
            value.gather(2, index.expand(-1, -1, -1, value.shape[3])),
            self.queries[layer][:, :, -buffer:],
            positions=gather[None],
            prompt_length=self.prompt,
            sequence_ids=[self.sequence_id],
            layer=layer,
            event=self.events.get(layer, 0),
            scaling=scaling,
        ).keep[0]


def _oracle_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    out = _ACTIVE[-1].attention(module.layer_idx, query, key, value, scaling or query.shape[-1] ** -0.5)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("oracle", _oracle_attention)
AttentionMaskInterface.register("oracle", sdpa_mask)
