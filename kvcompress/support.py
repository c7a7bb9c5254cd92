"""Which models can be compressed, and which of their layers; everything else is refused by name before it runs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcompress.errors import UnsupportedModelError
from kvcompress.latent import check_latent

OLDEST_TRANSFORMERS = Version("5.17")
# Attention implementations that the wrapper can stand in for.
WRAPPED = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# The wrapped implementation of X is called kvcompress_X.
PREFIX = "kvcompress_"
# Attribute of a model that holds its handle.
HANDLE = "_kvcompress_handle"


def check_supported(model: Any) -> None:
    """Refuse a model that cannot be compressed, by name and with the reason.

    Raises:
        UnsupportedModelError: if so.
    """
    if Version(transformers.__version__) < OLDEST_TRANSFORMERS:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is too old; kvcompress needs at least {OLDEST_TRANSFORMERS}"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__}: is not a transformers PreTrainedModel; pass the model itself, before any wrapper"
        )
    name = type(model).__name__
    if HANDLE in model.__dict__:
        raise UnsupportedModelError(f"{name}: is already under compression; call remove() on its handle first")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name}: is an encoder-decoder; only decoder-only models are supported")
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name}: does not route attention through transformers' AttentionInterface (falcon and bloom don't), "
            "so its cache cannot be compressed"
        )
    decoder = model.get_decoder()
    causal = [module.is_causal for module in decoder.modules() if hasattr(module, "is_causal")]
    if not isinstance(decoder, PreTrainedModel) or (causal and not any(causal)):
        raise UnsupportedModelError(f"{name}: is not a causal decoder; only decoder-only models are supported")
    check_latent(model)
    text_config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    compressible_layers(text_config)
    used = attention_of(text_config._attn_implementation)
    if used.startswith(PREFIX):
        raise UnsupportedModelError(
            f"{name}: shares its config object with a model that is under compression; give it a copy of the config"
        )
    if used not in WRAPPED:
        raise UnsupportedModelError(
            f"{name}: uses attention {used!r}; load it with attn_implementation one of {', '.join(WRAPPED)}"
        )


def compressible_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the full-attention layers of a decoder config.

    Raises:
        UnsupportedModelError: if there is none, or layers share or index their keys and values.
    """
    layers = DynamicCache(config=config).layers
    shared = getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    if shared:
        raise UnsupportedModelError(
            f"{config.model_type}: layers share each other's keys and values, which is not supported"
        )
    found = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not found:
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UnsupportedModelError(
            f"{config.model_type}: has no full-attention layer to compress; its cache layers are {', '.join(kinds)}, "
            "whose memory is bounded already or not in keys and values"
        )
    return found


def attention_of(implementation: str | None) -> str:
    """The attention implementation in force; transformers falls back to eager where none is set."""
    return implementation or "eager"


def layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Device of each attention layer, so that layers placed together share a store."""
    devices: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            parameter = next(module.parameters(), None)
            if parameter is not None:
                devices.setdefault(index, parameter.device)
    return devices
