"""The compressed model against the oracle: same logits, same tokens kept, at every call."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import CLOSE, Oracle
from tiny import feed, tiny

import kvcompress

# Those with a store stage have test_mixed_oracle.py.
CONFIGS = {name: kvcompress.load_config(name) for name in kvcompress.recipe_names()}
EVICTING = [name for name, config in CONFIGS.items() if config.evicts and not config.quantizes]


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def recipe(name: str, budget: int = 24, buffer: int = 8, **fields):
    if name == "random-prompt":
        budget += 40
    return kvcompress.load_config(name, budget=budget, buffer=buffer, **fields)


def conversation(seed: int, *lengths: int) -> list[list[int]]:
    """Token ids, cut into calls. No id occurs twice: equal tokens have equal values in the first layer, and which of
    them survives a cut between them is then up to the rounding of the matrix products, which differs with the batch.
    """
    ids = (torch.randperm(126, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    assert sum(lengths) <= len(ids)
    calls = []
    for length in lengths:
        calls.append(ids[:length])
        ids = ids[length:]
    return calls


def batch(*rows: list[list[int]]) -> list[list[list[int]]]:
    """Calls of several rows, from one conversation per row."""
    return [list(call) for call in zip(*rows, strict=True)]


def assert_follows_oracle(model, config, calls: list[list[list[int]]]) -> int:
    """Feed left-padded calls and compare every row with an oracle of its own after each.

    Args:
        calls: per call, one list of tokens per row.

    Returns:
        The number of events of the first row.
    """
    rows = len(calls[0])
    plain = copy.deepcopy(model)
    oracles = [Oracle(plain, config, sequence_id=row) for row in range(rows)]
    mask = torch.zeros(rows, 0, dtype=torch.long)
    with kvcompress.apply(model, config) as handle:
        cache = handle.new_cache(sequence_ids=list(range(rows)))
        for chunk in calls:
            width = max(map(len, chunk))
            padding = [width - len(row) for row in chunk]
            ids = torch.tensor([[0] * pad + row for pad, row in zip(padding, chunk, strict=True)])
            real = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(padding, chunk, strict=True)])
            mask = torch.cat([mask, real], dim=1)
            with torch.no_grad():
                logits = feed(model, cache, ids, mask)
            for row, oracle in enumerate(oracles):
                if not chunk[row]:
                    continue
                torch.testing.assert_close(logits[row, padding[row] :], oracle(chunk[row]), **CLOSE)
                for layer in cache.compressed:
                    kept = cache.kept_positions(layer, row).tolist()
                    alive = [sorted(positions) for positions in oracle.alive[layer]]
                    if model.config.model_type == "deepseek_v3":
                        # One latent serves all heads: the recipe must keep the same tokens in each.
                        assert all(head == alive[0] for head in alive)
                        alive = alive[:1]
                    assert kept == alive, f"layer {layer}, row {row}"
        return cache.rows[0].events


@pytest.mark.parametrize("prefill", ["compress", "defer"])
@pytest.mark.parametrize("name", EVICTING)
def test_every_recipe(model, name, prefill):
    config = recipe(name, prefill=prefill)
    assert assert_follows_oracle(model, config, batch(conversation(0, 40, *[1] * 50))) >= 3


@pytest.mark.parametrize("prefill", ["compress", "defer"])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 23, 24, 25, 31, 32, 33, 39, 40, 41, 48])
def test_prompt_lengths_around_window_and_budget(model, prompt, prefill):
    config = recipe("vase-attnv", prefill=prefill)
    assert_follows_oracle(model, config, batch(conversation(prompt, prompt, *[1] * 45)))


@pytest.mark.parametrize("prefill", ["compress", "defer"])
@pytest.mark.parametrize(
    "chunks",
    [[16, 16, 8, 1, 1, 1], [40, 13, 1, 1, 30, 1, 1], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5], [2] * 30, [1] * 20 + [40, 3, 1]],
    ids=str,
)
def test_chunks_and_turns(model, chunks, prefill):
    """Chunked prefill, later turns, several tokens per step: each call sees all that is stored plus itself."""
    assert_follows_oracle(model, recipe("vase-attnv", prefill=prefill), batch(conversation(1, *chunks)))


@pytest.mark.parametrize("prefill", ["compress", "defer"])
@pytest.mark.parametrize("name", ["vase-attnv", "vase-dkv", "snapkv", "streaming-llm", "r-kv", "tova", "h2o"])
def test_ragged_batch(model, name, prefill):
    """Rows of 3, 17, 40 and 70 tokens, left-padded: each gives what it gives alone, whatever the others do."""
    rows = [conversation(length, length, *[1] * 40) for length in (3, 17, 40, 70)]
    assert_follows_oracle(model, recipe(name, prefill=prefill), batch(*rows))


def test_ragged_second_turn(model):
    """A second turn of unequal messages in one batch, and a third in which one row says nothing."""
    rows = [
        conversation(0, 5, *[1] * 10, 4, *[1] * 10, 0, *[1] * 10),
        conversation(1, 33, *[1] * 10, 19, *[1] * 10, 9, *[1] * 10),
    ]
    assert_follows_oracle(model, recipe("vase-attnv"), batch(*rows))


@pytest.mark.parametrize(("budget", "buffer"), [(9, 8), (24, 1), (25, 8), (40, 24), (30, 16)])
def test_budgets_that_are_no_multiple_of_the_buffer(model, budget, buffer):
    config = recipe("snapkv", budget=budget, buffer=buffer, stages=["recency", "top_k"])
    assert_follows_oracle(model, config, batch(conversation(0, 60, *[1] * 60)))


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3", "vase-attnv"), ("gpt2", "vase-attnv"), ("deepseek_v3", "streaming-llm")]
)
def test_other_architectures(kind, name):
    """QK-norm; learned positions and groups of one; latents in place of keys and values."""
    rows = [conversation(length, length, *[1] * 40) for length in (6, 44)]
    assert_follows_oracle(tiny(kind), recipe(name), batch(*rows))
