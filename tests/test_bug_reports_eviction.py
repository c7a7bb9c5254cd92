"""Failures that users of other libraries reported, tried on ours: whether eviction does what it says.

Each test is named after the trial's number in the collection of reports.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import accelerate
import pytest
import torch
from oracle import CLOSE, Oracle
from replay import Recorder, replay
from tiny import WINDOW, distinct, feed, generate, left_padded, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvcompress
from kvcompress import ConfigError, KVCompressError, UnsupportedModelError
from kvcompress.cache import CompressedCache

E24 = kvcompress.load_config("vase-attnv", budget=24, buffer=8)


@pytest.mark.parametrize("recipe", ["vase-attnv", "h2o", "streaming-llm"])
def test_20_the_call_that_triggers_a_compression_attends_to_everything(
    llama: PreTrainedModel, plain: PreTrainedModel, recipe: str
) -> None:
    ids = prompt(42)
    with torch.no_grad():
        full = plain(ids).logits
    with kvcompress.apply(llama, recipe, budget=12, buffer=4) as handle:
        cache = handle.new_cache()
        assert torch.equal(feed(llama, cache, ids[:, :40]), plain(ids[:, :40]).logits)
        assert cache.stats().tokens_kept == [12]
        step = feed(llama, cache, ids[:, 40:41])
        assert not torch.allclose(step, full[:, 40:41], atol=0.01)


def test_20_chunks_see_what_earlier_chunks_left(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    ids = distinct(40)
    config = E24.with_fields({"budget": 12, "buffer": 4})
    oracle = Oracle(plain, config, sequence_id=0)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([0])
        for start, stop in ((0, 16), (16, 32), (32, 40)):
            logits = feed(llama, cache, ids[:, start:stop])
            torch.testing.assert_close(logits[0], oracle(ids[0, start:stop].tolist()), **CLOSE)
        assert cache.stats().events == [3]


@pytest.mark.parametrize("prefill", ["compress", "defer"])
def test_21_chunked_generate_equals_calls_by_hand(llama: PreTrainedModel, prefill: str) -> None:
    """generate(prefill_chunk_size=...) is the same as several real calls; deferred, it is the same as one."""
    ids = prompt(40)
    config = E24.with_fields({"prefill": prefill})
    with kvcompress.apply(llama, config) as handle:
        chunked = generate(llama, ids, 20, prefill_chunk_size=12)
        assert handle.stats().events == [3 if prefill == "compress" else 2]
        cache = handle.new_cache()
        # The numbers of a sequence are keyed by its whole prompt, whatever the chunks.
        cache.expect_prompt(ids, None)
        for start in (0, 12, 24):
            feed(llama, cache, ids[:, start : start + 12])
        by_hand = generate(llama, ids, 20, cache=cache)
        one_call = generate(llama, ids, 20)
    assert torch.equal(chunked, by_hand)
    assert torch.equal(chunked, one_call) == (prefill == "defer")


def test_22_new_keys_are_rotated_by_their_true_position(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    """After tokens from the middle have gone, position and number of slots differ; keys must follow the position."""
    ids = distinct(60)
    seen: list[Tensor] = []
    hook = llama.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with kvcompress.apply(llama, E24.with_fields({"budget": 20})) as handle:
        answer = generate(llama, ids[:, :40], 15)
        hook.remove()
        cache = handle.cache
        assert cache is not None
        assert torch.cat(seen, dim=1).tolist() == [list(range(54))]
        own = DynamicCache(config=plain.config)
        feed(plain, own, torch.cat([ids[:, :40], answer[:, :-1]], dim=1))
        store = cache.stores[0]
        # Keys of the first layer depend on token and position only, so that the uncompressed model has the same.
        for head in range(2):
            used = store.positions[0, 0, head] >= 0
            positions = store.positions[0, 0, head][used].long()
            assert positions.sort().values.tolist() == cache.kept_positions(0)[head].tolist()
            assert positions.numel() < 54
            torch.testing.assert_close(store.keys[0, 0, head][used], own.layers[0].keys[0, head, positions])
            torch.testing.assert_close(store.values[0, 0, head][used], own.layers[0].values[0, head, positions])


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize(("budget", "buffer"), [(2, 1), (3, 1), (3, 2)])
def test_24_tiny_prompts_and_budgets(
    llama: PreTrainedModel, plain: PreTrainedModel, length: int, budget: int, buffer: int
) -> None:
    config = kvcompress.load_config(
        {"name": "tiny", "budget": budget, "buffer": buffer, "stages": ["attention", "sample"]}
    )
    ids = distinct(length + 9)
    oracle = Oracle(plain, config, sequence_id=0)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([0])
        logits = feed(llama, cache, ids[:, :length])
        torch.testing.assert_close(logits[0], oracle(ids[0, :length].tolist()), **CLOSE)
        for token in ids[0, length:].tolist():
            logits = feed(llama, cache, torch.tensor([[token]]))
            torch.testing.assert_close(logits[0], oracle([token]), **CLOSE)
            assert budget <= cache.stats().tokens_kept[0] + max(0, budget - cache.stats().tokens_seen[0])
            assert cache.stats().tokens_kept[0] < budget + buffer


def test_24_budget_without_room_is_refused_with_the_numbers(llama: PreTrainedModel) -> None:
    for budget, message in (
        (1, "at least 2"),
        (8, "buffer: 8 must be smaller than budget 8"),
        (11, "leaves 3 slots.*4"),
    ):
        with pytest.raises(ConfigError, match=message):
            kvcompress.apply(llama, "vase-attnv", budget=budget, buffer=8)
    # A ratio that floors to less than the buffer needs, and one that fits: 0.9 of 12 is 10.
    with pytest.raises(ConfigError, match=r"0\.1 of a context of 20 tokens is 2 tokens"):
        kvcompress.apply(llama, "snapkv", budget=0.1, buffer=3, context_length=20)
    with kvcompress.apply(llama, "snapkv", budget=0.9, buffer=3, context_length=12) as handle:
        assert handle.config.budget == 10
        generate(llama, prompt(2), 20)
        assert handle.stats().tokens_kept == [10 + (21 - 13) % 3]
    with pytest.raises(KVCompressError, match=r"ratio.*context_length"):
        kvcompress.apply(llama, "snapkv", budget=0.9)


@pytest.mark.parametrize("recipe", ["snapkv", "vase-attnv", "tova", "r-kv"])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_26_prompt_around_the_query_window_is_left_alone(llama: PreTrainedModel, recipe: str, length: int) -> None:
    ids = prompt(length)
    own = generate(llama, ids, 14)
    with kvcompress.apply(llama, recipe, budget=24, buffer=8) as handle:
        assert torch.equal(generate(llama, ids, 14), own)
        assert handle.stats().tokens_kept == [length + 13]
        assert handle.stats().events == [0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (32, 8), (4, 4), (4, 1)])
@pytest.mark.parametrize(("recipe", "window", "mass"), [("vase-attnv", 8, 0), ("h2o", 0, 1), ("vase-dkv", 0, 0)])
def test_27_bytes_are_those_of_kv_heads(heads: int, kv_heads: int, recipe: str, window: int, mass: int) -> None:
    """Keys and values are held once per KV head, never once per query head."""
    model = tiny("llama", num_attention_heads=heads, num_key_value_heads=kv_heads)
    layers, rows, slots, dim, size = 2, 3, 24 + 8, 16, 4
    with kvcompress.apply(model, recipe, budget=24, buffer=8) as handle:
        generate(model, prompt(40, rows=rows), 20)
        per_slot = 2 * dim * size + 4 + 4 * mass
        expected = layers * rows * (kv_heads * slots * per_slot + heads * window * dim * size)
        assert handle.stats().bytes_held == expected
        assert handle.stats().bytes_full == layers * rows * kv_heads * 59 * 2 * dim * size


def test_27_linear_and_sliding_layers_are_counted() -> None:
    for kind in ("qwen3_next", "gemma3_text"):
        model = tiny(kind)
        with kvcompress.apply(model, E24) as handle:
            cache = handle.new_cache()
            feed(model, cache, prompt(40))
            other = vars(cache.layers[0])
            states = [other.get("keys"), other.get("values")]
            for name in ("conv_states", "recurrent_states"):
                states += list(other.get(name, {}).values())
            states += [other["_sliding_window_tensor"]] if kind == "gemma3_text" else []
            left_alone = sum(state.nbytes for state in states if state is not None)
            assert left_alone >= 1000
            assert cache.stats().bytes_held == left_alone + sum(store.nbytes for store in cache.stores)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3), (40, 8), (32, 2)])
@pytest.mark.parametrize("recipe", ["vase-attnv", "h2o"])
def test_28_numbers_of_heads(heads: int, kv_heads: int, recipe: str) -> None:
    model = tiny("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=1)
    config = kvcompress.load_config(recipe, budget=12, buffer=4)
    ids = distinct(42)
    oracle = Oracle(copy.deepcopy(model), config, sequence_id=0)
    with kvcompress.apply(model, config) as handle:
        cache = handle.new_cache([0])
        feed(model, cache, ids[:, :30])
        oracle(ids[0, :30].tolist())
        for token in ids[0, 30:].tolist():
            logits = feed(model, cache, torch.tensor([[token]]))
            torch.testing.assert_close(logits[0], oracle([token]), **CLOSE)
        assert [sorted(held) for held in oracle.alive[0]] == cache.kept_positions(0).tolist()
        assert cache.stats().events == [4]


def test_30_memory_is_freed_not_masked(llama: PreTrainedModel) -> None:
    ids = prompt(40)
    own = llama.generate(ids, max_new_tokens=161, return_dict_in_generate=True).past_key_values
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)
    with kvcompress.apply(llama, E24) as handle:
        held = []
        for steps in (1, 41, 161):
            generate(llama, ids, steps)
            held.append(handle.stats().bytes_held)
            assert handle.cache is not None
            assert sum(tensor.nbytes for tensor in tensors_of(handle.cache)) == held[-1]
        assert held[0] == held[1] == held[2] < full / 4
        assert handle.stats().bytes_full == full
        assert handle.stats().ratio == full / held[-1]


def tensors_of(cache: CompressedCache) -> list[Tensor]:
    """Tensors of the stores, by looking for them."""
    members = [value for store in cache.stores for value in vars(store).values()]
    found = [value for member in members for value in (member.values() if isinstance(member, dict) else [member])]
    return [value for value in found if isinstance(value, Tensor)]


def test_31_three_rows_cross_at_different_steps(llama: PreTrainedModel) -> None:
    rows = [prompt(length, seed=length) for length in (22, 27, 30)]
    ids, mask = left_padded(rows)
    with kvcompress.apply(llama, E24) as handle:
        together = generate(llama, ids, 25, mask)
        assert handle.stats().events == [2, 3, 3]
        for index, row in enumerate(rows):
            assert torch.equal(generate(llama, row, 25)[0], together[index])
        crossing = generate(llama, prompt(29, rows=3), 25)
        assert handle.stats().events == [3, 3, 3]
        assert torch.equal(generate(llama, prompt(29, rows=3)[1:2], 25), crossing[1:2])


@pytest.mark.parametrize("prefill", ["compress", "defer"])
@pytest.mark.parametrize("length", [5, 40])
def test_33_length_follows_the_documented_saw_tooth(llama: PreTrainedModel, prefill: str, length: int) -> None:
    """Grows to K + B - 1, is compressed to K with the token that reaches K + B, and so on every B tokens.

    A deferred prompt is held whole until decoding first reaches a multiple of B past K.
    """
    budget, buffer = 24, 8
    expected = []
    held = 0
    for seen in range(length, length + 100):
        held = length if seen == length else held + 1
        on_time = held >= budget + buffer and (
            prefill == "compress" or (seen > length and (held == budget + buffer or (held - budget) % buffer == 0))
        )
        held = budget if on_time else held
        expected.append(held)
    config = E24.with_fields({"prefill": prefill})
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache()
        feed(llama, cache, prompt(length))
        kept = cache.stats().tokens_kept
        for step in range(99):
            feed(llama, cache, prompt(1, seed=step))
            kept += cache.stats().tokens_kept
            assert cache.kept_positions(1).shape == (2, kept[-1])
    assert kept == expected
    assert max(kept[-64:]) == budget + buffer - 1
    assert min(kept[-64:]) == budget


def test_34_budget_has_an_effect_and_unknown_settings_are_refused(llama: PreTrainedModel) -> None:
    ids = prompt(90)
    outputs = []
    for budget in (16, 64):
        with kvcompress.apply(llama, "vase-attnv", budget=budget, buffer=8) as handle:
            outputs.append(generate(llama, ids, 12))
            assert handle.config.budget == budget
            assert f"budget: {budget}" in handle.config.to_yaml()
            assert handle.stats().tokens_kept == [budget + 11 % 8]
            assert handle.cache is not None
            assert handle.cache.kept_positions(0).shape[1] == budget + 11 % 8
    assert not torch.equal(*outputs)
    for wrong in ({"bugdet": 16}, {"overrides": {"sinks.token": 2}}, {"overrides": {"snkis.tokens": 2}}):
        with pytest.raises(ConfigError, match=r"bugdet|token|snkis"):
            kvcompress.apply(llama, "vase-attnv", **wrong)
    assert "generate" not in vars(llama)


def test_35_every_prompt_is_compressed(llama: PreTrainedModel) -> None:
    """A wrapper that compresses only the first prompt goes unnoticed in a benchmark."""
    with kvcompress.apply(llama, E24) as handle:
        caches = []
        for index in range(12):
            generate(llama, prompt(30 + index, seed=index), 4)
            # Up to 31 tokens of prompt are compressed when the 32nd comes, longer prompts at once; 3 more are read.
            expected = 1
            assert handle.stats().events == [expected]
            assert handle.cache not in caches
            caches.append(handle.cache)


def test_36_layers_on_different_devices_share_nothing(tmp_path: Any) -> None:
    """Two devices, for want of GPUs one of them a disk that accelerate reads weights from."""
    model = tiny("llama", num_hidden_layers=4)
    ids, mask = left_padded([prompt(40), prompt(25, seed=1)])
    with kvcompress.apply(model, E24):
        expected = generate(model, ids, 20, mask)
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(4)}
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    with kvcompress.apply(model, E24) as handle:
        assert torch.equal(generate(model, ids, 20, mask), expected)
        assert handle.cache is not None
        assert [store.layers for store in handle.cache.stores] == [[0, 1], [2, 3]]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "kvcompress":
            held = [key for key, value in vars(module).items() if isinstance(value, Tensor)]
            assert held == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma3_text", {}),
        ("gpt_oss", {}),
        ("gemma2", {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ],
)
def test_37_sliding_layers_are_left_and_full_layers_compressed(kind: str, fields: dict[str, Any]) -> None:
    model = tiny(kind, "eager", **fields)
    untouched = copy.deepcopy(model)
    types = model.config.layer_types
    assert set(types) == {"sliding_attention", "full_attention"}
    ids = prompt(40)
    with kvcompress.apply(model, "vase-attnv", budget=16, buffer=4) as handle:
        cache = handle.new_cache()
        record = Recorder(model, cache)
        answer = generate(model, ids, 30, cache=cache)
        record.close()
        for index, layer in enumerate(cache.layers):
            if types[index] == "sliding_attention":
                assert layer.keys.shape == (1, 2, WINDOW - 1, 16)
            else:
                assert cache.kept_positions(index).shape == (2, 16 + 29 % 4)
        assert cache.get_seq_length() == 69
    sequence = torch.cat([ids, answer[:, :-1]], dim=1)
    expected = replay(untouched, sequence, [40] + [1] * 29, record, 0)[39:]
    torch.testing.assert_close(torch.cat(record.logits, dim=1)[0, -30:], expected[-30:], **CLOSE)
    # The mask matters: without it the model says something else.
    with torch.no_grad():
        assert not torch.allclose(untouched(sequence).logits[0, -1], expected[-1], atol=0.05)


def test_37_a_model_without_full_layers_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"mistral: has no full-attention layer.*DynamicSlidingWindowLayer"):
        kvcompress.apply(tiny("mistral", sliding_window=WINDOW), E24)
