"""Shapes of the keys and values of a model, from its config alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcompress.config import CompressionConfig
from kvcompress.store import Geometry
from kvcompress.support import compressible_layers


@dataclass(frozen=True)
class LayerShape:
    """What one full-attention layer caches.

    Attributes:
        layer: its index. heads, kv_heads: query and KV heads.
        key_dim, value_dim: size of the vectors.
        latent: values are the first value_dim channels of keys (multi-head latent attention).
    """

    layer: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    def geometry(self, rows: int, dtype: torch.dtype, device: str = "meta") -> Geometry:
        """What a store for ``rows`` sequences needs to know."""
        return Geometry(
            rows, self.heads, self.kv_heads, self.key_dim, self.value_dim, dtype, torch.device(device), self.latent
        )


def layer_shapes(config: PreTrainedConfig) -> list[LayerShape]:
    """Shapes of the layers that can be compressed, in order, as far as the config names them the usual way.

    Args:
        config: of a decoder, or of a model that has one.

    Raises:
        UnsupportedModelError: if no layer can be compressed.
    """
    config = config.get_text_config(decoder=True)
    # Layers may differ in head size and the like (Gemma 4); older transformers know no such configs.
    of_layer = getattr(config, "per_layer_config", None)
    return [_shape(of_layer[layer] if of_layer else config, layer) for layer in compressible_layers(config)]


def _shape(config: Any, layer: int) -> LayerShape:
    latent = getattr(config, "kv_lora_rank", None)
    heads = _of_layer(config.num_attention_heads, layer)
    if latent is not None:
        return LayerShape(layer, heads, 1, latent + config.qk_rope_head_dim, latent, latent=True)
    kv_heads = _of_layer(_first(config, "num_key_value_heads", "num_kv_heads", "multi_query_group_num"), layer) or heads
    head_dim = _first(config, "head_dim", "attention_head_dim", "kv_channels") or config.hidden_size // heads
    value_dim = _first(config, "v_head_dim") or head_dim
    return LayerShape(layer, heads, kv_heads, head_dim, value_dim)


def _first(config: Any, *names: str) -> Any:
    """The first of these fields that the architecture knows and that is set; extra ones in a config mean nothing."""
    known = inspect.signature(type(config)).parameters
    return next((value for name in names if name in known and (value := getattr(config, name, None))), None)


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, (list, tuple)) else value


def check_codecs(config: CompressionConfig, model_config: PreTrainedConfig) -> None:
    """Refuse a recipe whose codecs cannot hold the vectors of a model.

    Raises:
        ConfigError: naming the setting, the head size and what is allowed.
    """
    from kvcompress.pipeline import Pipeline

    store = Pipeline(config).store
    if store is None:
        return
    for shape in layer_shapes(model_config):
        store.check(shape.geometry(1, torch.float16).dims)
