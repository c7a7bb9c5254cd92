"""The invariants of the design that need a model, as properties (the others are in test_selection.py)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import feed, tiny

import kvcompress
from kvcompress.model import cache_keyword

# Those with a store stage have test_mixed_invariants.py.
CONFIGS = {name: kvcompress.load_config(name) for name in kvcompress.recipe_names() if name != "random-prompt"}
EVICTING = [name for name, config in CONFIGS.items() if config.evicts and not config.quantizes]
model_of = cache(tiny)


def distinct(seed: int, count: int) -> list[int]:
    """Token ids without repeats, whose equal values in the first layer would make selection a matter of rounding."""
    return (torch.randperm(126, generator=torch.Generator().manual_seed(seed)) + 1)[:count].tolist()


def kept(cache) -> list[list[list[list[int]]]]:
    return [[cache.kept_positions(layer, row).tolist() for layer in cache.compressed] for row in range(len(cache.rows))]


@settings(max_examples=30)
@given(
    name=st.sampled_from(EVICTING),
    buffer=st.integers(1, 6),
    extra=st.integers(13, 20),
    chunks=st.lists(st.integers(1, 9), min_size=8, max_size=20),
    prompt=st.integers(1, 60),
)
def test_length_sinks_and_recent_tokens(name, buffer, extra, chunks, prompt):
    """(b) sinks and the B most recent tokens are always there; (c) the length stays in [K, K + B] once K is passed."""
    model = model_of("llama")
    budget = buffer + extra
    config = kvcompress.load_config(name, budget=budget, buffer=buffer)
    has_sinks = any(stage.stage == "sinks" for stage in config.stages)
    with kvcompress.apply(model, config) as handle:
        cache = handle.new_cache()
        seen = 0
        for count in [prompt, *chunks, 1, 1, 1]:
            feed(model, cache, torch.full((1, count), 9) + torch.arange(seen, seen + count) % 100)
            seen += count
            held = cache.rows[0].held
            assert held == seen if seen < budget else budget <= held < budget + buffer
            for positions in kept(cache)[0][0]:
                assert len(set(positions)) == len(positions) == held
                assert set(range(max(0, seen - buffer), seen)) <= set(positions)
                if has_sinks:
                    assert set(range(min(4, seen))) <= set(positions)


@settings(max_examples=20)
@given(name=st.sampled_from(EVICTING), prompt=st.integers(1, 40), steps=st.integers(1, 20), slack=st.integers(0, 30))
def test_budget_above_the_length_changes_nothing(name, prompt, steps, slack):
    """(d) With K at least the length, logits are bitwise those of the full cache on the same attention path."""
    model = model_of("qwen3")
    ids = torch.tensor([distinct(prompt, prompt + steps)])
    outputs = []
    for recipe, fields in (("full", {}), (name, {"budget": max(24, prompt + steps) + slack, "buffer": 4})):
        with kvcompress.apply(model, recipe, **fields) as handle:
            cache = handle.new_cache()
            logits = [feed(model, cache, ids[:, :prompt])]
            logits += [feed(model, cache, ids[:, i : i + 1]) for i in range(prompt, prompt + steps)]
            outputs.append(torch.cat(logits, dim=1))
    assert torch.equal(*outputs)


@settings(max_examples=15)
@given(name=st.sampled_from(EVICTING), order=st.permutations(range(4)), size=st.integers(1, 4))
def test_same_seed_same_tokens_whatever_the_batch(name, order, size):
    """(h, i) Each sequence keeps what it keeps alone, in any batch, in any order, whatever its neighbours hold."""
    model = model_of("llama")
    lengths, new = [5, 30, 41, 60], 25
    sequences = [distinct(seed, length + new) for seed, length in enumerate(lengths)]

    def run(rows: list[int]) -> dict[int, list]:
        width = max(lengths[row] for row in rows)
        ids = torch.tensor([[0] * (width - lengths[row]) + sequences[row] for row in rows])
        mask = torch.tensor([[0] * (width - lengths[row]) + [1] * len(sequences[row]) for row in rows])
        with kvcompress.apply(model, name, budget=24, buffer=6) as handle:
            cache = handle.new_cache()
            for start, stop in [(0, width)] + [(i, i + 1) for i in range(width, width + new)]:
                feed(model, cache, ids[:, start:stop], mask[:, :stop])
            return dict(zip(rows, kept(cache), strict=True))

    together = run(list(order[:size]))
    for row in order[:size]:
        assert run([row])[row] == together[row]


def test_samples_of_one_prompt_draw_different_numbers_and_equal_runs_equal_ones():
    model = model_of("llama")
    ids = torch.tensor([distinct(3, 60)] * 2)
    runs = []
    for _ in range(2):
        with kvcompress.apply(model, "vase-attnv", budget=24, buffer=6) as handle:
            cache = handle.new_cache()
            feed(model, cache, ids)
            runs.append(kept(cache))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_sequence_ids_override_the_hash_of_the_prompt():
    model = model_of("llama")
    ids = torch.tensor([distinct(3, 60)] * 2)
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=6) as handle:
        cache = handle.new_cache(sequence_ids=[8, 8])
        feed(model, cache, ids)
        assert kept(cache)[0] == kept(cache)[1]
        with pytest.raises(kvcompress.CacheError, match="sequence_ids: 1 given for a batch of 2"):
            feed(model, handle.new_cache(sequence_ids=[8]), ids)


def test_embeddings_are_keyed_by_the_row():
    model = model_of("llama")
    embeds = model.get_input_embeddings()(torch.tensor([distinct(3, 60)] * 2))
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=6) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(inputs_embeds=embeds, use_cache=True, **{cache_keyword(model): cache})
        assert cache.identities.keys == [0, 1]
        assert kept(cache)[0] != kept(cache)[1]
