"""The invariants of the design under mixed precision: what stays, where it lies, and that codes are final."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_oracle import Lossless, kinds, quantize, recipe, witnesses
from tiny import distinct, feed, left_padded, tiny
from torch import Tensor

import kvcompress
from kvcompress import cache as cache_module
from kvcompress.cache import CompressedCache
from kvcompress.quant.codec import Codec
from kvcompress.stages import Rung, StoreStage

EVICTING = ["vase-attnv", "vase-dkv", "snapkv", "streaming-llm", "h2o", "r-kv", "tova", "cur-dkv"]
LADDER = {"stage": "ladder", "bits": [8, 4, 2], "shares": [0.1, 0.2, 0.4, 0.3]}
STORES: dict[str, dict[str, Any]] = {
    "quantize": quantize("int4", share=0.1, sinks=2),
    "no full precision": quantize("int2", share=0, sinks=0),
    "rotated": quantize({"bits": 4, "rotate": True}, share=0.1, by="random"),
    "ladder": LADDER,
    "ladder by error": {**LADDER, "by": "error"},
}
model_of = cache(tiny)


class LosslessStore(StoreStage):
    """Two rungs that lose nothing, for a third of the tokens each; those of largest value keep their precision."""

    stage: Literal["lossless"] = "lossless"
    rotate: bool = False

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return Rung(Lossless(), Lossless()), Rung(Lossless(rotate=self.rotate), Lossless(rotate=self.rotate))

    @property
    def statistics(self):
        return ("absmax",)

    def divide(self, old: int, budget: int | None) -> tuple[int, ...]:
        return old // 3, (old + 2) // 3, (old + 1) // 3

    def rank(self, tokens, scores):
        return tokens.value_statistic("absmax")


def run(model, config, ids: Tensor, calls: list[int], mask: Tensor | None = None, every: bool = True):
    """Logits of each call, and what was held after each, or the last: per row and layer, a dict of kinds per head."""
    logits, held = [], []
    with kvcompress.apply(model, config):
        cache = CompressedCache(model, config)
        start = 0
        for count in calls:
            stop = start + count
            logits.append(feed(model, cache, ids[:, start:stop], None if mask is None else mask[:, :stop]))
            start = stop
            if every or start == sum(calls):
                held.append([[kinds(cache, n, row) for n in cache.compressed] for row in range(len(cache.rows))])
    return logits, held


def positions(held) -> list:
    return [[[sorted(head) for head in layer] for layer in row] for row in held]


def assert_pools_are_full(cache: CompressedCache) -> None:
    """Every pool of every head holds exactly as many tokens as the layout says, in its first slots."""
    for store in cache.stores:
        for row, state in enumerate(cache.rows):
            counts = cache.layout.divide(state.old)
            assert sum(counts) == state.old
            for rung, count in enumerate(counts):
                used = store.per_slot(rung)["positions"][:, row] >= 0
                if rung == 0:
                    ring = used.clone()
                    ring[..., cache.layout.buffer : cache.layout.buffer + cache.layout.high] = False
                    assert (ring.sum(dim=-1) == state.ring).all()
                    used = used[..., cache.layout.buffer : cache.layout.buffer + cache.layout.high]
                assert used[..., :count].all()
                assert not used[..., count:].any()


@settings(max_examples=18)
@given(
    base=st.sampled_from([None, *EVICTING]),
    store=st.sampled_from(sorted(STORES)),
    buffer=st.integers(1, 6),
    extra=st.integers(15, 20),
    chunks=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    prompt=st.integers(1, 50),
)
def test_length_sinks_and_recent_tokens(base, store, buffer, extra, chunks, prompt):
    """(a) positions are distinct and K - B old ones stay; (b) sinks and the B most recent are always there; (c) the
    length stays in [K, K + B] once K is passed; and events come exactly when they come without a store stage.
    """
    if base is None and store == "ladder by error":
        store = "ladder"
    model, budget = model_of("llama"), buffer + extra
    config = recipe(STORES[store], base, budget, buffer)
    has_sinks = any(stage.stage == "sinks" for stage in config.stages)
    calls = [prompt, *chunks, 1, 1, 1]
    ids = (torch.arange(sum(calls)) % 100 + 9)[None]
    with kvcompress.apply(model, config):
        cache, seen, events = CompressedCache(model, config), 0, 0
        for count in calls:
            before = cache.rows[0].held if cache.rows else 0
            feed(model, cache, ids[:, seen : seen + count])
            seen += count
            state = cache.rows[0]
            if base is None:
                assert state.held == seen
                assert state.ring < 2 * buffer
                assert state.ring >= min(seen, buffer)
            else:
                evicts = before + count >= budget + buffer
                events += evicts
                assert state.held == (budget if evicts else before + count)
                assert state.events == events
                assert state.ring >= min(seen, buffer)
            assert_pools_are_full(cache)
            for layer in cache.compressed:
                for kept in cache.kept_positions(layer).tolist():
                    assert len(set(kept)) == len(kept) == state.held
                    assert set(range(max(0, seen - buffer), seen)) <= set(kept)
                    assert not has_sinks or set(range(min(4, seen))) <= set(kept)


@settings(max_examples=10)
@given(
    base=st.sampled_from([None, "snapkv", "vase-attnv"]),
    prompt=st.integers(1, 40),
    steps=st.integers(1, 12),
    slack=st.integers(0, 20),
)
def test_room_for_everything_changes_nothing(base, prompt, steps, slack):
    """(d) With K at least the length and codes that lose nothing, logits are those of the full cache to rounding."""
    model, ids = model_of("qwen3"), distinct(prompt + steps, seed=prompt)
    calls = [prompt, *[1] * steps]
    config = recipe(quantize(Lossless()), base, max(24, prompt + steps) + slack)
    expected, _ = run(model, "full", ids, calls, every=False)
    logits, held = run(model, config, ids, calls, every=False)
    assert positions(held[-1]) == [[[list(range(prompt + steps))] * 2] * 2]
    assert prompt + steps < 13 or any(kind == 1 for kind in held[-1][0][0][0].values())
    torch.testing.assert_close(torch.cat(logits, dim=1), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("base", "rotate"), [*((base, False) for base in EVICTING), ("vase-attnv", True), ("h2o", True)]
)
def test_codes_that_lose_nothing_change_nothing(base, rotate):
    """At every step of a ragged batch, the hybrid keeps the tokens that eviction alone keeps, with equal logits."""
    model = model_of("llama")
    ids, mask = left_padded([distinct(9 + 21, seed=1), distinct(45 + 21, seed=2)])
    calls = [45, *[1] * 12, 7, 1, 1]
    evicting = kvcompress.load_config(base, budget=20, buffer=4)
    stage = LosslessStore(rotate=rotate)
    expected, kept = run(model, evicting, ids, calls, mask)
    logits, held = run(model, evicting.with_fields({"stages": [*evicting.stages, stage]}), ids, calls, mask)
    for step, (got, wanted) in enumerate(zip(logits, expected, strict=True)):
        assert positions(held[step]) == positions(kept[step])
        real = mask[:, sum(calls[:step]) : sum(calls[: step + 1])].bool()
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-4)
    assert set(held[-1][0][0][0].values()) == {"ring", "full", 1, 2}


@pytest.mark.parametrize(("rank", "rope"), [(32, 8), (32, 32), (24, 8)])
def test_latents_in_codes_that_lose_nothing(rank, rope):
    """Values are channels of the keys, which are rotated as a whole, whatever the sizes of both."""
    model = tiny("deepseek_v3", kv_lora_rank=rank, qk_rope_head_dim=rope, head_dim=rope)
    ids, calls = distinct(60), [30, *[1] * 10, 5, 1]
    evicting = kvcompress.load_config("vase-attnv", budget=20, buffer=4)
    hybrid = evicting.with_fields({"stages": [*evicting.stages, LosslessStore(rotate=True)]})
    expected, kept = run(model, evicting, ids, calls)
    logits, held = run(model, hybrid, ids, calls)
    assert [positions(each) for each in held] == [positions(each) for each in kept]
    torch.testing.assert_close(torch.cat(logits, dim=1), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def final(config, rows: list[int]) -> list:
    """What is held of the given ones of four sequences, in a batch of their own, per row."""
    model, lengths, new = model_of("llama"), [5, 19, 30, 45], 8
    ids, mask = left_padded([distinct(lengths[row] + new, seed=row) for row in rows])
    _, held = run(model, config, ids, [ids.shape[1] - new, *[1] * (new - 3), 3], mask, every=False)
    return held[-1]


@settings(max_examples=6)
@given(
    base=st.sampled_from([None, "vase-attnv", "vase-dkv", "snapkv", "h2o"]),
    store=st.sampled_from(["quantize", "rotated", "ladder"]),
    order=st.permutations(range(4)),
    size=st.integers(2, 3),
)
def test_same_seed_same_tokens_whatever_the_batch(base, store, order, size):
    """(h, i) Each sequence keeps what it keeps alone, each token in the same pool, in any batch and any order."""
    config = recipe(STORES[store], base)
    together = final(config, order[:size])
    for index, row in enumerate(order[:size]):
        assert final(config, [row])[0] == together[index]


def test_random_share_of_a_cache_that_grows_is_keyed_by_the_prompt():
    """(i) The same, for what ``by: random`` draws where nothing is evicted."""
    config = recipe(STORES["rotated"])
    assert final(config, [2])[0] == final(config, [1, 2])[1]


@pytest.mark.parametrize("base", [None, "vase-attnv", "h2o"])
@pytest.mark.parametrize("codec", ["int4", Lossless()], ids=["int4", "lossless"])
def test_row_of_a_ragged_batch_equals_the_sequence_alone(base, codec):
    """(h) Logits too. A code may flip where the batch rounds a vector differently, so those of int4 have to agree in
    nine steps of ten.
    """
    model, config = model_of("llama"), recipe(quantize(codec, share=0.1), base)
    sequences = [distinct(length + 10, seed=length) for length in (7, 33)]
    ids, mask = left_padded(sequences)
    together, _ = run(model, config, ids, [33, *[1] * 10], mask, every=False)
    for row, sequence in enumerate(sequences):
        alone, _ = run(model, config, sequence, [sequence.shape[1] - 10, *[1] * 10], every=False)
        close = [
            torch.allclose(a[0, -1], t[row, -1], rtol=1e-4, atol=1e-4) for a, t in zip(alone, together, strict=True)
        ]
        assert all(close) if codec != "int4" else sum(close) >= 0.9 * len(close)


@settings(max_examples=10)
@given(
    base=st.sampled_from([None, "vase-attnv", "snapkv", "h2o"]),
    store=st.sampled_from(["quantize", "rotated", "ladder"]),
    seed=st.integers(0, 999),
)
def test_slots_permuted_within_their_pools_change_nothing(base, store, seed):
    """(g) An event looks at positions, never at slots: the same tokens go to the same pools, with the same codes."""
    model, config = model_of("llama"), recipe(STORES[store], base)
    ids = torch.cat([distinct(38, seed=1), distinct(38, seed=2)])
    with kvcompress.apply(model, config):
        cache = CompressedCache(model, config, [5, 6])
        feed(model, cache, ids[:, :30])
        while cache.rows[0].ring < 2 * config.buffer - 1:
            feed(model, cache, ids[:, cache.columns : cache.columns + 1])
        other = copy.deepcopy(cache)
        permute_slots(other, torch.Generator().manual_seed(seed))
        next_ids = ids[:, cache.columns : cache.columns + 1]
        logits = [feed(model, each, next_ids) for each in (cache, other)]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
        assert cache.rows[0].ring == config.buffer
        for layer in cache.compressed:
            for row in (0, 1):
                assert kinds(other, layer, row) == kinds(cache, layer, row)
        # Before the first attention of this step, hence bit for bit; a later layer could round differently.
        assert codes_by_position(other, layers=1) == codes_by_position(cache, layers=1)


def permute_slots(cache: CompressedCache, generator: torch.Generator) -> None:
    """Shuffle the old tokens of every pool, in each layer, row and head apart."""
    layout, state = cache.layout, cache.rows[0]
    for store in cache.stores:
        for rung, count in enumerate(layout.divide(state.old)):
            first = 0 if rung else layout.buffer
            for place in torch.cartesian_prod(*map(torch.arange, (len(store.layers), 2, 2))).tolist():
                order = first + torch.randperm(count, generator=generator)
                for tensor in store.per_slot(rung).values():
                    head = tensor[tuple(place)]
                    head[first : first + count] = head[order].clone()


def codes_by_position(cache: CompressedCache, layers: int | None = None) -> dict[tuple, tuple]:
    """(layer, row, head, position) -> (rung, bytes of all parts of keys and values)."""
    found = {}
    for store in cache.stores:
        for rung, codecs in enumerate(store.rungs, start=1):
            pool, raw = store.per_slot(rung), []
            slots = pool["positions"].shape[-1]
            for name, codec in zip(("keys", "values"), codecs, strict=True):
                for part, spec in codec.parts(store.geometry.dims[name], store.geometry.dtype).items():
                    each = pool[f"{name}.{part}"].repeat_interleave(spec.tokens, dim=3).view(torch.uint8)
                    raw.append(F.pad(each, (0, 0, 0, slots - each.shape[3])))
            codes, positions = torch.cat(raw, dim=-1).numpy(), pool["positions"][:layers].numpy()
            for layer, row, head, slot in np.argwhere(positions >= 0).tolist():
                key = (store.layers[layer], row, head, int(positions[layer, row, head, slot]))
                found[key] = (rung, codes[layer, row, head, slot].tobytes())
    return found


KIVI = {**quantize("int2", share=0, sinks=0), "keys": {"codec": "per_channel", "bits": 2, "tokens": 4}}
FINAL = {
    "quantize": (None, STORES["quantize"]),
    "ladder": (None, LADDER),
    "kivi": (None, KIVI),
    "vase-attnv + quantize": ("vase-attnv", STORES["quantize"]),
    "snapkv + ladder by error": ("snapkv", STORES["ladder by error"]),
    "h2o + ladder": ("h2o", LADDER),
}


@pytest.mark.parametrize(
    ("name", "storage"),
    [*((name, "model") for name in FINAL), ("vase-attnv + quantize", "float16")],
)
def test_codes_are_final(monkeypatch, name, storage):
    """From the step that encodes a token to the one that evicts it, its codes are the same bits in the same pool.

    What is encoded are original vectors, never decoded ones, a token is encoded once, at most B rows per head, pool
    and event, and the remembered statistics are those of the original value.
    """
    base, store = FINAL[name]
    model, config = model_of("llama"), recipe(store, base, storage=storage)
    dtype = torch.float32 if storage == "model" else torch.float16
    monkeypatch.setattr(cache_module, "_GROWTH", 24)
    encoded: list[Tensor] = []
    original = Codec.encode

    def encode(self, vectors, dtype):
        encoded.append(vectors.flatten(0, 1))
        return original(self, vectors, dtype)

    monkeypatch.setattr(Codec, "encode", encode)
    steps = 200 if (name, storage) == ("vase-attnv + quantize", "model") else 60
    calls = [30, *[1] * steps]
    ids = torch.randint(2, 127, (2, sum(calls)), generator=torch.Generator().manual_seed(3))
    known: dict[tuple, tuple] = {}
    gone: set[tuple] = set()
    originals: set[bytes] = set()
    values: dict[int, list[Tensor]] = {}
    with kvcompress.apply(model, config):
        cache, start = CompressedCache(model, config, [0, 1]), 0
        for count in calls:
            with witnesses() as captured:
                feed(model, cache, ids[:, start : start + count])
            for layer, *vectors in captured:
                stored = [tensor.to(dtype) for tensor in vectors]
                originals |= {bytes(row.numpy()) for tensor in stored for row in tensor.flatten(0, 2)}
                values.setdefault(layer, []).append(stored[1])
            start += count
            for vectors in encoded:
                assert all(bytes(row.numpy()) in originals for row in vectors.flatten(0, -2))
                assert count > 1 or vectors.shape[-2] <= config.buffer
            if encoded:
                codes = codes_by_position(cache)
                assert all(known.setdefault(key, held) == held for key, held in codes.items())
                assert not gone & codes.keys()
                gone = known.keys() - codes.keys()
                assert base or not gone
            encoded.clear()
        assert_pools_are_full(cache)
        assert_remembered(cache, {layer: torch.cat(parts, dim=2) for layer, parts in values.items()})
    assert len(known) > 2 * 2 * 2 * (steps if base is None else steps // 2)


def assert_remembered(cache: CompressedCache, values: dict[int, Tensor]) -> None:
    """Beside every old token, in codes or not, stands the range of its original value as it was stored."""
    old = slice(cache.layout.buffer, cache.layout.buffer + cache.layout.high)
    for store in cache.stores:
        original = torch.stack([values[layer] for layer in store.layers])
        ranges = (original.float().amax(dim=-1) - original.float().amin(dim=-1)).half().to(original.dtype)  # 11 bits
        for rung in range(len(store.rungs) + 1 if store.pipeline.statistics else 0):
            held = [store.per_slot(rung)[name] for name in ("positions", "statistic.range")]
            place, remembered = held if rung else (each[..., old] for each in held)
            expected = ranges.gather(3, place.clamp_min(0).long())
            assert torch.equal(remembered[place >= 0], expected[place >= 0])
