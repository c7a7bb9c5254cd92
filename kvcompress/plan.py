"""What fits into a memory: bytes of weights and of the cache under each recipe, before anything is allocated.

Every count comes from the code that allocates, run on the ``meta`` device: :func:`kvcompress.footprint.cache_bytes` for
compressed layers, transformers' own layers for sliding windows, and the model itself for its parameters. Bytes of a
cache are linear in the batch, so one sequence is counted and multiplied.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvcompress.config import CompressionConfig
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.footprint import cache_bytes
from kvcompress.model import cache_keyword
from kvcompress.own_layers import tensors_of
from kvcompress.report import format_bytes
from kvcompress.shapes import LayerShape, layer_shapes
from kvcompress.support import check_supported

DTYPES = ("float32", "float16", "bfloat16")
# Positions are stored as int32.
MAX_CONTEXT = 2**31 - 1


class Window(NamedTuple):
    """A layer that caches a sliding window or chunk of ``window`` tokens; no recipe touches it."""

    window: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSize:
    """What a model takes, as far as a plan needs to know.

    Attributes:
        name: for messages.
        dtype: of keys and values, and of weights unless a plan says otherwise; one of ``DTYPES``.
        shapes: the layers that recipes compress. windows: those that keep a window of tokens instead.
        state_bytes: bytes per sequence of linear-attention states, which depend on neither recipe nor context.
        parameters: how many, tied ones once; None if unknown.
        max_context: tokens that the model is made for; None if unknown.
        notes: what the numbers leave out, one sentence each.
    """

    name: str
    dtype: str
    shapes: tuple[LayerShape, ...]
    windows: tuple[Window, ...] = ()
    state_bytes: int = 0
    parameters: int | None = None
    max_context: int | None = None
    notes: tuple[str, ...] = ()

    def own_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of the layers that no recipe touches: (of each sequence, of the cache whatever the batch)."""
        each, fixed = self.state_bytes, 0
        for (window, kv_heads, *dims), count in Counter(self.windows).items():
            layer = DynamicSlidingWindowLayer(window)
            shapes = ((1, kv_heads, tokens, dim) for dim in dims)
            layer.update(*(torch.empty(shape, dtype=getattr(torch, self.dtype), device="meta") for shape in shapes))
            held = list(tensors_of(layer))
            each += count * sum(tensor.nbytes for tensor in held if tensor.dim())
            fixed += count * sum(tensor.nbytes for tensor in held if not tensor.dim())
        return each, fixed

    def weight_bytes(self, bits: Fraction | None = None) -> int | None:
        """Bytes of the parameters at ``bits`` each, by default those of ``dtype``; None if their number is unknown."""
        if self.parameters is None:
            return None
        return math.ceil(self.parameters * (bits or 8 * getattr(torch, self.dtype).itemsize) / Fraction(8))


@dataclass(frozen=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        context: tokens per sequence, prompt and answer. batch: sequences.
        memory: bytes of the device, or None to only count. reserve: bytes of it that stay free for activations.
        weight_bits: bits per parameter, scales included, for quantized weights; None for the model's dtype.
    """

    context: int
    batch: int = 1
    memory: int | None = None
    reserve: int = 0
    weight_bits: Fraction | None = None


@dataclass(frozen=True)
class RecipePlan:
    """One recipe; or, without a config, transformers' own cache.

    Attributes:
        config: the recipe, ratio budgets turned into tokens.
        bytes_per_sequence: bytes of the cache that each sequence adds.
        bytes_per_token: the same divided by the context; a recipe that evicts takes its bytes whatever the context.
        cache_bytes: of the whole batch. total_bytes: weights included; None if their number is unknown.
        ratio: how many times smaller than transformers' cache.
        fits: whether the batch does. largest_batch: sequences of this context that fit.
        largest_budget: tokens K that fit at this batch, of a recipe that evicts; None if even the least doesn't.
        keeps_all: a larger budget would fit too, but evict nothing within the context.
        largest_context: tokens that fit at this batch, of a recipe that doesn't evict.
    """

    config: CompressionConfig | None
    bytes_per_sequence: int
    bytes_per_token: float
    cache_bytes: int
    total_bytes: int | None
    ratio: float = 1.0
    fits: bool | None = None
    largest_batch: int | None = None
    largest_budget: int | None = None
    keeps_all: bool = False
    largest_context: int | None = None


@dataclass(frozen=True)
class Plan:
    """The answer: ``reference`` is transformers' own cache, ``available`` the bytes of memory left for the cache."""

    model: ModelSize
    request: PlanRequest
    weight_bytes: int | None
    available: int | None
    reference: RecipePlan
    recipes: tuple[RecipePlan, ...]


def measure(config: PreTrainedConfig, name: str, dtype: str | None = None) -> ModelSize:
    """Sizes of a model of transformers from its config; it is built on the ``meta`` device, without any weights.

    One token goes through it there, since not all configs tell the shapes of all layers.

    Args:
        dtype: one of ``DTYPES``; by default the config's own, or bfloat16 if it names none of these.

    Raises:
        UnsupportedModelError: if kvcompress cannot compress the model.
        KVCompressError: if transformers cannot build it as a causal language model.
    """
    config = copy.deepcopy(config)
    own_dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    dtype = dtype or (own_dtype if own_dtype in DTYPES else "bfloat16")
    notes = []
    if getattr(config, "quantization_config", None) is not None:
        notes.append(f"The checkpoint's weights are quantized; without --weight-bits they count as {dtype}.")
        del config.quantization_config
    model = _build(config, name)
    check_supported(model)
    text_config = config.get_text_config(decoder=True)
    layers = _after_one_token(model, text_config)
    shapes = [
        # Latents aren't cached the way they are stored here; the others are as seen.
        shape
        if shape.latent or not layers[shape.layer].is_initialized
        else replace(shape, **_seen(layers[shape.layer]))
        for shape in layer_shapes(text_config)
    ]
    windows, state_bytes, uncounted = [], 0, []
    for layer in (layers[index] for index in sorted(set(range(len(layers))) - {shape.layer for shape in shapes})):
        if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized:
            windows.append(Window(layer.sliding_window, **_seen(layer)))
        elif type(layer) is LinearAttentionLayer and list(tensors_of(layer)):
            # What has the bfloat16 of the model below is in the model's dtype.
            sizes = {torch.bfloat16: getattr(torch, dtype).itemsize}
            state_bytes += sum(t.numel() * sizes.get(t.dtype, t.itemsize) for t in tensors_of(layer))
        elif type(layer).__name__ != "DummyLayer":  # holds nothing; not in transformers 5.17
            uncounted.append(type(layer).__name__)
    notes += [f"Not counted: the cache of {count} {kind}s." for kind, count in Counter(uncounted).items()]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    limit = getattr(text_config, "max_position_embeddings", None)
    return ModelSize(name, dtype, tuple(shapes), tuple(windows), state_bytes, parameters, limit, tuple(notes))


def _build(config: PreTrainedConfig, name: str) -> Any:
    try:
        with torch.device("meta"):
            # In bfloat16, since the kernels of mixtures of experts refuse float32 there.
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    except Exception as error:  # anything that the code of an architecture raises
        raise KVCompressError(
            f"model: {name} ({config.model_type}) cannot be built as a causal language model: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


def _after_one_token(model: Any, config: PreTrainedConfig) -> list[Any]:
    """The layers of transformers' cache after one token; empty ones if the model cannot run without data."""
    cache = DynamicCache(config=config)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **{cache_keyword(model): cache})
    except Exception:  # such as reading a number off a tensor that has none
        cache = DynamicCache(config=config)
    return list(cache.layers)


def _seen(layer: Any) -> dict[str, Any]:
    return {"kv_heads": layer.keys.shape[1], "key_dim": layer.keys.shape[3], "value_dim": layer.values.shape[3]}


def plan(model: ModelSize, configs: Sequence[CompressionConfig], request: PlanRequest) -> Plan:
    """Count what each recipe takes, and what would fit.

    Raises:
        ConfigError: if a recipe is not possible for this model or context.
        KVCompressError: if the weights and the reserve leave no memory for a cache.
    """
    weights = model.weight_bytes(request.weight_bits)
    available = None
    if request.memory is not None:
        if weights is None:
            raise KVCompressError("--parameters: missing, to take the weights off the memory; 0 leaves them out")
        available = request.memory - request.reserve - weights
        if available <= 0:
            raise KVCompressError(
                f"memory: {format_bytes(request.memory)} leaves nothing for the cache: the weights take "
                f"{format_bytes(weights)} and {format_bytes(request.reserve)} are reserved, so "
                f"{format_bytes(1 - available)} are missing; give more memory, reserve less or quantize the weights"
            )
    reference = _plan_of(None, model, request, weights, available)
    recipes = [_plan_of(config.resolve(request.context), model, request, weights, available) for config in configs]
    compared = tuple(replace(recipe, ratio=reference.cache_bytes / recipe.cache_bytes) for recipe in recipes)
    return Plan(model, request, weights, available, reference, compared)


def _plan_of(
    config: CompressionConfig | None, model: ModelSize, request: PlanRequest, weights: int | None, available: int | None
) -> RecipePlan:
    each, fixed = _bytes_of(config, model, request.context)
    held = fixed + request.batch * each
    result = RecipePlan(config, each, each / request.context, held, None if weights is None else weights + held)
    if available is None:
        return result
    room = available

    def fits(config: CompressionConfig | None, tokens: int) -> bool:
        each, fixed = _bytes_of(config, model, tokens)
        return fixed + request.batch * each <= room

    result = replace(result, fits=held <= room, largest_batch=max(0, room - fixed) // each)
    if config is None or not config.evicts:
        return replace(result, largest_context=_largest(lambda tokens: fits(config, tokens), MAX_CONTEXT))
    assert isinstance(config.budget, int)
    limit = max(request.context, config.budget)

    # A budget too small to be possible counts as one that fits, so that all that fit come before all that don't.
    def budget_fits(budget: int) -> bool:
        smaller = _with_budget(config, budget)
        return smaller is None or fits(smaller, request.context)

    budget = _largest(budget_fits, limit)
    found = budget if _with_budget(config, budget) is not None else None
    return replace(result, largest_budget=found, keeps_all=found == limit)


def _bytes_of(config: CompressionConfig | None, model: ModelSize, tokens: int) -> tuple[int, int]:
    """Bytes of a cache, transformers' own without a config: (of each sequence, of the cache whatever the batch)."""
    own, fixed = model.own_bytes(tokens)
    if config is not None:
        return own + cache_bytes(config, model.shapes, tokens, 1, model.dtype), fixed
    dtype = getattr(torch, model.dtype)
    return own + tokens * sum(shape.geometry(1, dtype).bytes_per_token for shape in model.shapes), fixed


def _with_budget(config: CompressionConfig, budget: int) -> CompressionConfig | None:
    try:
        return config.with_fields({"budget": budget})
    except ConfigError:
        return None


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to ``limit`` that fits, 0 if none does, where every smaller one fits too."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
