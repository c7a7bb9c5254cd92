"""Failures that users of other libraries reported, tried on ours: the cache contract inside generate().

Each test is named after the trial's number in the collection of reports.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import CLOSE, Oracle
from tiny import PAD, distinct, feed, generate, left_padded, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import kvcompress
from kvcompress import CacheError, KVCompressError
from kvcompress.cache import CompressedCache
from kvcompress.model import cache_keyword

E24 = kvcompress.load_config("vase-attnv", budget=24, buffer=8)


def state_of(cache: CompressedCache) -> tuple[Any, ...]:
    """Everything that a refused operation must leave alone."""
    tensors = [tensor.clone() for store in cache.stores for tensor in store.tensors.values()]
    others = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return cache.columns, list(cache.rows), cache.layout, others, tensors


def assert_unchanged(cache: CompressedCache, before: tuple[Any, ...]) -> None:
    now = state_of(cache)
    assert now[:4] == before[:4]
    assert all(torch.equal(tensor, old) for tensor, old in zip(now[4], before[4], strict=True))


def assert_follows(model: PreTrainedModel, cache: CompressedCache, oracles: list[Oracle], tokens: Tensor) -> None:
    """Feed (rows, steps) tokens one column at a time and compare each row's logits with its oracle's."""
    for step in range(tokens.shape[1]):
        logits = feed(model, cache, tokens[:, step : step + 1])
        for row, oracle in enumerate(oracles):
            torch.testing.assert_close(logits[row], oracle([int(tokens[row, step])]), **CLOSE)


class Spy:
    """What the decoder is called with."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.calls: list[dict[str, Any]] = []
        self.hook = model.get_decoder().register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append(kwargs)


def test_01_second_turn_sees_only_new_tokens_at_their_true_positions(
    llama: PreTrainedModel, plain: PreTrainedModel
) -> None:
    ids = distinct(43)
    config = E24.with_fields({"budget": 20})
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([7])
        answer = generate(llama, ids[:, :40], 5, cache=cache)
        assert cache.get_seq_length() == 44
        assert cache.stats().tokens_kept == [20 + 4]
        history = torch.cat([ids[:, :40], answer, ids[:, 40:]], dim=1)
        spy = Spy(llama)
        settings = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
        second = llama.generate(history, **{cache_keyword(llama): cache}, **settings)
        spy.hook.remove()
    # The last generated token has not been read yet, so that it comes with the three new ones.
    assert [call["input_ids"].tolist() for call in spy.calls[:1]] == [history[:, 44:].tolist()]
    assert [call["position_ids"].tolist() for call in spy.calls] == [[[44, 45, 46, 47]], [[48]], [[49]]]
    assert cache.get_seq_length() == 50
    oracle = Oracle(plain, config, sequence_id=7)
    oracle(ids[0, :40].tolist())
    for token in answer[0, :-1].tolist():
        oracle([token])
    expected = [oracle(history[0, 44:].tolist())[-1]]
    for token in second.sequences[0, 48:-1].tolist():
        expected.append(oracle([token])[-1])
    torch.testing.assert_close(torch.cat(second.logits), torch.stack(expected), **CLOSE)


def two_rows(model: PreTrainedModel, plain: PreTrainedModel, handle: Any) -> tuple[CompressedCache, list[Oracle]]:
    """A cache of two sequences that have been compressed and then grown a little, and an oracle of each."""
    cache = handle.new_cache([3, 4])
    rows = torch.cat([distinct(43, seed=1), distinct(43, seed=2)])
    oracles = [Oracle(plain, E24, sequence_id=key) for key in (3, 4)]
    for part in (slice(0, 40), slice(40, 41), slice(41, 42), slice(42, 43)):
        feed(model, cache, rows[:, part])
        for row, oracle in enumerate(oracles):
            oracle(rows[row, part].tolist())
    return cache, oracles


def copies(oracles: list[Oracle], picked: list[int]) -> list[Oracle]:
    chosen = []
    for row in picked:
        twin = copy.copy(oracles[row])
        for name in ("cache", "alive", "events", "queries", "mass"):
            setattr(twin, name, copy.deepcopy(getattr(twin, name)))
        chosen.append(twin)
    return chosen


@pytest.mark.parametrize(
    ("operate", "picked"),
    [
        (lambda cache: [cache.reorder_cache(torch.tensor([1, 1])), cache.reorder_cache(torch.tensor([1, 0]))], [1, 1]),
        (lambda cache: [cache.reorder_cache(torch.tensor([1, 0])), cache.reorder_cache(torch.tensor([0, 0]))], [1, 1]),
        (lambda cache: [cache.reorder_cache(torch.tensor([1, 0]))] * 1, [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ],
    ids=["reorder twice", "reorder twice, other way", "swap", "select", "select by mask", "repeat"],
)
def test_02_batch_operations(llama: PreTrainedModel, plain: PreTrainedModel, operate: Any, picked: list[int]) -> None:
    with kvcompress.apply(llama, E24) as handle:
        cache, oracles = two_rows(llama, plain, handle)
        operate(cache)
        assert cache.stats().tokens_seen == [43] * len(picked)
        # Far enough for two more compressions, in which rows that are copies follow different tokens.
        tokens = torch.cat([distinct(18, seed=10 + row) for row in range(len(picked))])
        assert_follows(llama, cache, copies(oracles, picked), tokens)
        assert cache.stats().events == [3] * len(picked)


@pytest.mark.parametrize(
    ("kind", "operate", "picked"),
    [
        ("gemma3_text", lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        ("qwen3_next", lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        ("gemma3_text", lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        ("gemma3_text", lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ],
)
def test_02_batch_operations_reach_sliding_and_linear_layers(kind: str, operate: Any, picked: list[int]) -> None:
    model = tiny(kind)
    rows = torch.cat([prompt(40, seed=1), prompt(40, seed=2)])
    with kvcompress.apply(model, E24) as handle:
        cache = handle.new_cache([3, 4])
        feed(model, cache, rows)
        operate(cache)
        tokens = prompt(10, rows=len(picked), seed=3)
        logits = torch.cat([feed(model, cache, tokens[:, step : step + 1]) for step in range(10)], dim=1)
        for index, row in enumerate(picked):
            alone = handle.new_cache([[3, 4][row]])
            feed(model, alone, rows[row : row + 1])
            for step in range(10):
                expected = feed(model, alone, tokens[index : index + 1, step : step + 1])
                torch.testing.assert_close(logits[index, step], expected[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 10, 11])
def test_02_crop_within_what_has_not_been_compressed(
    llama: PreTrainedModel, plain: PreTrainedModel, count: int
) -> None:
    """43 tokens, compressed after 40: the ring holds 11. Taking tokens back is as if they had never come."""
    rows = torch.cat([distinct(70, seed=1), distinct(70, seed=2)])
    with kvcompress.apply(llama, E24) as handle:
        cache, _ = two_rows(llama, plain, handle)
        cache.crop(-count)
        assert cache.get_seq_length() == 43 - count
        assert cache.stats().tokens_seen == [43 - count] * 2
        assert cache.stats().tokens_kept == [27 - count] * 2
        oracles = [Oracle(plain, E24, sequence_id=key) for key in (3, 4)]
        for row, oracle in enumerate(oracles):
            oracle(rows[row, :40].tolist())
            for token in rows[row, 40 : 43 - count].tolist():
                oracle([token])
            if count > 3:
                rewind(oracle, count - 3)
        assert_follows(llama, cache, oracles, rows[:, 43:64])


def rewind(oracle: Oracle, count: int) -> None:
    """Take the last tokens of an oracle back."""
    oracle.seen -= count
    oracle.cache.crop(-count)
    for layer, heads in oracle.alive.items():
        oracle.alive[layer] = [{position for position in alive if position < oracle.seen} for alive in heads]
        oracle.queries[layer] = oracle.queries[layer][:, :, :-count]


@pytest.mark.parametrize("count", [12, 19, 43, 44, -3])
def test_02_crop_past_a_compression_is_refused_and_changes_nothing(
    llama: PreTrainedModel, plain: PreTrainedModel, count: int
) -> None:
    with kvcompress.apply(llama, E24) as handle:
        cache, _ = two_rows(llama, plain, handle)
        before = state_of(cache)
        with pytest.raises(CacheError, match=r"^crop: .*(at most 11|has seen 43|negative)"):
            cache.crop(-count)
        assert_unchanged(cache, before)


@pytest.mark.parametrize(("kind", "recipe"), [("gemma3_text", "full"), ("qwen3_next", "full"), ("llama", "h2o")])
def test_02_crop_that_cannot_be_exact_is_refused_and_changes_nothing(kind: str, recipe: str) -> None:
    """Sliding windows that are full, recurrent states, sums of attention: all have lost what a rollback needs."""
    model = tiny(kind)
    fields = {} if recipe == "full" else {"budget": 24, "buffer": 8}
    with kvcompress.apply(model, recipe, **fields) as handle:
        cache = handle.new_cache()
        feed(model, cache, distinct(30))
        before = state_of(cache)
        with pytest.raises(CacheError, match=r"^crop: "):
            cache.crop(-2)
        assert_unchanged(cache, before)


def test_02_beam_search_keeps_rows_and_beams_apart(llama: PreTrainedModel) -> None:
    """Beams under a budget that is never reached equal the model's own; under a small one, alone equals in a batch."""
    ids, mask = left_padded([prompt(30, seed=1), prompt(18, seed=2)])
    beams = {"num_beams": 3, "num_return_sequences": 2}
    own = generate(llama, ids, 20, mask, **beams)
    with kvcompress.apply(llama, E24.with_fields({"budget": 100})):
        assert torch.equal(generate(llama, ids, 20, mask, **beams), own)
    with kvcompress.apply(llama, E24):
        together = generate(llama, ids, 20, mask, **beams)
        alone = generate(llama, prompt(18, seed=2), 20, **beams)
    assert torch.equal(together[2:], alone)
    assert not torch.equal(together, own)


def test_03_four_turns_on_one_cache(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    config = kvcompress.load_config("vase-attnv", budget=10, buffer=3)
    user = distinct(12, seed=5)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([1])
        history = user[:, :0]
        calls: list[list[int]] = []
        for turn in range(4):
            unread = cache.columns
            history = torch.cat([history, user[:, 3 * turn : 3 * turn + 3]], dim=1)
            answer = generate(llama, history, 5, cache=cache)
            calls += [history[0, unread:].tolist(), *([token] for token in answer[0, :-1].tolist())]
            # A fresh oracle that is given all calls up to here must choose the same answer.
            oracle = Oracle(plain, config, sequence_id=1)
            logits = [oracle(call)[-1] for call in calls]
            assert [int(row.argmax()) for row in logits[-5:]] == answer[0].tolist()
            history = torch.cat([history, answer], dim=1)
            assert cache.get_seq_length() == oracle.seen == 8 * (turn + 1) - 1
            assert bool(cache.stats().events[0]) == (turn >= 1)


@pytest.mark.parametrize("position", [0, 17, 43])
def test_03_edited_history_is_refused(llama: PreTrainedModel, position: int) -> None:
    ids = distinct(48)
    with kvcompress.apply(llama, E24) as handle:
        cache = handle.new_cache()
        generate(llama, ids[:, :40], 5, cache=cache)
        before = state_of(cache)
        edited = torch.cat([ids[:, :40], ids[:, 40:]], dim=1)
        edited[0, position] = 127
        with pytest.raises(CacheError, match=r"first 44 tokens differ.*reset\(\)"):
            generate(llama, edited, 3, cache=cache)
        assert_unchanged(cache, before)


@pytest.mark.parametrize("recipe", ["vase-attnv", "vase-dkv", "h2o", "key-norm", "tova", "r-kv"])
def test_04_padded_row_equals_the_row_alone(llama: PreTrainedModel, recipe: str) -> None:
    rows = [prompt(25, seed=1), prompt(40, seed=2), prompt(6, seed=3)]
    ids, mask = left_padded(rows)
    assert llama.get_input_embeddings().weight[PAD].norm() > 1
    with kvcompress.apply(llama, recipe, budget=16, buffer=4) as handle:
        together = generate(llama, ids, 12, mask)
        cache = handle.cache
        assert cache is not None
        # The last row stays below the budget and keeps everything, next to rows that are compressed.
        assert cache.stats().tokens_seen == [36, 51, 17]
        assert cache.stats().tokens_kept == [16 + 3, 16 + 3, 17]
        for index, row in enumerate(rows):
            assert torch.equal(generate(llama, row, 12)[0], together[index])
            assert handle.cache is not None
            for layer in (0, 1):
                assert torch.equal(handle.cache.kept_positions(layer), cache.kept_positions(layer, index))


def test_04_right_padding_is_refused(llama: PreTrainedModel) -> None:
    ids = prompt(10, rows=2)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with kvcompress.apply(llama, E24) as handle:
        cache = handle.new_cache()
        with pytest.raises(CacheError, match=r"row 1 has padding after a token.*left"):
            feed(llama, cache, ids, mask)
        assert cache.get_seq_length() == 0
        # Nothing has begun, so that the cache can be used.
        assert feed(llama, cache, ids, mask.flip(1)).isfinite().all()


def assisted(mode: str) -> dict[str, Any]:
    return {mode: 3 if mode == "prompt_lookup_num_tokens" else tiny("llama", seed=9)}


@pytest.mark.parametrize("mode", ["prompt_lookup_num_tokens", "assistant_model"])
def test_06_assisted_decoding_is_refused_under_eviction(llama: PreTrainedModel, mode: str) -> None:
    with kvcompress.apply(llama, E24) as handle:
        with pytest.raises(KVCompressError, match=f"{mode}: .*use a recipe that does not evict"):
            generate(llama, prompt(40), 5, **assisted(mode))
        assert handle.cache is None


@pytest.mark.parametrize("mode", ["prompt_lookup_num_tokens", "assistant_model"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_06_assisted_decoding_without_eviction_equals_greedy(kind: str, mode: str) -> None:
    """Rollback of rejected tokens, on sliding layers past their window too."""
    model = tiny(kind)
    # A prompt that repeats itself, so that drafts are sometimes right.
    ids = prompt(12).repeat(1, 3)
    greedy = generate(model, ids, 30)
    with kvcompress.apply(model, "full") as handle:
        spy = Spy(model)
        assert torch.equal(generate(model, ids, 30, **assisted(mode)), greedy)
        spy.hook.remove()
        assert max(call["input_ids"].shape[1] for call in spy.calls[1:]) > 1
        assert handle.stats().events == [0]
        assert 36 + 29 <= handle.stats().tokens_seen[0] <= 36 + 30


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded"])
def test_07_another_cache_implementation_is_refused(llama: PreTrainedModel, implementation: str) -> None:
    with kvcompress.apply(llama, "full"), pytest.raises(KVCompressError, match=f"'{implementation}' asks for another"):
        generate(llama, prompt(10), 2, cache_implementation=implementation)


def test_07_a_cache_that_was_filled_without_compression_is_refused(llama: PreTrainedModel) -> None:
    own = DynamicCache(config=llama.config)
    feed(llama, own, prompt(10))
    kept = own.layers[0].keys.clone()
    with kvcompress.apply(llama, "full"), pytest.raises(CacheError, match="a DynamicCache that already holds tokens"):
        generate(llama, prompt(12), 2, cache=own)
    assert torch.equal(own.layers[0].keys, kept)
