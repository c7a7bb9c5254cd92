"""Memory is bounded by K + B slots and constant, whatever the length; an event writes at most B rows per head."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import feed, generate, tiny

import kvcompress
from kvcompress import event as event_module

BUDGET, BUFFER = 16, 4


def held_bytes(cache) -> int:
    """Bytes of all storages that the cache's tensors own, counted once each."""
    storages = {}
    for store in cache.stores:
        for tensor in store.tensors.values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["vase-attnv", "vase-dkv", "h2o", "r-kv", "streaming-llm"])
@pytest.mark.parametrize("prompt", [1, 12, 50])
def test_bytes_are_constant_over_twenty_times_the_budget(name, prompt):
    model = tiny("llama")
    ids = torch.randint(2, 127, (2, prompt + 20 * BUDGET), generator=torch.Generator().manual_seed(0))
    with kvcompress.apply(model, name, budget=BUDGET, buffer=BUFFER) as handle:
        cache = handle.new_cache()
        sizes, held = [], []
        for step in [slice(0, prompt)] + [slice(i, i + 1) for i in range(prompt, ids.shape[1])]:
            with torch.no_grad():
                feed(model, cache, ids[:, step])
            stats = cache.stats()
            sizes.append(stats.bytes_held)
            held.append(max(stats.tokens_kept))
            assert held_bytes(cache) == stats.bytes_held
        assert len(set(sizes)) == 1
        assert max(held) == BUDGET + BUFFER - 1
        assert cache.stats().bytes_full > 10 * store_bytes(cache, BUDGET + BUFFER)


def store_bytes(cache, slots: int) -> int:
    """Keys and values of so many tokens in all layers and rows."""
    return sum(len(s.layers) * s.geometry.rows * s.geometry.bytes_per_token * slots for s in cache.stores)


def test_bytes_follow_the_formula():
    """2 layers, 3 sequences, 2 KV heads, 20 slots of 16 + 16 float32, a position each, a window of 4 queries."""
    model = tiny("llama")
    with kvcompress.apply(model, "vase-attnv", budget=BUDGET, buffer=BUFFER) as handle:
        model(input_ids=torch.full((3, 5), 7), use_cache=True)
        stats = handle.stats()
    slots, per_slot = BUDGET + BUFFER, 2 * 16 * 4 + 4
    assert stats.bytes_held == 2 * 3 * (2 * slots * per_slot + 4 * BUFFER * 16 * 4)
    assert stats.bytes_full == 2 * 3 * 2 * 5 * 2 * 16 * 4
    assert stats.ratio == stats.bytes_full / stats.bytes_held


def test_deferred_prompt_is_given_back():
    """Under prefill: defer a long prompt is held whole until the first event, and not a step longer (VASE row 18)."""
    model = tiny("llama")
    ids = torch.randint(2, 127, (1, 120))
    with kvcompress.apply(model, "vase-attnv", budget=BUDGET, buffer=BUFFER, prefill="defer") as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            feed(model, cache, ids[:, :98])
            assert cache.stats().tokens_kept == [98]
            for step in range(98, 103):
                feed(model, cache, ids[:, step : step + 1])
                compressed = step + 1 >= 100
                assert cache.rows[0].events == int(compressed)
                assert (cache.layout.capacity == BUDGET + BUFFER) == compressed


def test_full_grows_in_blocks_and_says_so():
    model = tiny("llama")
    with kvcompress.apply(model, "full") as handle:
        cache = handle.new_cache()
        sizes = []
        with torch.no_grad():
            for _ in range(300):
                feed(model, cache, torch.full((1, 1), 5))
                sizes.append(cache.stats().bytes_held)
                assert held_bytes(cache) == sizes[-1] >= cache.stats().bytes_full
    assert sizes == sorted(sizes)
    assert 1 < len(set(sizes)) <= 3


def test_steady_event_writes_at_most_buffer_rows_per_head(monkeypatch):
    """Counted on the tensors themselves: slots whose key changed, other than the new token's."""
    model = tiny("llama")
    ids = torch.randint(2, 127, (2, 200), generator=torch.Generator().manual_seed(1))
    widths: list[int] = []
    original = event_module.replace_slots

    def counting(pool, replacement, rows, taken=True):
        widths.append(replacement.slots.shape[-1])
        original(pool, replacement, rows, taken)

    monkeypatch.setattr(event_module, "replace_slots", counting)
    with kvcompress.apply(model, "vase-attnv", budget=BUDGET, buffer=BUFFER) as handle:
        cache = handle.new_cache()
        changes = []
        with torch.no_grad():
            feed(model, cache, ids[:, :30])
            widths.clear()
            for step in range(30, 200):
                before, events = cache.stores[0].keys.clone(), cache.rows[0].events
                feed(model, cache, ids[:, step : step + 1])
                if cache.rows[0].events > events:
                    changed = (cache.stores[0].keys != before).any(dim=-1).sum(dim=-1)
                    changes.append(int(changed.max()))
    assert len(changes) > 30
    # One more for the token of the step itself, which is written before the event.
    assert 1 < max(changes) <= BUFFER + 1
    assert set(widths) == {BUFFER}


def test_only_one_cache_is_held_over_two_generations():
    model = tiny("llama")
    ids = torch.randint(2, 127, (1, 10))
    with kvcompress.apply(model, "snapkv", budget=BUDGET, buffer=BUFFER) as handle:
        model(input_ids=ids, use_cache=True)
        first = weakref.ref(handle.cache)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
        gc.collect()
        assert first() is None
        assert handle.cache.columns == 12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_stored_as_it_is(dtype):
    """Two bytes a number, and with room for everything the very output of the model's own attention."""
    model = tiny("qwen3").to(dtype)
    ids = torch.randint(2, 127, (2, 30), generator=torch.Generator().manual_seed(2))
    own = generate(model, ids, 20)
    with kvcompress.apply(model, "vase-attnv", budget=64, buffer=BUFFER) as handle:
        assert torch.equal(generate(model, ids, 20), own)
        assert {store.keys.dtype for store in handle.cache.stores} == {dtype}
        assert handle.stats().bytes_full == 2 * 2 * 2 * 49 * 2 * 16 * 2
    with kvcompress.apply(model, "vase-attnv", budget=BUDGET, buffer=BUFFER) as handle:
        generate(model, ids, 20)
        # One for the prompt, one for every 4 of the 19 tokens that were fed back.
        assert handle.stats().events == [5, 5]
