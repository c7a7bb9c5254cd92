"""One full-attention layer of a compressed cache, as transformers sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvcompress.errors import UnsupportedModelError
from kvcompress.latent import Latents, LatentStates

if TYPE_CHECKING:
    from kvcompress.cache import CompressedCache


class NewStates:
    """Keys or values that ``update`` passes on to the attention wrapper, with the layer that they belong to."""

    def __init__(self, layer: CompressedLayer, states: Tensor) -> None:
        self.layer = layer
        self.states = states

    @property
    def shape(self) -> torch.Size:
        return self.states.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    @property
    def device(self) -> torch.device:
        return self.states.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedModelError(
            f"the model applies {getattr(func, '__name__', func)} to keys or values between cache and attention, which "
            "is not supported"
        )


class CompressedLayer(CacheLayerMixin):
    """One full-attention layer of a :class:`CompressedCache`, as transformers sees it."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: CompressedCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index

    @property
    def is_croppable(self) -> bool:
        return self.cache.is_croppable

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Slots are allocated when attention first runs, since their number depends on the padding."""

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.cache.check_wrapped()
        if self.cache.latent_rank is not None and key_states.shape[-1] == self.cache.latent_rank:
            latents = Latents(self, key_states, value_states)
            return LatentStates.mark(key_states, latents), LatentStates.mark(value_states, latents)
        return NewStates(self, key_states), NewStates(self, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only; the wrapper knows about the stored ones."""
        return query_length, self.cache.columns

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1
