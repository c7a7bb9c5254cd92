"""Failures that users of other libraries reported, tried on ours: compiling, copying, moving, lengths, resetting."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import CLOSE, Oracle
from tiny import distinct, feed, left_padded, prompt, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

import kvcompress
from kvcompress.cache import CompressedCache

E24 = kvcompress.load_config("vase-attnv", budget=24, buffer=8)


def decode(model: Any, cache: CompressedCache, ids: Tensor, steps: int) -> list[int]:
    """Greedy tokens, one call each."""
    chosen = []
    for _ in range(steps):
        ids = feed(model, cache, ids)[:, -1:].argmax(dim=-1)
        chosen.append(int(ids))
    return chosen


def test_10_compiled_decoding_gives_the_same_tokens_and_never_recompiles() -> None:
    model = tiny("llama", num_hidden_layers=1)
    counter = CompileCounterWithBackend("eager")
    with kvcompress.apply(model, E24) as handle, torch._dynamo.config.patch(recompile_limit=64):
        expected = decode(model, handle.new_cache(), prompt(40), 68)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=counter)
        cache = handle.new_cache()
        # Warm-up: the prompt, then the first steps, after which lengths are known to vary.
        tokens = decode(model, cache, prompt(40), 1)
        tokens += decode(compiled, cache, torch.tensor([tokens[-1:]]), 3)
        frames = counter.frame_count
        with torch._dynamo.config.patch(error_on_recompile=True):
            tokens += decode(compiled, cache, torch.tensor([tokens[-1:]]), 64)
        torch._dynamo.reset()
    assert tokens == expected
    assert counter.frame_count == frames > 0
    assert cache.stats().events == [9]


def test_11_copies_continue_independently(llama: PreTrainedModel) -> None:
    """One prompt, read once; three questions, each on a copy of its cache."""
    context = prompt(40)
    questions = [distinct(4, seed=seed) for seed in (1, 2, 3)]
    with kvcompress.apply(llama, E24) as handle:
        expected = []
        for question in questions:
            cache = handle.new_cache()
            feed(llama, cache, context)
            expected.append(decode(llama, cache, question, 20))
        read = handle.new_cache()
        feed(llama, read, context)
        copies = [copy.deepcopy(read) for _ in questions]
        # Interleaved, so that a tensor shared between copies would show.
        answers: list[list[int]] = [[] for _ in questions]
        for step in range(20):
            for index, cache in enumerate(copies):
                ids = questions[index] if step == 0 else torch.tensor([answers[index][-1:]])
                answers[index] += decode(llama, cache, ids, 1)
        assert answers == expected
        assert read.get_seq_length() == 40
        assert decode(llama, read, questions[0], 20) == expected[0]
    assert len({tuple(answer) for answer in expected}) == 3


@pytest.mark.parametrize("recipe", ["vase-attnv", "snapkv", "vase-dkv"])
@pytest.mark.parametrize("length", [1, 2, 23, 24, 25, 31, 32, 33, 48])
def test_13_prompt_lengths_around_the_budget(
    llama: PreTrainedModel, plain: PreTrainedModel, recipe: str, length: int
) -> None:
    config = E24 if recipe == "vase-attnv" else kvcompress.load_config(recipe, budget=24, buffer=8)
    ids = distinct(length + 12)
    oracle = Oracle(plain, config, sequence_id=5)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([5])
        logits = feed(llama, cache, ids[:, :length])
        torch.testing.assert_close(logits[0], oracle(ids[0, :length].tolist()), **CLOSE)
        assert cache.stats().events == [int(length >= 32)]
        for token in ids[0, length:].tolist():
            logits = feed(llama, cache, torch.tensor([[token]]))
            torch.testing.assert_close(logits[0], oracle([token]), **CLOSE)
        assert [sorted(held) for held in oracle.alive[1]] == cache.kept_positions(1).tolist()


def test_13_prompt_of_no_tokens(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    """A row that is all padding begins with the first token that comes later."""
    ids, mask = left_padded([distinct(35), distinct(0)])
    later = torch.cat([distinct(35, seed=1), distinct(35, seed=2)])
    oracles = [Oracle(plain, E24, sequence_id=1), Oracle(plain, E24, sequence_id=2)]
    oracles[0](ids[0].tolist())
    with kvcompress.apply(llama, E24) as handle:
        cache = handle.new_cache([1, 2])
        feed(llama, cache, ids, mask)
        assert cache.stats().tokens_seen == [35, 0]
        for step in range(35):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            logits = feed(llama, cache, later[:, step : step + 1], mask)
            for row, oracle in enumerate(oracles):
                torch.testing.assert_close(logits[row], oracle([int(later[row, step])]), **CLOSE)
        assert cache.stats().tokens_seen == [70, 35]
        assert cache.stats().tokens_kept == [24 + 3, 24 + 3]


def tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object holds, however deep."""
    if id(thing) in seen or isinstance(thing, (str, int, float, type(None), type)):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value, seen)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors_in(vars(thing), seen)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("recipe", ["vase-attnv", "h2o"])
def test_14_all_tensors_move(kind: str, recipe: str) -> None:
    model = tiny(kind)
    with kvcompress.apply(model, recipe, budget=24, buffer=8) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt(40))
        feed(model, cache, prompt(1))
        moved = copy.deepcopy(cache)
        held = list(tensors_in(moved, set()))
        assert sum(tensor.nbytes for tensor in held) >= cache.stats().bytes_held > 0
        # No second device is at hand, but "meta" tells whether a tensor was left behind.
        assert moved.to("meta") is moved
        assert {tensor.device.type for tensor in tensors_in(moved, set())} == {"meta"}
        there_and_back = copy.deepcopy(cache).to("cpu")
        tokens = [decode(model, each, torch.tensor([[9]]), 20) for each in (cache, there_and_back)]
        assert tokens[0] == tokens[1]


def test_15_rows_of_very_different_lengths_in_one_step(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    rows = [distinct(length, seed=length) for length in (3, 17, 40)]
    ids, mask = left_padded(rows)
    oracles = [Oracle(plain, E24, sequence_id=row) for row in range(3)]
    for oracle, row in zip(oracles, rows, strict=True):
        oracle(row[0].tolist())
    later = torch.cat([distinct(50, seed=seed) for seed in (7, 8, 9)])
    with kvcompress.apply(llama, E24) as handle:
        cache = handle.new_cache([0, 1, 2])
        feed(llama, cache, ids, mask)
        for step in range(50):
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            logits = feed(llama, cache, later[:, step : step + 1], mask)
            for row, oracle in enumerate(oracles):
                torch.testing.assert_close(logits[row], oracle([int(later[row, step])]), **CLOSE)
        # Compressed at 32, 40, 48; at 32, 40, ..., 64; at 40, 48, ..., 88 tokens.
        assert cache.stats().events == [3, 5, 7]


def test_17_questions_on_one_context_with_the_answer_taken_back(llama: PreTrainedModel) -> None:
    context = prompt(40)
    questions = [distinct(3, seed=seed) for seed in (1, 2, 3)]
    with kvcompress.apply(llama, E24) as handle:
        expected = []
        for question in questions:
            cache = handle.new_cache()
            feed(llama, cache, context)
            expected.append(decode(llama, cache, question, 4))
        shared = handle.new_cache()
        feed(llama, shared, context)
        for question, answer in zip(questions, expected, strict=True):
            assert decode(llama, shared, question, 4) == answer
            assert shared.get_seq_length() == 40 + 3 + 3
            shared.crop(-6)
            assert shared.stats().tokens_kept == [24]
    assert len({tuple(answer) for answer in expected}) == 3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_19_reset_begins_anew(kind: str) -> None:
    model = tiny(kind)
    with kvcompress.apply(model, E24) as handle:
        used, fresh = handle.new_cache(), handle.new_cache()
        feed(model, used, prompt(40, rows=2))
        used.reset()
        assert used.get_seq_length() == 0
        assert used.stats().tokens_kept == []
        ids, mask = left_padded([prompt(7, seed=3), prompt(4, seed=4), prompt(5, seed=5)])
        for cache in (used, fresh):
            feed(model, cache, ids, mask)
            assert cache.get_seq_length() == 7
        for step in range(40):
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            tokens = prompt(1, rows=3, seed=step)
            assert torch.equal(feed(model, used, tokens, mask), feed(model, fresh, tokens, mask))
        assert used.stats() == fresh.stats()


def test_failed_step_can_be_repeated_and_failed_prompt_is_refused(llama: PreTrainedModel) -> None:
    """A step that fails between layers, by Ctrl-C or for lack of memory, in a batch whose slots are read by mask."""
    ids, mask = left_padded([distinct(42), distinct(20, seed=1)])
    ones = mask.new_ones(2, 1)

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with kvcompress.apply(llama, E24) as handle:
        cache, same = handle.new_cache(), handle.new_cache()
        for each in (cache, same):
            feed(llama, each, ids, mask)
        hook = llama.model.layers[1].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            feed(llama, cache, prompt(1, rows=2, seed=9), torch.cat([mask, ones], dim=1))
        hook.remove()
        # What the failed step would have read is not part of the history.
        chunk = torch.cat([mask, ones, ones], dim=1)
        assert torch.equal(
            feed(llama, cache, distinct(4).reshape(2, 2), chunk), feed(llama, same, distinct(4).reshape(2, 2), chunk)
        )
        assert cache.matches_history(torch.cat([ids, distinct(4).reshape(2, 2)], dim=1))
        hook = llama.model.layers[1].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            feed(llama, cache, prompt(30, rows=2))
        hook.remove()
        with pytest.raises(kvcompress.CacheError, match=r"failed half way.*reset\(\)"):
            feed(llama, cache, prompt(1, rows=2))
        cache.reset()
        assert torch.equal(feed(llama, cache, ids, mask), feed(llama, handle.new_cache(), ids, mask))


def test_refused_first_call_leaves_no_trace(llama: PreTrainedModel) -> None:
    with kvcompress.apply(llama, "random-prompt", budget=24, buffer=8) as handle:
        cache, fresh = handle.new_cache(), handle.new_cache()
        with pytest.raises(kvcompress.KVCompressError, match="protects 40 with a prompt of 40 tokens"):
            feed(llama, cache, prompt(40, rows=2))
        for ids in (prompt(9), *(prompt(1, seed=step) for step in range(40))):
            assert torch.equal(feed(llama, cache, ids), feed(llama, fresh, ids))
        assert cache.stats() == fresh.stats()
        assert cache.stats().events == [3]
