"""kvcompress: KV-cache compression for reasoning models, by eviction and quantization in one pipeline.

import kvcompress
kvcompress.apply(model, "vase-attnv", budget=1024)
model.generate(**inputs, max_new_tokens=32768)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcompress.config import CompressionConfig, json_schema, load_config, recipe_names
from kvcompress.errors import CacheError, ConfigError, KVCompressError, NonFiniteError, UnsupportedModelError
from kvcompress.pipeline import Selection, select_tokens

if TYPE_CHECKING:
    from kvcompress.cache import CompressedCache
    from kvcompress.model import Handle, apply
    from kvcompress.stats import CacheStats

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "CacheStats",
    "CompressedCache",
    "CompressionConfig",
    "ConfigError",
    "Handle",
    "KVCompressError",
    "NonFiniteError",
    "Selection",
    "UnsupportedModelError",
    "apply",
    "json_schema",
    "load_config",
    "recipe_names",
    "select_tokens",
]

# What needs transformers is imported on first use, so that selection and recipes load in a light process.
_LAZY = {"apply": "model", "Handle": "model", "CompressedCache": "cache", "CacheStats": "stats"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kvcompress.{_LAZY[name]}"), name)
