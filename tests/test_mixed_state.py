"""What is done to a cache in codes, against the same done to its content; and what such a cache takes in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mixed_oracle import CLOSE, MixedOracle, Pair, quantize, recipe, witnesses
from test_memory import held_bytes
from test_oracle import batch, conversation
from tiny import distinct, feed, generate, tiny
from torch import Tensor

import kvcompress
from kvcompress import CacheError
from kvcompress import cache as cache_module
from kvcompress.cache import CompressedCache

LADDER = {"stage": "ladder", "bits": [8, 4, 2], "shares": [0.1, 0.2, 0.4, 0.3]}
INT4 = quantize("int4", share=0.1, sinks=2)
KIVI = {**quantize("int2", share=0, sinks=0), "keys": {"codec": "per_channel", "bits": 2, "tokens": 4}}
GROWING = {"quantize": recipe(INT4), "ladder": recipe(LADDER), "kivi": recipe(KIVI)}
EVICTING = {"vase-attnv + quantize": recipe(INT4, "vase-attnv"), "snapkv + ladder": recipe(LADDER, "snapkv")}
CONFIGS = GROWING | EVICTING
H2O = recipe(LADDER, "h2o")


@pytest.fixture
def paired(llama, plain) -> Callable[..., Any]:
    """Two conversations of unequal length under a recipe, past some events, and tokens to go on with.

    With an oracle each, unless what follows is compared to something else.
    """

    @contextmanager
    def make(config, ragged: bool = True, oracles: bool = True) -> Iterator[tuple[Pair, list[list[int]]]]:
        lengths = (27, 14) if ragged else (27, 27)
        rows = [conversation(row, length, *[1] * 3) for row, length in enumerate(lengths)]
        with kvcompress.apply(llama, config):
            pair = Pair(llama, plain, config, 2)
            pair.oracles = pair.oracles if oracles else []
            for chunk in batch(*rows):
                pair.feed(chunk)
            yield pair, [[token] for token in range(70, 79)]

    return make


def state_of(cache: CompressedCache) -> list[Tensor]:
    """Copies of all tensors of the stores."""
    return [tensor.clone() for store in cache.stores for tensor in store.tensors.values()]


def assert_unchanged(cache: CompressedCache, before: list[Tensor], stats: Any) -> None:
    assert all(torch.equal(*pair) for pair in zip(state_of(cache), before, strict=True))
    assert cache.stats() == stats


OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "swap": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False])), [0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        *(("quantize", operation) for operation in ("swap", "select by mask")),
        *(("ladder", operation) for operation in ("reorder", "repeat")),
        *(("kivi", operation) for operation in ("select", "repeat")),
        *(("vase-attnv + quantize", operation) for operation in ("swap", "repeat")),
        *(("snapkv + ladder", operation) for operation in ("reorder", "select")),
    ],
)
def test_rows_of_the_batch(paired, name, operation):
    """Rows of unequal length, so that pools are filled unequally, go on as what they were."""
    operate, picked = OPERATIONS[operation]
    with paired(CONFIGS[name]) as (pair, tokens):
        operate(pair.cache)
        pair.pick(picked)
        for row in range(len(picked)):
            pair.compare(row)
        for token in tokens[:5]:
            pair.feed([[token[0] + 3 * row] for row in range(len(picked))])


@pytest.mark.parametrize(("count", "ragged"), [(3, False), ("ring", True)])
@pytest.mark.parametrize("name", CONFIGS)
def test_crop_within_the_ring(paired, name, count, ragged):
    """As if the tokens had never come: before and after the next events."""
    with paired(CONFIGS[name], ragged) as (pair, tokens):
        pair.crop(min(row.ring for row in pair.cache.rows) if count == "ring" else count)
        for token in tokens[:5]:
            pair.feed([token, [token[0] + 20]])
        pair.crop(1)
        pair.feed([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("name", [*CONFIGS, "h2o + ladder"])
def test_crop_that_is_too_deep_is_refused_and_changes_nothing(paired, name):
    with paired((CONFIGS | {"h2o + ladder": H2O})[name], oracles=False) as (pair, _):
        cache = pair.cache
        deepest = min(row.ring for row in cache.rows)
        before, stats = state_of(cache), cache.stats()
        for count in (1 if "h2o" in name else deepest + 1, 20, cache.columns + 1, -3):
            with pytest.raises(CacheError, match=r"^crop: "):
                cache.crop(-count)
            assert_unchanged(cache, before, stats)


def test_sums_of_attention_cannot_be_taken_back(paired):
    """Not where they decide who gets which precision either."""
    ladder = {**LADDER, "by": "error"}
    config = kvcompress.load_config({"buffer": 4, "stages": ["accumulated_attention", ladder]})
    with paired(config, oracles=False) as (pair, _):
        before, stats = state_of(pair.cache), pair.cache.stats()
        assert not pair.cache.is_croppable
        with pytest.raises(CacheError, match=r"^crop: .* adds up the attention"):
            pair.cache.crop(-1)
        assert_unchanged(pair.cache, before, stats)


@pytest.mark.parametrize(
    ("name", "copied"),
    [(name, "state_dict") for name in [*CONFIGS, "h2o + ladder"]]
    + [("kivi", "deepcopy"), ("vase-attnv + quantize", "deepcopy"), ("ladder", "to")],
)
def test_copies_go_on_bit_for_bit(paired, tmp_path, name, copied):
    """And apart: what happens to one doesn't reach the other."""
    with paired((CONFIGS | {"h2o + ladder": H2O})[name], oracles=False) as (pair, tokens):
        cache, model = pair.cache, pair.model
        before, stats = state_of(cache), cache.stats()
        if copied == "deepcopy":
            other = copy.deepcopy(cache)
        elif copied == "state_dict":
            torch.save(cache.state_dict(), tmp_path / "cache.pt")
            other = CompressedCache(model, cache.config)
            other.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
        else:
            other = copy.deepcopy(cache).to("cpu")
        assert_unchanged(other, before, stats)
        mask, logits = pair.mask, []
        for token in tokens[:5]:
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            logits.append(feed(model, other, torch.tensor([token, token]), mask))
        assert_unchanged(cache, before, stats)
        for token, expected in zip(tokens[:5], logits, strict=True):
            assert torch.equal(pair.feed([token, token]), expected)
        assert cache.stats() == other.stats()


@pytest.mark.parametrize("name", ["kivi", "vase-attnv + quantize"])
def test_reset_begins_anew(paired, name):
    with paired(CONFIGS[name], oracles=False) as (pair, _):
        pair.cache.reset()
        assert pair.cache.stats().bytes_held == 0
        fresh = CompressedCache(pair.model, CONFIGS[name])
        ids = distinct(32, seed=3)
        for start, stop in ((0, 22), *((i, i + 1) for i in range(22, 32))):
            logits = [feed(pair.model, cache, ids[:, start:stop]) for cache in (pair.cache, fresh)]
            assert torch.equal(*logits)
        assert pair.cache.stats() == fresh.stats()


@pytest.mark.parametrize("name", ["quantize", "kivi", "snapkv + ladder"])
def test_a_decode_step_that_fails_half_way_can_be_repeated(paired, name):
    """Layers before the fault have written their token, the others have not; no event is due in this step."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with paired(CONFIGS[name]) as (pair, tokens):
        failed = 0
        for token in tokens:
            if all(row.ring < 2 * pair.cache.layout.buffer - 1 for row in pair.cache.rows):
                failed += 1
                hook = pair.model.model.layers[1].self_attn.register_forward_pre_hook(fail)
                with pytest.raises(KeyboardInterrupt):
                    feed(pair.model, pair.cache, torch.tensor([[99], [98]]), torch.ones(2, pair.mask.shape[1] + 1))
                hook.remove()
            pair.feed([token, token])
        assert failed >= 5


# -- whole generations, recorded and repeated by oracles ---------------------------------------------------------------


class Tape:
    """Everything that a generation does to its cache, in order; ``play`` does the same to oracles and compares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.events: list[tuple[str, Any]] = []
        self.cropped = 0
        for name in ("reorder_cache", "crop"):
            monkeypatch.setattr(CompressedCache, name, self._recording(name, getattr(CompressedCache, name)))
        self._hook = model.register_forward_hook(self._note, with_kwargs=True)
        self._captured: list[tuple[int, Tensor, Tensor]] = []

    def _recording(self, name: str, original: Any) -> Any:
        def record(cache: CompressedCache, argument: Any) -> None:
            self.events.append((name, copy.copy(argument)))
            original(cache, argument)

        return record

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        self.events.append(("call", (kwargs["input_ids"].clone(), list(self._captured), output.logits.clone())))
        self._captured.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with witnesses() as self._captured:
            yield
        self._hook.remove()

    def play(self, plain: Any, config: Any, keys: list[int]) -> int:
        """Returns the number of calls compared."""
        oracles = [MixedOracle(plain, config, key) for key in keys]
        calls = 0
        for kind, argument in self.events:
            if kind == "crop":
                if argument:
                    self.cropped -= argument
                    for oracle in oracles:
                        oracle.crop(-argument)
            elif kind == "reorder_cache":
                memo = {id(plain): plain}
                oracles = [copy.deepcopy(oracles[row], dict(memo)) for row in argument.tolist()]
            else:
                ids, captured, logits = argument
                calls += 1
                for row, oracle in enumerate(oracles):
                    oracle.witness = {layer: (keys[row], values[row]) for layer, keys, values in captured}
                    expected = oracle(ids[row].tolist())[-logits.shape[1] :]
                    torch.testing.assert_close(logits[row], expected, **CLOSE)
        return calls


@pytest.mark.parametrize("name", ["kivi", "vase-attnv + quantize"])
def test_beams(monkeypatch, llama, plain, name):
    tape = Tape(monkeypatch, llama)
    with kvcompress.apply(llama, CONFIGS[name]) as handle, tape.recording():
        generate(llama, distinct(26), 10, num_beams=3)
        keys = handle.cache.identities.keys
    assert tape.play(plain, CONFIGS[name], keys) == 10
    orders = [argument.tolist() for kind, argument in tape.events if kind == "reorder_cache"]
    assert any(order != [0, 1, 2] for order in orders)


@pytest.mark.parametrize(("name", "alike"), [*((name, False) for name in GROWING), ("quantize", True)])
def test_assisted_generation(monkeypatch, llama, plain, name, alike):
    """Drafts that are rejected are taken back from the ring."""
    assistant = copy.deepcopy(plain) if alike else tiny("llama", seed=1, num_hidden_layers=1)
    assistant.generation_config.update(
        num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    tape = Tape(monkeypatch, llama)
    with kvcompress.apply(llama, GROWING[name]) as handle, tape.recording():
        generate(llama, distinct(26), 16, assistant_model=assistant)
        keys = handle.cache.identities.keys
    calls = tape.play(plain, GROWING[name], keys)
    assert tape.cropped > (0 if alike else 20)
    assert calls <= 16


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What a recipe takes in the tiny model: 2 layers, 2 KV heads, 4 heads, 16 channels of keys and 16 of values.

    Attributes:
        high: slots in full precision, those of the ring not counted.
        pools: of each pool of codes the slots, and per token of it the bytes of codes and the numbers beside them.
        window: queries. statistics, sums: numbers kept per slot; sums are float32 whatever the type of the slots.
    """

    config: Any
    high: int
    pools: tuple[tuple[int, int, int], ...]
    window: int = 0
    statistics: int = 1
    sums: int = 0
    reserve: int | None = None

    def bytes(self, rows: int, number: int) -> int:
        """Given the bytes of a number in the slots."""
        beside = 4 + self.statistics * number + 4 * self.sums
        head = (self.high + 2 * self.config.buffer) * (32 * number + beside)
        for slots, codes, numbers in self.pools:
            head += slots * (codes + numbers * number + beside)
        return 2 * rows * (2 * head + 4 * self.window * 16 * number)


GROUPS = quantize({"bits": 2, "group": 8, "rotate": True})
# Recipes that evict have K = 20 and B = 4, so 16 old tokens: 4 sinks and 3% of K, rounded down, keep precision, or
# 2 sinks and 10%. Those that grow make room for 67 tokens, 60 old ones among them: 2 + 6 keep precision.
SIZES = {
    "vase-attnv + int4": Size(recipe(INT4, "vase-attnv"), 4, ((12, 16, 4),), window=4),
    "h2o + ladder": Size(H2O, 2, ((3, 32, 4), (6, 16, 4), (5, 12, 4)), sums=1),
    "snapkv + int2 in groups": Size(recipe(GROUPS, "snapkv"), 4, ((12, 8, 8),), window=4),
    "streaming-llm + fp8": Size(recipe(quantize("fp8", share=0), "streaming-llm"), 4, ((12, 32, 2),), statistics=0),
    "int4": Size(recipe(INT4), 8, ((52, 16, 4),), reserve=67),
    "kivi": Size(recipe(KIVI), 0, ((60, 8, 10),), statistics=0, reserve=67),
    "ladder": Size(recipe(LADDER), 6, ((12, 32, 4), (24, 16, 4), (18, 12, 4)), reserve=67),
}


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "stored as float16"])
@pytest.mark.parametrize("name", SIZES)
def test_bytes_follow_the_formula(name, kind):
    """From the first call to the last that fits, and they are the bytes of the tensors held."""
    size, model = SIZES[name], tiny("llama")
    config = size.config.with_fields({"storage": "float16"}) if "stored" in kind else size.config
    if kind.endswith("float16"):
        model = model if "stored" in kind else model.to(getattr(torch, kind))
    ids = torch.randint(2, 127, (3, 67), generator=torch.Generator().manual_seed(0))
    with kvcompress.apply(model, config):
        cache = CompressedCache(model, config, reserve=size.reserve)
        for start, stop in ((0, 3), (3, 4), (4, 40), (40, 66), (66, 67)):
            feed(model, cache, ids[:, start:stop])
            assert cache.stats().bytes_held == held_bytes(cache) == size.bytes(3, 4 if kind == "float32" else 2)


@pytest.mark.parametrize("name", ["vase-attnv + int4", "h2o + ladder"])
def test_bytes_are_constant_over_twenty_times_the_budget(llama, name):
    config, seen = SIZES[name].config, 0
    ids = torch.randint(2, 127, (2, 21 * 20), generator=torch.Generator().manual_seed(0))
    with kvcompress.apply(llama, config):
        cache = CompressedCache(llama, config)
        while seen < ids.shape[1]:
            count = (1, 17, 9, 22)[seen % 4]
            feed(llama, cache, ids[:, seen : seen + count])
            seen += count
            assert cache.stats().bytes_held == held_bytes(cache) == SIZES[name].bytes(2, 4)
            assert max(cache.stats().tokens_kept) < 24


@pytest.mark.parametrize(
    ("name", "reserve"),
    [("quantize", 1), ("quantize", 67), ("ladder", 67), ("ladder", 100), ("kivi", 1), ("kivi", 100)],
)
def test_a_growing_cache_grows_in_blocks_unless_room_is_reserved(monkeypatch, llama, name, reserve):
    """What is copied when the cache grows is what it held: the logits are those of a cache that need not grow."""
    monkeypatch.setattr(cache_module, "_GROWTH", 24)
    config, ids = GROWING[name], torch.randint(2, 127, (2, 108), generator=torch.Generator().manual_seed(1))
    with kvcompress.apply(llama, config):
        caches = [CompressedCache(llama, config), CompressedCache(llama, config, reserve=reserve)]
        sizes: list[list[int]] = [[], []]
        for start in range(0, 108, 9):
            logits = [feed(llama, cache, ids[:, start : start + 9]) for cache in caches]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
            for cache, held in zip(caches, sizes, strict=True):
                held.append(cache.stats().bytes_held)
    for held in sizes:
        assert held == sorted(held)
        assert len(set(held)) <= 6
    assert len(set(sizes[0])) >= 3
    assert len(set(sizes[1][: reserve // 9])) <= 1
    if reserve == 100:
        assert sizes[1][0] < sizes[0][-1]
