"""The exceptions that users of kvcompress see.

All of them derive from :class:`KVCompressError`, which is a ``ValueError``: each says which field, tensor or
model is at fault, the value that was found, and what is allowed instead.
"""

from __future__ import annotations


class KVCompressError(ValueError):
    """Base class of every error that kvcompress raises on purpose."""


class ConfigError(KVCompressError):
    """A recipe, YAML file, dict or override that does not describe a possible compression."""


class UnsupportedModelError(KVCompressError):
    """A model whose attention or cache kvcompress cannot compress; nothing has been changed or run."""


class CacheError(KVCompressError):
    """A cache operation that cannot be carried out; the cache is as it was before the call."""


class NonFiniteError(KVCompressError):
    """NaN or infinity among the cached keys or values; names layer, head and position."""
