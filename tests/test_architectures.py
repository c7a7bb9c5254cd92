"""Every supported architecture against its own eager attention, with room for everything and with a small budget."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from oracle import Oracle
from replay import Recorder, replay
from tiny import ARCHITECTURES, VOCAB, WINDOW, distinct, feed, generate, left_padded, prompt, tiny
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

import kvcompress
from kvcompress.support import compressible_layers

EAGER_ONLY = ("gemma2", "gpt_oss", "mimo_v2_flash")
LARGE = {"budget": 200, "buffer": 8}
SMALL = {"budget": 24, "buffer": 8}
LENGTHS = (40, 25, 9)
NEW = 24
STEPS = 62
TURN = 5


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


@cache
def eager_output(kind: str) -> tuple[Tensor, Tensor]:
    """What the model itself generates with eager attention: for one prompt, and for the ragged batch."""
    model = model_of(kind)
    ids, mask = left_padded(rows())
    return generate(model, rows()[0], NEW), generate(model, ids, NEW, mask)


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


class SmallRun:
    """A conversation that outgrows its budget: prompts, 62 generated tokens, then a turn of 5 more.

    Attributes:
        tokens: (rows, steps) generated ones. fed: everything the model read, with padding. mask: its padding.
        cache: at the end. record: of all calls.
    """

    def __init__(self, model: PreTrainedModel, prompts: list[Tensor], steps: int = STEPS) -> None:
        ids, mask = left_padded(prompts)
        turn = prompt(TURN, seed=8).expand(len(prompts), TURN)
        with kvcompress.apply(model, "vase-attnv", **SMALL) as handle:
            self.cache = handle.new_cache()
            self.record = Recorder(model, self.cache)
            self.tokens = generate(model, ids, steps, mask, self.cache)
            self.fed = torch.cat([ids, self.tokens[:, :-1], turn], dim=1)
            self.mask = torch.cat([mask, mask.new_ones(len(prompts), steps - 1 + TURN)], dim=1)
            feed(model, self.cache, turn, self.mask)
            self.record.close()


@cache
def small_run(kind: str) -> SmallRun:
    return SmallRun(model_of(kind), rows())


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
    [
        (kind, attention)
        for kind in ARCHITECTURES
        for attention in ("eager", "sdpa")
        if kind not in EAGER_ONLY or attention == "eager"
    ],
)
def test_large_budget_gives_the_tokens_of_eager_attention(kind: str, attention: str) -> None:
    alone, batch = eager_output(kind)
    ids, mask = left_padded(rows())
    model = model_of(kind, attention)
    with kvcompress.apply(model, "vase-attnv", **LARGE) as handle:
        assert torch.equal(generate(model, rows()[0], NEW), alone)
        assert handle.stats().tokens_kept == [LENGTHS[0] + NEW - 1]
        assert torch.equal(generate(model, ids, NEW, mask), batch)
        assert handle.stats().tokens_kept == [length + NEW - 1 for length in LENGTHS]
        assert handle.stats().events == [0, 0, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_small_budget_bounds_full_layers(kind: str) -> None:
    run = small_run(kind)
    assert run.tokens.shape == (len(LENGTHS), STEPS)
    stats = run.cache.stats()
    assert stats.tokens_seen == [length + STEPS - 1 + TURN for length in LENGTHS]
    assert all(24 <= kept < 32 for kept in stats.tokens_kept)
    assert all(events >= 3 for events in stats.events)
    assert sum(len(store.layers) for store in run.cache.stores) == len(full_layers(model_of(kind)))
    for store in run.cache.stores:
        assert store.keys.shape[3] == store.values.shape[3] == 32
        assert (store.positions >= 0).sum(dim=-1).amax(dim=(0, 2)).tolist() == stats.tokens_kept


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_small_budget_attends_to_what_was_kept(kind: str) -> None:
    """Rows of unequal length are what the uncompressed model computes when it may not look at what was evicted."""
    run = small_run(kind)
    for row in (0, 1):
        sequence = run.fed[row : row + 1, max(LENGTHS) - LENGTHS[row] :]
        expected = replay(model_of(kind), sequence, [LENGTHS[row]] + [1] * (STEPS - 1) + [TURN], run.record, row)
        first, *others = run.record.logits
        logits = torch.cat([first[row, -1:], *(call[row] for call in others)])
        torch.testing.assert_close(logits, expected[LENGTHS[row] - 1 :], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_small_budget_row_of_a_ragged_batch_equals_the_sequence_alone(kind: str) -> None:
    """Row 1, which 15 columns of padding precede in the batch, over its first three compressions."""
    run, alone = small_run(kind), SmallRun(model_of(kind), rows()[1:2], steps=30)
    assert torch.equal(run.tokens[1, :30], alone.tokens[0])
    for batched, single in zip(run.record.kept[:30], alone.record.kept[:30], strict=True):
        for layer in full_layers(model_of(kind)):
            assert torch.equal(batched[layer, 1], single[layer, 0])


HYBRID = (
    "gemma2",
    "gemma3_text",
    "olmo3",
    "cohere2",
    "llama4_text",
    "exaone4",
    "gpt_oss",
    "mimo_v2_flash",
    "qwen3_next",
)


@pytest.mark.parametrize("kind", HYBRID)
def test_small_budget_leaves_other_layers_alone(kind: str) -> None:
    """They hold what transformers' own cache would; before the first compressed layer, the very same numbers."""
    run, model = small_run(kind), model_of(kind)
    full = full_layers(model)
    own = DynamicCache(config=model.config)
    feed(model, own, run.fed, run.mask)
    others = [index for index in range(len(own.layers)) if index not in full]
    assert others
    for index in others:
        mine, layer = run.cache.layers[index], own.layers[index]
        assert type(mine) is type(layer)
        held, expected = layer_tensors(mine), layer_tensors(layer)
        assert held.keys() == expected.keys()
        for name, value in expected.items():
            assert held[name].shape == value.shape
            if index < full[0]:
                assert (held[name] - value).abs().max() <= 1e-4 * (1 + value.abs().max())


def test_layers_that_scale_logits_differently() -> None:
    """An event scores all layers of a store at once, and here each has a scaling of its own."""
    model = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    config = kvcompress.load_config("vase-attnv", **SMALL)
    oracle = Oracle(copy.deepcopy(model), config, sequence_id=0)
    ids = distinct(80)
    with kvcompress.apply(model, config) as handle:
        compressed = handle.new_cache([0])
        for part in (slice(0, 20), *(slice(index, index + 1) for index in range(20, 80))):
            logits = feed(model, compressed, ids[:, part])[0]
            torch.testing.assert_close(logits, oracle(ids[0, part].tolist()), rtol=2e-3, atol=2e-3)
        assert compressed.stats().events == [7]
