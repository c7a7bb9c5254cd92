"""What survives an event: invariants of every recipe, equivalences between recipes, and the law of sampling."""

import itertools
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_philox import words_by_hand

from kvcompress import load_config, recipe_names, select_tokens

BUDGET, BUFFER = 24, 8
RECIPES = [name for name in recipe_names() if load_config(name).evicts]
every_recipe = pytest.mark.parametrize("name", RECIPES)


def small(name, overrides=None, budget=BUDGET, buffer=BUFFER, **fields):
    return load_config(name, overrides, budget=budget, buffer=buffer, **fields)


def stages_of(name):
    return {stage.stage: stage for stage in load_config(name).stages}


def make(batch=1, kv_heads=2, group=2, length=30, window=BUFFER, dim=16, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(batch, kv_heads, length, dim, generator=g),
        torch.randn(batch, kv_heads, length, dim, generator=g),
    )
    return keys.to(dtype), values.to(dtype), torch.randn(batch, kv_heads * group, window, dim, generator=g).to(dtype)


def kept_positions(selection, positions=None):
    """Positions of the survivors as nested lists, one per sequence and head."""
    if positions is None:
        return selection.keep.tolist()
    return positions.expand(selection.scores.shape).gather(-1, selection.keep).tolist()


@every_recipe
def test_shapes_and_types(name):
    inputs = make(batch=3, dtype=torch.bfloat16)
    copies = [tensor.clone() for tensor in inputs]
    selection = select_tokens(small(name), *inputs, prompt_length=5)
    assert selection.keep.shape == (3, 2, BUDGET - BUFFER)
    assert selection.protected.shape == selection.scores.shape == (3, 2, 30)
    assert [tensor.dtype for tensor in selection] == [torch.int64, torch.bool, torch.float32]
    assert torch.isfinite(selection.scores).all()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


hostile_tensors = st.sampled_from(["normal", "zero", "constant", "one huge", "few levels"])


def hostile(kind, tensor):
    if kind == "one huge":
        tensor[..., -1:, :] = 1e4
        return tensor
    return {
        "normal": tensor, "zero": torch.zeros_like(tensor), "constant": torch.full_like(tensor, 5.5),
        "few levels": tensor.round().clamp(-1, 1),
    }[kind]  # fmt: skip


@settings(max_examples=150)
@given(
    name=st.sampled_from(RECIPES),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 40), st.integers(1, 12)),
    kinds=st.tuples(hostile_tensors, hostile_tensors, hostile_tensors),
    room=st.integers(16, 24),
    buffer=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_kept_tokens_are_distinct_exact_sorted_and_hold_what_is_protected(name, dims, kinds, room, buffer, dtype, seed):
    """Invariants (a) and (b), whatever the data, the order of slots, and the positions that are still there."""
    batch, kv_heads, group, length, window = dims
    inputs = [
        hostile(*pair).to(dtype) for pair in zip(kinds, make(batch, kv_heads, group, length, window, 8), strict=True)
    ]
    config = small(name, budget=room + buffer, buffer=buffer, seed=seed)
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(50, generator=g)[:length] for _ in range(batch * kv_heads)])
    positions = positions.reshape(batch, kv_heads, length)
    selection = select_tokens(config, *inputs, positions=positions, prompt_length=7)
    for row, head in itertools.product(range(batch), range(kv_heads)):
        kept, place = selection.keep[row, head].tolist(), positions[row, head].tolist()
        assert len(kept) == len(set(kept)) == min(length, room)
        assert [place[i] for i in kept] == sorted(place[i] for i in kept)
        protected = set(selection.protected[row, head].nonzero().flatten().tolist())
        assert protected <= set(kept)
        first = 7 if "prompt" in stages_of(name) else 4 if "sinks" in stages_of(name) else 0
        assert {i for i in range(length) if place[i] < first} <= protected


@every_recipe
def test_order_of_slots_does_not_matter(name):
    """Invariant (g), smoothing included (VASE section 10, row 20: smoothing went by slot)."""
    keys, values, queries = make(batch=2, length=28)
    g = torch.Generator().manual_seed(4)
    positions = torch.stack([torch.randperm(60, generator=g)[:28].sort().values for _ in range(4)]).reshape(2, 2, 28)
    order = torch.stack([torch.randperm(28, generator=g) for _ in range(4)]).reshape(2, 2, 28)
    wide = order[..., None].expand(-1, -1, -1, 16)
    shuffled = (keys.gather(2, wide), values.gather(2, wide), queries)
    one = select_tokens(small(name), keys, values, queries, positions=positions, prompt_length=6)
    two = select_tokens(small(name), *shuffled, positions=positions.gather(2, order), prompt_length=6)
    assert kept_positions(one, positions) == kept_positions(two, positions.gather(2, order))
    assert torch.equal(one.scores.gather(2, order), two.scores)
    assert torch.equal(one.protected.gather(2, order), two.protected)


@every_recipe
def test_a_sequence_keeps_the_same_tokens_in_any_batch(name):
    """Invariant (i), and VASE section 10, row 21: one global generator made row 0 depend on the batch."""
    inputs, ids, config = make(batch=3), [11, -5, 2**40], small(name, seed=3)

    def kept(rows, **given):
        return kept_positions(
            select_tokens(
                config, *(t[rows] for t in inputs), sequence_ids=[ids[row] for row in rows], prompt_length=5, **given
            )
        )

    torch.manual_seed(0)
    state = torch.get_rng_state()
    whole = kept([0, 1, 2], layer=2, event=1)
    torch.manual_seed(1)
    for rows in ([0], [1], [2, 0], [1, 2, 0], [2, 2, 2, 2]):
        assert kept(rows, layer=2, event=1) == [whole[row] for row in rows]
    torch.manual_seed(0)
    kept([0, 1, 2])
    assert torch.equal(torch.get_rng_state(), state), "the global generator must not be touched"


@every_recipe
def test_what_changes_the_draw(name):
    keys, values, queries = (tensor.expand(2, *tensor.shape[1:]) for tensor in make(length=40))

    def kept(seed=0, **given):
        return kept_positions(select_tokens(small(name, seed=seed), keys, values, queries, prompt_length=5, **given))

    base = kept(sequence_ids=[1, 1])
    assert base[0] == base[1]
    changes = {
        "seed": kept(seed=1, sequence_ids=[1, 1]),
        "sequence": kept(sequence_ids=[2, 2]),
        "layer": kept(sequence_ids=[1, 1], layer=1),
        "event": kept(sequence_ids=[1, 1], event=1),
    }
    for what, changed in changes.items():
        stages = stages_of(name)
        random = stages.keys() & {"sample", "random", "random_tokens", "leverage"}
        fixed = not random or (what == "event" and random == {"leverage"} and not stages["leverage"].resample)
        assert (changed == base) is fixed, what


def test_the_budget_has_an_effect():
    for name, budget in itertools.product(RECIPES, (16, 24, 48)):
        keep = select_tokens(small(name, budget=budget), *make(length=50), prompt_length=5).keep
        assert keep.shape[-1] == budget - BUFFER


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def snapkv_by_hand(keys, queries, smoothing=5):
    """Scores of one KV head; keys (N, d), queries (group, W, d)."""
    scores = np.zeros(len(keys))
    for head in queries.double().numpy():
        attention = np.mean([softmax(keys.double().numpy() @ q / math.sqrt(keys.shape[1])) for q in head], axis=0)
        scores += np.convolve(attention, np.ones(smoothing) / smoothing, mode="same") / len(queries)
    return scores


def best(numbers, count):
    return sorted(sorted(range(len(numbers)), key=lambda i: (numbers[i], i))[len(numbers) - count :])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 3), (40, 8), (32, 2), (1, 1)])
def test_snapkv(heads, kv_heads):
    """Invariant (f), at every grouping of heads, a group of one included (VASE section 10, row 1)."""
    keys, values, queries = make(batch=2, kv_heads=kv_heads, group=heads // kv_heads)
    unprotected = small("vase-attnv", stages=["attention", "top_k"])
    bare, recipe = (select_tokens(c, keys, values, queries).keep for c in (unprotected, small("snapkv")))
    for row, head in itertools.product(range(2), range(kv_heads)):
        scores = snapkv_by_hand(keys[row, head], queries[row].unflatten(0, (kv_heads, -1))[head])
        assert bare[row, head].tolist() == best(scores, 16)
        scores[:4] = np.inf
        assert recipe[row, head].tolist() == best(scores, 16)


@pytest.mark.parametrize("sinks", [True, False])
def test_all_slots_for_values_is_range_top_k(sinks):
    """Invariant (e): N_v = M leaves nothing to draw."""
    keys, values, queries = make(batch=2)
    name = "vase-attnv" if sinks else "attn-value-sample-nosink"
    keep = select_tokens(small(name, {"value_range.tokens": 16}), keys, values, queries).keep
    for row, head in itertools.product(range(2), range(2)):
        spread = (values[row, head].amax(-1) - values[row, head].amin(-1)).tolist()
        assert keep[row, head].tolist() == best([math.inf] * 4 * sinks + spread[4 * sinks :], 16)


def test_vase_attnv_by_hand():
    """The whole method, from the equations of the notes and a Philox on Python integers."""
    keys, values, queries = make(batch=2, seed=8)
    config = small("vase-attnv", seed=5)
    keep = select_tokens(config, keys, values, queries, sequence_ids=[3, 9], layer=7, event=2).keep
    for row, head in itertools.product(range(2), range(2)):
        spread = (values[row, head].amax(-1) - values[row, head].amin(-1)).tolist()
        protected = set(best([math.inf] * 4 + spread[4:], BUDGET // 4))
        scores = snapkv_by_hand(keys[row, head], queries[row, 2 * head : 2 * head + 2])
        race = {}
        for i in set(range(30)) - protected:
            word = words_by_hand(5, [3, 9][row], 7, head, 2, i, zlib.crc32(b"sample"))[0]
            race[i] = math.log(scores[i]) - math.log(-math.log(((word >> 9) + 0.5) / 2**23))
        drawn = sorted(race, key=race.get)[-(16 - BUDGET // 4) :]
        assert keep[row, head].tolist() == sorted(protected | set(drawn))


WEIGHTS = (0.45, 0.25, 0.15, 0.1, 0.05)


def successive_sampling_law(weights, count):
    """Probability of every set: draw after draw, proportional to the weights that are left."""
    law = dict.fromkeys(itertools.combinations(range(len(weights)), count), 0.0)
    for order in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, sum(weights)
        for i in order:
            probability, left = probability * weights[i] / left, left - weights[i]
        law[tuple(sorted(order))] += probability
    return law


def draw_sets(count, sampler, draws=20_000, kv_heads=1, **fields):
    """Sets drawn for many sequences. One-hot keys, and a query of logarithms, make the attention WEIGHTS."""
    keys = torch.eye(5).expand(draws, kv_heads, 5, 5)
    queries = torch.tensor(WEIGHTS).log().expand(draws, kv_heads, 1, 5)
    stages = [{"stage": "attention", "smoothing": 1}, {"stage": "sample", **sampler}]
    config = {"budget": count + 1, "buffer": 1, "stages": stages, **fields}
    return [
        [tuple(head) for head in row] for row in select_tokens(config, keys, keys, queries, scaling=1.0).keep.tolist()
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_sampling_follows_the_law_of_successive_draws(count, temperature):
    drawn = [row[0] for row in draw_sets(count, {"temperature": temperature}, seed=count)]
    law = successive_sampling_law([w ** (1 / temperature) for w in WEIGHTS], count)
    observed = [drawn.count(chosen) for chosen in law]
    assert stats.chisquare(observed, np.array(list(law.values())) * len(drawn)).pvalue > 0.01
    # The power of the test: inclusion proportional to the weights, the usual misreading, is far off.
    inclusion = [sum(i in chosen for chosen in drawn) / len(drawn) for i in range(5)]
    exact = [sum(p for chosen, p in law.items() if i in chosen) for i in range(5)]
    np.testing.assert_allclose(inclusion, exact, atol=0.015)


def test_softmax_weights_are_the_exponential_of_the_scores():
    drawn = [row[0] for row in draw_sets(2, {"weights": "softmax"})]
    law = successive_sampling_law([math.exp(w) for w in WEIGHTS], 2)
    observed = [drawn.count(chosen) for chosen in law]
    assert stats.chisquare(observed, np.array(list(law.values())) * len(drawn)).pvalue > 0.01


def test_heads_and_neighbouring_sequences_draw_independently():
    drawn = draw_sets(2, {}, kv_heads=2)
    sets = sorted(successive_sampling_law(WEIGHTS, 2))
    for pairs in (drawn, [(a[0], b[0]) for a, b in itertools.pairwise(drawn)]):
        table = np.zeros((10, 10))
        for first, second in pairs:
            table[sets.index(first), sets.index(second)] += 1
        # Rare sets expect fewer than 5 of their pairs, too few for the chi-square approximation.
        often = table.sum(axis=0) > 600
        assert often.sum() >= 6
        assert stats.chi2_contingency(table[often][:, often]).pvalue > 0.01
