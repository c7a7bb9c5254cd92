"""How many bytes a cache under a recipe takes, without making one.

The answer comes from the code that allocates: a cache is laid out on the ``meta`` device, where tensors have shapes
and no memory, so that prediction and allocation cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from kvcompress.config import CompressionConfig
from kvcompress.layout import Layout
from kvcompress.pipeline import Pipeline
from kvcompress.shapes import LayerShape
from kvcompress.store import SlotStore


def cache_bytes(
    config: CompressionConfig, shapes: Sequence[LayerShape], tokens: int, batch: int = 1, dtype: str = "bfloat16"
) -> int:
    """Bytes of everything that the compressed layers hold for ``tokens`` tokens per sequence.

    For a recipe that evicts it doesn't depend on ``tokens``, since its slots are allocated at the first token; for one
    whose cache grows it is what a cache made with ``reserve=tokens`` holds.

    Args:
        config: with a budget in tokens, if it evicts; ratios are resolved for a context of ``tokens``.
        dtype: of the model, such as ``bfloat16``.
    """
    pipeline = Pipeline(config.resolve(tokens))
    layout = layout_for(pipeline, tokens)
    kept = config.storage if config.storage != "model" else dtype
    total = 0
    for _, layers in groupby(shapes, key=lambda s: (s.heads, s.kv_heads, s.key_dim, s.value_dim, s.latent)):
        alike = list(layers)
        geometry = alike[0].geometry(batch, getattr(torch, kept))
        total += SlotStore([s.layer for s in alike], geometry, layout, pipeline).nbytes
    return total


def layout_for(pipeline: Pipeline, tokens: int) -> Layout:
    """The layout of a cache that has room for ``tokens`` tokens, and no more where it grows."""
    config = pipeline.config
    if config.evicts:
        return pipeline.layout(config.old_slots, config.buffer)
    return growing_layout(pipeline, tokens)


def growing_layout(pipeline: Pipeline, tokens: int) -> Layout:
    """The smallest layout without eviction that has room for ``tokens`` tokens before the next one comes.

    With codes, old tokens come in whole blocks of B, and the ring is allocated whatever it holds.
    """
    config = pipeline.config
    if not config.quantizes:
        return pipeline.layout(tokens, 0)
    return pipeline.layout(max(0, tokens // config.buffer - 1) * config.buffer, config.buffer)
