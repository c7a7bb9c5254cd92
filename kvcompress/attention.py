"""The attention wrapper: kvcompress as attention implementations of transformers.

For each attention implementation X that a model may use there is one called ``kvcompress_X``. It hands layers of a
:class:`~kvcompress.cache.CompressedCache` to the cache, and everything else (sliding-window layers, calls without a
cache, training) to X itself, unchanged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcompress.errors import CacheError
from kvcompress.forward import LayerCall
from kvcompress.latent import LatentStates, absorb, check_absorption, expand_output
from kvcompress.layer import NewStates
from kvcompress.support import PREFIX, WRAPPED

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def register() -> None:
    """Make the wrapped implementations known to transformers; safe to call again."""
    for name in WRAPPED:
        AttentionInterface.register(PREFIX + name, _wrapped_attention(name))
        AttentionMaskInterface.register(PREFIX + name, _wrapped_mask(name))


def _unchanged(out: Tensor) -> Tensor:
    return out


def _original(name: str, module: nn.Module) -> AttentionFunction:
    """The model's own attention function; eager attention lives in the file of its model."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _wrapped_attention(name: str) -> AttentionFunction:
    @torch.compiler.disable
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Tensor | None,
        *args: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # Keys and values are marked states from a CompressedCache, or plain tensors from anything else.
        def dense(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
            scale = {} if scaling is None else {"scaling": scaling}
            return _original(name, module)(
                module, query, key, value, attention_mask, *args, dropout=dropout, **scale, **kwargs
            )

        if isinstance(key, LatentStates):
            new_keys, new_values = key.plain(), value.plain()
            latents = key.origin
            layer, keys, values = latents.layer, latents.keys, latents.latent
            queries = absorb(module, query, values.shape[-1])
            if layer.cache.columns == 0:
                check_absorption(module, query, new_keys, queries, keys)
        elif isinstance(key, NewStates):
            new_keys, new_values = key.states, value.states
            layer, keys, values, queries = key.layer, new_keys, new_values, query
        else:
            return dense(key, value)
        if kwargs.get("position_bias") is not None:
            raise CacheError(f"{type(module).__name__}: adds a position bias to attention, which is not supported")
        latent = isinstance(key, LatentStates)
        call = LayerCall(
            queries=queries,
            keys=keys,
            values=values,
            mask=attention_mask,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            dense=lambda: dense(new_keys, new_values)[0].transpose(1, 2),
            project=functools.partial(expand_output, module) if latent else _unchanged,
            latent=latent,
        )
        out = layer.cache.attend(layer.index, call)
        return out.transpose(1, 2).contiguous(), None

    return forward


def _wrapped_mask(name: str) -> Callable[..., Tensor | None]:
    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        if attention_mask is not None and attention_mask.dim() == 2:
            columns = kv_offset + kv_length
            if attention_mask.shape[1] < columns:
                raise CacheError(
                    f"attention_mask: has {attention_mask.shape[1]} columns, but the cache has seen {q_offset} tokens "
                    f"and {q_length} come in; it must cover all {columns}"
                )
            if q_length == kv_length == 1 and kv_offset:
                # A decode step over a compressed layer. The general function would read the mask back from the device.
                return attention_mask[:, None, None, kv_offset : kv_offset + 1].bool()
        original = ALL_MASK_ATTENTION_FUNCTIONS[name]
        mask: Tensor | None = original(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            **kwargs,
        )
        return mask

    return make_mask
