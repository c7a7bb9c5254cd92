"""Every supported architecture against its own eager attention, and models that must be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, WINDOW, left_padded, prompt, tiny
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel

import kvcompress
from kvcompress.cache import CompressedCache, compressible_layers
from kvcompress.model import cache_keyword
from kvcompress.errors import UnsupportedModelError

EAGER_ONLY = ("gemma2", "gpt_oss")
LARGE = {"budget": 200, "buffer": 8}
SMALL = {"budget": 24, "buffer": 8}
LENGTHS = (40, 25, 9)
NEW = 24
STEPS = 62


@cache
def model_of(kind: str, attention: str = "eager") -> PreTrainedModel:
    """One model per architecture; every test gives it back as it was."""
    return tiny(kind, attention)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that reading it shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rows() -> list[Tensor]:
    return [prompt(length, seed=index) for index, length in enumerate(LENGTHS)]


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, steps: int = NEW) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False)
    return out[:, ids.shape[1] :]


@cache
def eager_output(kind: str) -> tuple[Tensor, Tensor]:
    """What the model itself generates with eager attention: for one prompt, and for the ragged batch."""
    model = model_of(kind)
    return generate(model, rows()[0]), generate(model, *left_padded(rows()))


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """What a cache layer of transformers holds: keys and values, or the states of linear attention."""
    found = {name: value for name, value in vars(layer).items() if name in ("keys", "values")}
    for name in ("conv_states", "recurrent_states"):
        found |= {f"{name}.{index}": value for index, value in vars(layer).get(name, {}).items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    assert tensors
    return tensors


def full_layers(model: PreTrainedModel) -> list[int]:
    return compressible_layers(model.config)


def run_small(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, CompressedCache]:
    """Generate under a budget that the sequence outgrows; returns the new tokens and the cache."""
    with kvcompress.apply(model, "vase-attnv", **SMALL) as handle:
        tokens = generate(model, ids, mask, STEPS)
        assert handle.cache is not None
        return tokens, handle.cache


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_reference_output_is_worth_comparing(kind: str) -> None:
    alone, batch = eager_output(kind)
    assert alone.shape == (1, NEW)
    assert batch.shape == (len(LENGTHS), NEW)
    for row in (*alone, *batch):
        assert row.unique().numel() >= 6
    model = model_of(kind)
    ids = prompt(2 * WINDOW)
    other = ids.clone()
    other[0, 2] = (ids[0, 2] + 1) % VOCAB
    with torch.no_grad():
        logits, changed = model(ids).logits[0, -1], model(other).logits[0, -1]
    assert (changed - logits).norm() > 0.01 * logits.norm()


@pytest.mark.parametrize(
    ("kind", "attention"),
    [(kind, attention) for kind in ARCHITECTURES for attention in ("eager", "sdpa") if kind not in EAGER_ONLY or attention == "eager"],
)
def test_large_budget_gives_the_tokens_of_eager_attention(kind: str, attention: str) -> None:
    alone, batch = eager_output(kind)
    model = model_of(kind, attention)
    with kvcompress.apply(model, "vase-attnv", **LARGE) as handle:
        assert torch.equal(generate(model, rows()[0]), alone)
        assert handle.stats().tokens_kept == [LENGTHS[0] + NEW - 1]
        assert torch.equal(generate(model, *left_padded(rows())), batch)
        assert handle.stats().tokens_kept == [length + NEW - 1 for length in LENGTHS]
        assert handle.stats().events == [0, 0, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_small_budget(kind: str) -> None:
    model = model_of(kind)
    ids, mask = left_padded(rows())
    tokens, compressed = run_small(model, ids, mask)
    assert tokens.shape == (len(LENGTHS), STEPS)
    stats = compressed.stats()
    assert stats.tokens_seen == [length + STEPS - 1 for length in LENGTHS]
    assert all(24 <= kept <= 32 for kept in stats.tokens_kept)
    assert all(events >= 3 for events in stats.events)
    full = full_layers(model)
    assert sum(len(store.layers) for store in compressed.stores) == len(full)
    for store in compressed.stores:
        assert store.keys.shape[3] == store.values.shape[3] == 32
        assert ((store.positions >= 0).sum(dim=-1) <= 32).all()

    # The other layers hold what transformers' own cache would; before the first compressed one, the very same numbers.
    fed = torch.cat([ids, tokens[:, :-1]], dim=1)
    own = DynamicCache(config=model.config)
    ones = torch.ones(len(LENGTHS), STEPS - 1, dtype=mask.dtype)
    fed_mask = torch.cat([mask, ones], dim=1)
    positions = (fed_mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        model(fed, attention_mask=fed_mask, position_ids=positions, **{cache_keyword(model): own})
    for index, layer in enumerate(own.layers):
        if index in full:
            continue
        mine = compressed.layers[index]
        assert type(mine) is type(layer)
        expected, held = layer_tensors(layer), layer_tensors(mine)
        assert expected.keys() == held.keys()
        for name, value in expected.items():
            assert held[name].shape == value.shape
            if index < full[0]:
                real = fed_mask[:, None, -value.shape[2] :, None] if name in ("keys", "values") else 1
                assert ((held[name] - value) * real).abs().max() <= 1e-4 * (1 + value.abs().max())

    # Row 1 is padded by 15 columns in the batch.
    alone_tokens, alone = run_small(model, rows()[1])
    assert torch.equal(tokens[1], alone_tokens[0])
    for layer in full:
        assert torch.equal(compressed.kept_positions(layer, 1), alone.kept_positions(layer, 0))


