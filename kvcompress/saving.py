"""Compressed caches as plain data: prefill once, save, and ask many questions later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcompress import own_layers
from kvcompress.errors import CacheError
from kvcompress.layout import RowState
from kvcompress.store import SlotStore

if TYPE_CHECKING:
    from kvcompress.cache import CompressedCache


def state_of(cache: CompressedCache) -> dict[str, Any]:
    """Everything held, as tensors, numbers, strings, lists and dicts."""
    return {
        "config": cache.config.to_yaml(),
        "columns": cache.columns,
        "rows": [list(asdict(row).values()) for row in cache.rows],
        "layout": [cache.layout.old, cache.layout.buffer],
        "interior_padding": cache.interior_padding,
        "identities": cache.identities.state_dict(),
        "stores": [store.state_dict() for store in cache.stores],
        "own_layers": [own_layers.state_of(layer) for layer in cache.own_layers()],
    }


def load_state(cache: CompressedCache, state: Mapping[str, Any]) -> None:
    """Take over copies of what :func:`state_of` gave, on the device its tensors are on.

    Raises:
        CacheError: if it comes from another recipe or another model; the cache is as it was.
    """
    config = cache.config.to_yaml()
    if state["config"] != config:
        raise CacheError(
            f"state: was saved under another recipe; this cache has\n{config}\nthe state has\n{state['config']}"
        )
    saved = sorted(layer for entry in state["stores"] for layer in entry["layers"])
    layers = cache.own_layers()
    if (saved and saved != cache.compressed) or len(state["own_layers"]) != len(layers):
        raise CacheError(f"state: holds layers {saved}, this model's compressed layers are {cache.compressed}")
    cache.reset()
    cache.columns = state["columns"]
    cache.rows = [RowState(*row) for row in state["rows"]]
    cache.layout = cache.pipeline.layout(*state["layout"])
    cache.interior_padding = state["interior_padding"]
    cache.identities.load_state_dict(state["identities"])
    cache.stores = [SlotStore.from_state_dict(entry, cache.layout, cache.pipeline) for entry in state["stores"]]
    for layer, held in zip(cache.own_layers(), state["own_layers"], strict=True):
        own_layers.load_state(layer, held)
