"""``kvcompress.apply``: put a model under a compression recipe, and take it out again."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvcompress import attention
from kvcompress.cache import CompressedCache
from kvcompress.config import CompressionConfig, load_config
from kvcompress.errors import CacheError, KVCompressError
from kvcompress.kernels.backend import Backend, check_backend
from kvcompress.shapes import check_codecs
from kvcompress.stats import CacheStats
from kvcompress.support import HANDLE, PREFIX, attention_of, check_supported

_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def apply(
    model: PreTrainedModel,
    config: str | Path | Mapping[str, Any] | CompressionConfig,
    *,
    context_length: int | None = None,
    backend: Backend = "auto",
    overrides: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Handle:
    """Compress the KV cache of a model from now on; user code that calls or generates stays as it is.

    Args:
        model: a decoder-only transformers model.
        config: recipe name, path of a YAML file, dict or :class:`CompressionConfig`.
        context_length: prompt and answer in tokens; needed where the budget is a ratio of it. A recipe that doesn't
            evict makes room for so many tokens at once instead of growing.
        backend: ``auto`` runs Triton kernels on a GPU (and flash-attn for unquantized pools where it is installed) and
            torch elsewhere; ``triton``, ``flash_attn`` and ``torch`` ask for one of them. The statistics name what ran.
        overrides, **fields: recipe fields to replace, as in :func:`kvcompress.load_config`.

    Returns:
        A handle, also a context manager, that reports and removes the compression.

    Raises:
        ConfigError: if the recipe is not possible, its codecs don't fit the head sizes of the model, or the backend
            cannot run where the model is.
        UnsupportedModelError: if the model cannot be compressed; in either case it is left untouched.
    """
    resolved = load_config(config, overrides, **fields)
    if isinstance(resolved.budget, float):
        if context_length is None:
            raise KVCompressError(
                f"budget: {resolved.budget} is a ratio; give context_length (prompt and answer in tokens), or a budget "
                "in tokens"
            )
        resolved = resolved.resolve(context_length)
    check_supported(model)
    check_codecs(resolved, model.config)
    check_backend(backend, model.device)
    return Handle(model, resolved, None if resolved.evicts else context_length, backend)


class Handle:
    """A model under compression.

    Attributes:
        model: the model. config: the recipe, resolved. reserve: tokens that caches make room for at once, or None.
        backend: what operations run by.
        cache: the cache of the latest call, or None. It is kept until the next call, or until :meth:`remove`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: CompressionConfig,
        reserve: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.model = model
        self.config = config
        self.reserve = reserve
        self.backend: Backend = backend
        self.cache: CompressedCache | None = None
        attention.register()
        self._decoder = model.get_decoder()
        self._keyword = cache_keyword(self._decoder)
        self._parameters = list(inspect.signature(self._decoder.forward).parameters)
        text_config = model.config.get_text_config(decoder=True)
        self._configs = _configs_sharing(model, text_config)
        self._original = [c._attn_implementation for c in self._configs]
        for shared in self._configs:
            shared._attn_implementation_internal = PREFIX + attention_of(self._original[0])
        self._hook = self._decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        setattr(model, HANDLE, self)
        self._own_generate = model.__dict__.get("generate")
        if hasattr(model, "generate"):
            model.generate = types.MethodType(_generate_of(type(model)), model)

    def new_cache(self, sequence_ids: list[int] | None = None) -> CompressedCache:
        """An empty cache for this model, to pass by hand to ``model(...)`` or ``model.generate(...)``."""
        return CompressedCache(self.model, self.config, sequence_ids, self.reserve, self.backend)

    def stats(self) -> CacheStats:
        """What the cache of the latest call holds.

        Raises:
            CacheError: if the model has not run yet.
        """
        if self.cache is None:
            raise CacheError("stats: the model has not run under compression yet")
        return self.cache.stats()

    def remove(self) -> None:
        """Restore the model exactly as it was; caches made under compression can no longer be used. Idempotent."""
        if self.model.__dict__.get(HANDLE) is not self:
            return
        for config, original in zip(self._configs, self._original, strict=True):
            config._attn_implementation_internal = original
        self._hook.remove()
        self.model.__dict__.pop("generate", None)
        if self._own_generate is not None:
            self.model.generate = self._own_generate
        del self.model.__dict__[HANDLE]
        self.cache = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @torch.compiler.disable
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the decoder a compressed cache where it would make one of its own, and show the cache the tokens."""
        names = self._parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        cache = given.get(self._keyword)
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = getattr(module.config, "use_cache", True)
        inputs = given.get("input_ids")
        tokens = inputs if inputs is not None else given.get("inputs_embeds")
        if (cache is None and not use_cache) or tokens is None:
            # Without tokens the model has an error message of its own.
            return args, kwargs
        if given.get("output_attentions"):
            raise KVCompressError(
                "output_attentions: evicted tokens have no attention weights; remove() first, or leave it out"
            )
        if cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0):
            cache = self._fresh()
            args = args[: names.index(self._keyword)] if self._keyword in names else args
            kwargs = {
                **{n: v for n, v in given.items() if n in names[len(args) :] or n in kwargs},
                self._keyword: cache,
            }
        elif not isinstance(cache, CompressedCache):
            raise _foreign_cache(cache)
        mask = given.get("attention_mask")
        cache.observe_inputs(inputs, mask if isinstance(mask, Tensor) else None, len(tokens))
        self.cache = cache
        return args, kwargs

    def _fresh(self) -> CompressedCache:
        # Let go of the last cache first, so that two are never held at once.
        self.cache = None
        self.cache = self.new_cache()
        return self.cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``generate``, with a compressed cache; refuses what such a cache cannot do."""
        settings = kwargs.get("generation_config") or self.model.generation_config
        named = [name for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
        inputs = kwargs.get("inputs", args[0] if args else kwargs.get("input_ids"))

        def setting(name: str) -> Any:
            return kwargs[name] if kwargs.get(name) is not None else getattr(settings, name, None)

        if self.config.evicts:
            for name in _ASSISTED:
                if setting(name) is not None:
                    raise KVCompressError(
                        f"{name}: drafted tokens that are rejected cannot be taken back from an evicting cache; "
                        "leave it out, or use a recipe that does not evict"
                    )
        if setting("cache_implementation") not in (None, "dynamic", "hybrid"):
            raise KVCompressError(
                f"cache_implementation: {setting('cache_implementation')!r} asks for another cache; "
                "leave it out under kvcompress, or remove() the compression first"
            )
        if setting("use_cache") is False:
            return self._generate(*args, **kwargs)
        cache = kwargs[named[0]] if named else self._fresh()
        if not isinstance(cache, CompressedCache):
            raise _foreign_cache(cache)
        if not named:
            kwargs[self._keyword] = cache
        ids = inputs if isinstance(inputs, Tensor) and inputs.dim() == 2 else None
        if ids is not None and cache.columns and ids.shape[1] > cache.columns and not cache.matches_history(ids):
            raise CacheError(
                f"input_ids: the first {cache.columns} tokens differ from those this cache has seen; history "
                "cannot be edited in a compressed cache. Call cache.reset(), or pass only new tokens with a full "
                "attention_mask"
            )
        if ids is not None and not cache.columns and setting("prefill_chunk_size"):
            cache.expect_prompt(ids, kwargs.get("attention_mask"))
        return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own_generate
        return type(self.model).generate(self.model, *args, **kwargs) if own is None else own(*args, **kwargs)


def _generate_of(kind: type[PreTrainedModel]) -> Callable[..., Any]:
    """What ``model.generate`` is under compression, as a function of the model, so that a copied model runs its own."""

    @functools.wraps(kind.generate)
    def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return model.__dict__[HANDLE].generate(*args, **kwargs)

    return generate


def cache_keyword(module: nn.Module) -> str:
    """Name of the cache argument of a model: ``cache`` in newer transformers, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _configs_sharing(model: PreTrainedModel, text_config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The decoder's config first, then copies of it that submodules hold as objects of their own."""
    found = [text_config]
    decoder = model.get_decoder()
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and all(config is not other for other in found):
            found.append(config)
    return found


def _foreign_cache(cache: object) -> CacheError:
    kind = type(cache).__name__
    filled = isinstance(cache, Cache) and cache.get_seq_length() > 0
    state = "that already holds tokens" if filled else "of another kind"
    return CacheError(
        f"cache: a {kind} {state} cannot be compressed; leave the argument out, or pass a kvcompress.CompressedCache"
    )
