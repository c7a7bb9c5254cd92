"""Weaknesses of the published VASE implementation, tried on ours; each test bears the row of the list of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import CLOSE, Oracle
from tiny import distinct, feed, generate, left_padded, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import kvcompress
from kvcompress import CacheError, ConfigError, KVCompressError, UnsupportedModelError

E24 = kvcompress.load_config("vase-attnv", budget=24, buffer=8)


def test_row_03_pads_are_neither_sinks_nor_attended(llama: PreTrainedModel) -> None:
    """Prompts of 20 and 50 tokens; what stands in the padded columns must not matter at all."""
    ids, mask = left_padded([prompt(20, seed=1), prompt(50, seed=2)])
    other = ids.masked_fill(mask == 0, 99)
    with kvcompress.apply(llama, E24) as handle:
        first = generate(llama, ids, 20, mask)
        cache = handle.cache
        assert cache is not None
        for layer in (0, 1):
            for row, seen in enumerate((39, 69)):
                kept = cache.kept_positions(layer, row)
                assert kept[:, :4].tolist() == [[0, 1, 2, 3]] * 2
                assert kept[:, -1].tolist() == [seen - 1] * 2
        assert torch.equal(generate(llama, other, 20, mask), first)


def test_row_04_prompt_of_one_token(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Attention scores with a query window that has only just begun, in a budget as small as it gets."""
    config = kvcompress.load_config("snapkv", budget=6, buffer=2)
    ids = distinct(30)
    oracle = Oracle(plain, config, sequence_id=0)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([0])
        for token in ids[0].tolist():
            logits = feed(llama, cache, torch.tensor([[token]]))
            torch.testing.assert_close(logits[0], oracle([token]), **CLOSE)
    assert cache.stats().events == [12]


@pytest.mark.parametrize("chunks", [[50, 50], [33, 33, 34], [100], [1] * 10 + [90], [64, 16, 20]])
def test_row_05_chunks_of_a_prompt_equal_one_call(llama: PreTrainedModel, chunks: list[int]) -> None:
    """With the prompt declared and compression deferred until it has been read, chunks don't matter."""
    ids = distinct(120)
    with kvcompress.apply(llama, "vase-attnv", budget=64, buffer=16, prefill="defer") as handle:
        results = []
        for lengths in ([100], chunks):
            cache = handle.new_cache()
            cache.expect_prompt(ids[:, :100], None)
            start = 0
            for length in lengths:
                logits = feed(llama, cache, ids[:, start : start + length])
                start += length
            logits = torch.cat([logits[:, -1:], *(feed(llama, cache, ids[:, i : i + 1]) for i in range(100, 120))], 1)
            results.append((logits, cache))
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-4)
        for layer in (0, 1):
            assert torch.equal(results[1][1].kept_positions(layer), results[0][1].kept_positions(layer))
        assert results[0][1].stats().events == results[1][1].stats().events == [1]


def test_row_06_two_tokens_per_step_trigger_on_crossing(llama: PreTrainedModel, plain: PreTrainedModel) -> None:
    """K + B = 80 is never hit exactly by 41, 43, 45, ... tokens."""
    config = kvcompress.load_config("vase-attnv", budget=64, buffer=16)
    ids = distinct(121)
    oracle = Oracle(plain, config, sequence_id=0)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([0])
        feed(llama, cache, ids[:, :41])
        oracle(ids[0, :41].tolist())
        held = []
        for start in range(41, 121, 2):
            logits = feed(llama, cache, ids[:, start : start + 2])
            torch.testing.assert_close(logits[0], oracle(ids[0, start : start + 2].tolist()), **CLOSE)
            held.append(cache.stats().tokens_kept[0])
    assert held == [*range(43, 80, 2), *range(64, 80, 2), *range(64, 80, 2), *range(64, 74, 2)]


@pytest.mark.parametrize(("budget", "buffer"), [(40, 16), (17, 16), (33, 7)])
def test_row_07_budget_that_is_no_multiple_of_the_buffer(
    llama: PreTrainedModel, plain: PreTrainedModel, budget: int, buffer: int
) -> None:
    config = kvcompress.load_config(
        {"budget": budget, "buffer": buffer, "stages": ["attention", "sample"], "name": "test"}
    )
    ids = distinct(90)
    oracle = Oracle(plain, config, sequence_id=0)
    with kvcompress.apply(llama, config) as handle:
        cache = handle.new_cache([0])
        feed(llama, cache, ids[:, :10])
        oracle(ids[0, :10].tolist())
        for start in range(10, 90):
            logits = feed(llama, cache, ids[:, start : start + 1])
            torch.testing.assert_close(logits[0], oracle([int(ids[0, start])]), **CLOSE)
            kept = cache.kept_positions(0)
            assert all(len(set(head)) == len(head) for head in kept.tolist())
            assert (
                kept[:, -min(buffer, start) :].tolist() == [list(range(start + 1 - min(buffer, start), start + 1))] * 2
            )


@pytest.mark.parametrize("recipe", ["vase", None, {"stages": ["attention"]}, {"stages": ["none"]}, {"budget": 24}])
def test_row_11_unknown_method_is_refused_before_anything_runs(llama: PreTrainedModel, recipe: Any) -> None:
    before = dict(vars(llama))
    with pytest.raises(ConfigError):
        kvcompress.apply(llama, recipe)
    assert vars(llama) == before


class Reads(TorchDispatchMode):
    """Counts operations that make the host wait for a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["vase-attnv", "vase-dkv", "h2o", "r-kv", "full"])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 25)], ids=["uniform", "ragged"])
def test_row_15_no_host_read_in_decode_steps(recipe: str, lengths: tuple[int, int]) -> None:
    """On the device "meta" tensors have no values, so that any read raises; steps with a compression included."""
    model = tiny("llama")
    fields = {} if recipe == "full" else {"budget": 24, "buffer": 8, "check_finite": False}
    with kvcompress.apply(model, recipe, **fields) as handle:
        cache = handle.new_cache()
        ids, mask = left_padded([prompt(length, seed=length) for length in lengths])
        feed(model, cache, ids, mask)
        with Reads() as reads:
            feed(model, cache, prompt(1, rows=2))
        assert reads.names == []
        model.to("meta")
        cache.to("meta")
        for _ in range(12):
            logits = feed(model, cache, torch.zeros(2, 1, dtype=torch.long, device="meta"))
            assert logits.device.type == "meta"
    assert cache.stats().tokens_seen == [length + 13 for length in lengths]


def test_row_15_reads_would_be_noticed() -> None:
    with Reads() as reads:
        assert torch.ones(1).item() == 1
        assert torch.ones(2).nonzero().shape == (2, 1)
    assert reads.names == ["_local_scalar_dense", "nonzero"]
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        torch.ones(1, device="meta").tolist()


def test_row_15_a_padding_mask_on_the_device_is_not_read_between_compressions() -> None:
    model = tiny("llama")
    with kvcompress.apply(model, E24) as handle:
        cache = handle.new_cache()
        ids, mask = left_padded([prompt(40), prompt(33)])
        feed(model, cache, ids, mask)
        model.to("meta")
        cache.to("meta")
        mask = mask.to("meta")
        for _ in range(6):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            feed(model, cache, torch.zeros(2, 1, dtype=torch.long, device="meta"), mask)
    assert cache.get_seq_length() == 46


@pytest.mark.parametrize("prefill", ["compress", "defer"])
def test_row_18_long_prompt_does_not_size_the_buffer(llama: PreTrainedModel, prefill: str) -> None:
    with kvcompress.apply(llama, "vase-attnv", budget=64, buffer=16, prefill=prefill) as handle:
        cache = handle.new_cache()
        feed(llama, cache, prompt(900))
        per_slot = 2 * 2 * (2 * 16 * 4 + 4)
        queries = 2 * 4 * 16 * 16 * 4
        if prefill == "compress":
            assert cache.stats().bytes_held == 80 * per_slot + queries
        for step in range(16):
            feed(llama, cache, prompt(1, seed=step))
        assert cache.stats().events == [2 if prefill == "compress" else 1]
        assert cache.stats().bytes_held == 80 * per_slot + queries
        assert all(
            tensor.untyped_storage().nbytes() == tensor.nbytes
            for store in cache.stores
            for tensor in store.tensors.values()
        )


def test_row_22_caches_belong_to_a_model_under_compression(llama: PreTrainedModel) -> None:
    handle = kvcompress.apply(llama, E24)
    cache = handle.new_cache()
    feed(llama, cache, prompt(40))
    for name in ("update", "get_seq_length", "get_mask_sizes", "crop", "reset", "reorder_cache"):
        assert callable(getattr(cache, name))
    assert not cache.is_compileable
    assert not cache.is_croppable
    assert cache.get_mask_sizes(3, 0) == (3, 40)
    with pytest.raises(CacheError, match="holds 1 sequences, the call has 2"):
        feed(llama, cache, prompt(1, rows=2))
    handle.remove()
    with pytest.raises(UnsupportedModelError, match=r"kvcompress\.apply"):
        feed(llama, cache, prompt(1))


def test_row_24_the_prompt_can_be_protected(llama: PreTrainedModel) -> None:
    """A fact in the middle of the prompt that is needed late; only generated tokens may go."""
    ids = prompt(30)
    with kvcompress.apply(llama, "random-prompt", budget=44, buffer=8) as handle:
        generate(llama, ids, 60)
        cache = handle.cache
        assert cache is not None
        assert cache.stats().events == [5]
        for layer in (0, 1):
            for head in cache.kept_positions(layer).tolist():
                assert head[:30] == list(range(30))
                assert len(head) < 52
        with pytest.raises(
            KVCompressError, match=r"protects 37 with a prompt of 37 tokens; raise budget to at least 45"
        ):
            generate(llama, prompt(37), 60)
    with kvcompress.apply(llama, "vase-attnv", budget=44, buffer=8) as handle:
        generate(llama, ids, 60)
        assert handle.cache is not None
        assert all(head[:30] != list(range(30)) for head in handle.cache.kept_positions(0).tolist())
