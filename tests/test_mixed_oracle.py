"""Mixed precision against an oracle: same logits, same tokens kept, each in the same pool, at every call."""

from __future__ import annotations

import copy

import pytest
import torch
from mixed_oracle import Pair, quantize, recipe
from test_oracle import batch, conversation
from tiny import tiny

import kvcompress
from kvcompress import event
from kvcompress.kernels import segment_attention

LADDER = {"stage": "ladder", "bits": [8, 4, 2], "shares": [0.1, 0.2, 0.4, 0.3]}
EVICTING = ["snapkv", "vase-attnv", "vase-dkv", "streaming-llm", "h2o"]


def assert_follows_oracle(model, plain, config, calls: list[list[list[int]]]) -> Pair:
    """Feed left-padded calls and compare every row with an oracle of its own after each."""
    with kvcompress.apply(model, config):
        pair = Pair(model, plain, config, len(calls[0]))
        for chunk in calls:
            pair.feed(chunk)
    return pair


def rungs_in_use(pair: Pair) -> set:
    return {token.kind for held in pair.oracles[0].tokens[0] for token in held.values()}


CODECS = {
    "int8": quantize("int8"),
    "int4": quantize("int4"),
    "int3": quantize("int3"),
    "int2": quantize("int2"),
    "fp8": quantize("fp8"),
    "keys and values apart": {"stage": "quantize", "keys": "int4", "values": "int2"},
    "groups": quantize({"bits": 4, "group": 8}),
    "rotated": quantize({"bits": 2, "rotate": True}),
    "rotated keys, groups of values": {
        "stage": "quantize",
        "keys": {"bits": 3, "rotate": True, "group": 8},
        "values": {"bits": 4, "group": 8},
    },
}


@pytest.mark.parametrize("name", CODECS)
def test_quantization_alone(llama, plain, name):
    pair = assert_follows_oracle(llama, plain, recipe(CODECS[name]), batch(conversation(0, 43, *[1] * 10)))
    assert rungs_in_use(pair) == {"ring", "full", 1}


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("base", [None, "snapkv"])
def test_shares_and_sinks(llama, plain, base, share, sinks):
    budget = 40
    if base and share == 0.3 and sinks == 0:
        share, budget = 0.29, 100  # a decimal that isn't exact in binary: 28.999... tokens
    config = recipe(quantize("int4", share=share, sinks=sinks), base, budget)
    assert_follows_oracle(llama, plain, config, batch(conversation(1, budget + 5, *[1] * 9)))


@pytest.mark.parametrize("by", ["range", "random", "absmax"])
@pytest.mark.parametrize("base", [None, "vase-attnv"])
def test_which_tokens_make_up_the_share(llama, plain, base, by):
    config = recipe(quantize("int2", share=0.3, sinks=2, by=by), base, budget=24, seed=3)
    assert_follows_oracle(llama, plain, config, batch(conversation(2, 22, *[1] * 16)))


@pytest.mark.parametrize("values", ["int2", {"codec": "per_channel", "bits": 2, "tokens": 4}], ids=["token", "channel"])
@pytest.mark.parametrize("prompt", [1, 16, 37])
def test_keys_per_channel(llama, plain, values, prompt):
    """KIVI: a channel of keys shares its scale with eight consecutive tokens."""
    keys = {"codec": "per_channel", "bits": 2, "tokens": 8}
    store = {"stage": "quantize", "keys": keys, "values": values, "share": 0, "sinks": 0}
    calls = batch(conversation(3, prompt, *[1] * 10, 13, 7, *[1] * 3))
    assert_follows_oracle(llama, plain, recipe(store, buffer=8), calls)


@pytest.mark.parametrize("base", EVICTING)
@pytest.mark.parametrize("store", ["quantize", "ladder"])
def test_hybrids(llama, plain, base, store):
    config = recipe(quantize("int4", share=0.1) if store == "quantize" else LADDER, base)
    pair = assert_follows_oracle(llama, plain, config, batch(conversation(4, 50, *[1] * 13)))
    assert pair.cache.rows[0].events == 4
    assert rungs_in_use(pair) >= ({"ring", "full", 1} if store == "quantize" else {"ring", 1, 2, 3})


@pytest.mark.parametrize(
    "stage", [{"stage": "value_range", "share": 0.5}, {"stage": "value_norm", "statistic": "absmax"}]
)
def test_selection_by_remembered_statistics(llama, plain, stage):
    """Rotated codes of two bits have other ranges than the values had, by which eviction goes on judging them."""
    scores = ["recency"] if "share" in stage else [stage]
    stages = [stage] * ("share" in stage) + [*scores, "top_k", quantize({"bits": 2, "rotate": True}, share=0.1)]
    config = kvcompress.load_config({"budget": 24, "buffer": 4, "stages": stages})
    assert_follows_oracle(llama, plain, config, batch(conversation(6, 40, *[1] * 13)))


LADDERS = {
    "range": {},
    "error": {"by": "error"},
    "no full precision": {"shares": [0.0, 0.0, 0.5, 0.5]},
    "one rung": {"bits": [4], "shares": [0.25, 0.75]},
    "mean bits": {"shares": None, "mean_bits": 7.5},
    "coarse rotated keys": {"key_bits": 2, "rotate": True, "group": 8},
}


@pytest.mark.parametrize(
    ("base", "name"), [(None, name) for name in LADDERS] + [("snapkv", "error"), ("vase-dkv", "coarse rotated keys")]
)
def test_ladders(llama, plain, base, name):
    store = {**LADDER, **LADDERS[name]}
    if base is None and name == "error":
        config = kvcompress.load_config({"stages": ["attention", store], "buffer": 4})
    else:
        config = recipe(store, base, budget=28)
    assert_follows_oracle(llama, plain, config, batch(conversation(5, 27, *[1] * 10)))


@pytest.mark.parametrize(
    ("base", "prompt"), [(None, n) for n in (1, 7, 8, 9, 60)] + [("vase-attnv", n) for n in (1, 8, 20, 23, 24, 25, 60)]
)
def test_prompt_lengths_around_ring_and_budget(llama, plain, base, prompt):
    config = recipe(quantize("int4", share=0.1, sinks=1), base)
    assert_follows_oracle(llama, plain, config, batch(conversation(prompt, prompt, *[1] * 7)))


@pytest.mark.parametrize("chunks", [[7] * 11, [40, 13, 1, 1, 30, 2, 2, 2], [1] * 9 + [40, 3, 1]], ids=str)
@pytest.mark.parametrize("name", ["ladder", "vase-dkv+quantize", "h2o+ladder"])
def test_chunks_and_turns(llama, plain, name, chunks):
    """Chunked prefill, later turns, several tokens per step: each call sees all that is stored plus itself."""
    base, _, store = name.rpartition("+")
    config = recipe(quantize("int4", share=0.1) if store == "quantize" else LADDER, base or None)
    assert_follows_oracle(llama, plain, config, batch(conversation(6, *chunks)))


@pytest.mark.parametrize("name", ["quantize", "ladder", "vase-attnv+ladder", "h2o+quantize"])
def test_ragged_batch(llama, plain, name):
    """Rows of 3, 18, 18 and 50 tokens, left-padded: rings fill at different steps, in two rows at the same ones."""
    base, _, store = name.rpartition("+")
    config = recipe(quantize("int4", share=0.1) if store == "quantize" else LADDER, base or None)
    rows = [conversation(seed, length, *[1] * 9) for seed, length in enumerate((3, 18, 18, 50))]
    assert_follows_oracle(llama, plain, config, batch(*rows))


@pytest.mark.parametrize("base", [None, "vase-attnv"])
def test_ragged_second_turn(llama, plain, base):
    """A second turn of unequal messages in one batch, and a third in which one row says nothing."""
    rows = [
        conversation(0, 5, *[1] * 6, 4, *[1] * 5, 0, *[1] * 4),
        conversation(1, 33, *[1] * 6, 19, *[1] * 5, 9, *[1] * 4),
    ]
    assert_follows_oracle(llama, plain, recipe(LADDER, base), batch(*rows))


@pytest.mark.parametrize(("budget", "buffer"), [(9, 8), (12, 1), (21, 4), (16, 10), (23, 12)])
def test_budgets_that_are_no_multiple_of_the_buffer(llama, plain, budget, buffer):
    stages = ["recency", "top_k", {**LADDER, "shares": [0.25] * 4}]
    config = kvcompress.load_config({"budget": budget, "buffer": buffer, "stages": stages})
    assert_follows_oracle(llama, plain, config, batch(conversation(0, 40, *[1] * 14)))


def test_equal_ranks_favour_the_recent(llama, plain):
    """Nothing protects the sinks from eviction here, and once they are gone their slots go to tokens of equal rank."""
    stages = ["recency", "top_k", quantize("int4", share=0, sinks=3)]
    config = kvcompress.load_config({"budget": 20, "buffer": 4, "stages": stages})
    pair = assert_follows_oracle(llama, plain, config, batch(conversation(3, 22, *[1] * 20)))
    full = {p for p, token in pair.oracles[0].tokens[0][0].items() if token.kind == "full"}
    assert len(full) == 3
    assert min(full) > 2


@pytest.mark.parametrize("name", ["quantize", "ladder", "vase-attnv+ladder"])
def test_storage_in_half_precision(llama, plain, name):
    """The model computes in float32; slots, scales and remembered statistics are float16."""
    base, _, store = name.rpartition("+")
    config = recipe(quantize("int4", share=0.1) if store == "quantize" else LADDER, base or None, storage="float16")
    rows = [conversation(seed, 30, *[1] * 9, 9, *[1] * 5) for seed in (7, 8)]
    pair = assert_follows_oracle(llama, plain, config, batch(*rows))
    assert {t.dtype for t in pair.cache.stores[0].tensors.values()} == {torch.float16, torch.int32, torch.uint8}


@pytest.mark.parametrize("base", ["vase-attnv", "h2o"])
def test_work_in_slices(monkeypatch, llama, plain, base):
    """Events of one layer at a time, attention over five tokens at a time and one query: the same."""
    monkeypatch.setattr(event, "_ELEMENTS", 1)
    monkeypatch.setattr(segment_attention, "BLOCK", 5)
    monkeypatch.setattr(segment_attention, "_SLICE_ELEMENTS", 1)
    rows = [conversation(seed, 20, *[1] * 9, 7, 1, 1) for seed in (1, 2)]
    assert_follows_oracle(llama, plain, recipe(LADDER, base), batch(*rows))


@pytest.mark.parametrize("base", [None, "vase-attnv"])
def test_a_model_with_one_query_head_per_kv_head(base):
    model = tiny("qwen3", num_key_value_heads=4)
    config = recipe(LADDER, base)
    assert_follows_oracle(model, copy.deepcopy(model), config, batch(conversation(9, 44, *[1] * 10)))
