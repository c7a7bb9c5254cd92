"""The layers of a compressed cache that stay transformers' own: sliding-window, chunked and linear attention.

Their memory is bounded already. What the cache does to its slots (move, save, roll back), it has to do to them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcompress.errors import CacheError


def tensors_of(layer: CacheLayerMixin) -> Iterator[Tensor]:
    """All tensors that a layer holds; linear attention keeps its states in dicts."""
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, Tensor):
                yield tensor


def map_tensors(layer: CacheLayerMixin, function: Callable[[Tensor], Tensor]) -> None:
    """Replace all tensors that a layer holds."""
    for name, value in vars(layer).items():
        setattr(layer, name, _mapped(value, function))


def state_of(layer: CacheLayerMixin) -> dict[str, Any]:
    """Tensors, numbers and flags of a layer."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, (Tensor, int, bool, dict))}


def load_state(layer: CacheLayerMixin, state: dict[str, Any]) -> None:
    """Take over copies of what :func:`state_of` gave."""
    for name, value in state.items():
        setattr(layer, name, _mapped(value, torch.Tensor.clone))
    for held in (getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values()):
        if isinstance(held, Tensor):
            layer.dtype, layer.device = held.dtype, held.device


def check_can(layers: Sequence[CacheLayerMixin], operation: str) -> None:
    """Refuse an operation that some layer lacks, before any layer has changed.

    Raises:
        CacheError: naming operation and layers.
    """
    lacking = sorted({type(layer).__name__ for layer in layers if not hasattr(layer, operation)})
    if lacking:
        raise CacheError(f"{operation}: {', '.join(lacking)} of transformers has no such operation")


def check_can_roll_back(layers: Sequence[CacheLayerMixin]) -> None:
    """Refuse a rollback if some layer has dropped what it needs for it.

    Raises:
        CacheError: naming the layer.
    """
    for layer in layers:
        window = getattr(layer, "sliding_window", None)
        within = window is not None and layer.get_seq_length() < window
        # Layers that keep their past for a rollback record it.
        if not layer.is_croppable or not (within or getattr(layer, "record_past", False)):
            raise CacheError(f"crop: a {type(layer).__name__} of this model has dropped what a rollback needs")


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    return function(value) if isinstance(value, Tensor) else value
