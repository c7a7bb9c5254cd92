"""Selection where it hurts: the weaknesses listed in section 10 of the VASE notes, public bug reports, wrong calls.

Each test fails on the behaviour that its comment or name describes.
"""

import pytest
import torch

from kvcompress import ConfigError, KVCompressError, NonFiniteError, load_config, recipe_names, select_tokens
from kvcompress.stages import ScoreStage

SINKS = [0, 1, 2, 3]
RECIPES = [name for name in recipe_names() if load_config(name).evicts]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


class Given(ScoreStage):
    """Scores written down by hand, the same for all heads."""

    stage: str = "given"
    nonnegative = True
    numbers: tuple[float, ...]

    def score(self, tokens):
        return torch.tensor(self.numbers).expand(tokens.shape)


def small(name, overrides=None, budget=24, buffer=8, **fields):
    return load_config(name, overrides, budget=budget, buffer=buffer, **fields)


def make(batch=1, kv_heads=2, group=2, length=30, window=8, dim=16):
    g = torch.Generator().manual_seed(0)
    shapes = ((batch, kv_heads, length, dim), (batch, kv_heads, length, dim), (batch, kv_heads * group, window, dim))
    return [torch.randn(shape, generator=g) for shape in shapes]


def peaked(heads, length, spots, dtype=torch.float32):
    """Keys, values and queries whose attention is exactly zero in float32 but for ``spots``: a logit gap of 800."""
    keys, values = torch.zeros(1, heads, length, 8), make(1, heads, 1, length, dim=8)[1].sigmoid()
    keys[:, :, spots, 0] = 800.0
    queries = torch.zeros(1, heads, 4, 8)
    queries[..., 0] = 1.0
    return keys.to(dtype), values.to(dtype), queries.to(dtype)


@dtypes
@pytest.mark.parametrize("smoothing", [1, 5])
def test_row_8_underflowed_weights_are_filled_by_the_most_recent(dtype, smoothing):
    """torch.multinomial returned zero-weight items then, protected ones again among them: 59 distinct of 64."""
    keys, values, queries = peaked(heads=3, length=200, spots=[50], dtype=dtype)
    values[:, :, 100:105] *= 10  # the value slots beside the sinks
    config = small("vase-attnv", {"value_range.tokens": 9, "attention.smoothing": smoothing}, budget=72)
    protected = SINKS + list(range(100, 105))
    drawn = list(range(50 - smoothing // 2, 50 + smoothing // 2 + 1))
    recent = list(range(200 - (64 - len(protected) - len(drawn)), 200))
    for seed in range(3):
        selection = select_tokens(config.with_fields({"seed": seed}), keys, values, queries, scaling=1.0)
        for head in range(3):
            assert selection.protected[0, head].nonzero().flatten().tolist() == protected
            assert selection.keep[0, head].tolist() == sorted(protected + drawn + recent)


@dtypes
@pytest.mark.parametrize("spread", [32, 64])
def test_peaked_attention_never_keeps_a_token_twice(dtype, spread):
    """torch.multinomial kept duplicates in 17 to 100 % of heads here (pytorch issue 50034)."""
    keys, values, queries = (tensor.to(dtype) for tensor in make(batch=2, kv_heads=4, group=1, length=1024, window=1))
    config = load_config("vase-attnv", {"value_range.tokens": 256}, budget=520, buffer=8)
    selection = select_tokens(config, keys, values, queries * spread)
    assert int((selection.scores == 0).sum()) > 1000
    for row in range(2):
        for head in range(4):
            kept = set(selection.keep[row, head].tolist())
            assert len(kept) == 512
            protected = selection.protected[row, head].nonzero().flatten().tolist()
            assert len(protected) == 256
            assert kept >= set(protected)


@pytest.mark.parametrize("positive", [0, 1, 9, 10, 11])
def test_row_9_fewer_positive_weights_than_draws(positive):
    """All weights zero was a RuntimeError thousands of tokens into a generation; n - 1 positives a silent duplicate."""
    keys, values, queries = make(length=40)
    numbers = tuple(1.0 if 10 <= i < 10 + positive else 0.0 for i in range(40))
    config = load_config({"budget": 12, "buffer": 2, "stages": [Given(numbers=numbers), "sample"]})
    keep = select_tokens(config, keys, values, queries).keep
    for kept in keep[0].tolist():
        assert len(set(kept)) == 10
        drawn = [i for i in kept if numbers[i] > 0]
        assert len(drawn) == min(positive, 10)
        assert [i for i in kept if numbers[i] == 0] == list(range(40 - (10 - len(drawn)), 40))


def test_row_9_everything_protected():
    config = small("vase-attnv", {"value_range.tokens": 16})
    selection = select_tokens(config, *make())
    assert int(selection.protected.sum()) == 2 * 16
    for head in range(2):
        assert selection.keep[0, head].tolist() == selection.protected[0, head].nonzero().flatten().tolist()


@pytest.mark.parametrize("tokens", [-1, 0, 17, 1000])
def test_row_10_value_slots_out_of_range_are_refused_at_construction(tokens):
    with pytest.raises(ConfigError, match=r"value_range.*(tokens|protect 17|protect 1000)"):
        small("vase-attnv", {"value_range.tokens": tokens})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", ["keys", "values", "queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_12_non_finite_input_is_named(bad, tensor, dtype):
    """A NaN value ranked as the widest and was protected forever."""
    inputs = dict(zip(("keys", "values", "queries"), (t.to(dtype) for t in make(batch=2)), strict=True))
    inputs[tensor][1, 1, 5, 3] = bad
    positions = torch.arange(30).flip(0) * 10
    where = "query head 1, query 5" if tensor == "queries" else "KV head 1, position 240"
    with pytest.raises(NonFiniteError, match=rf"{tensor}: {bad} at layer 6, .*{where}, channel 3.*check_finite"):
        select_tokens(small("vase-attnv"), **inputs, positions=positions, layer=6)
    # Where the check is off, garbage may choose what it likes but the sinks and the count.
    for name in RECIPES:
        if "sinks" in [stage.stage for stage in load_config(name).stages]:
            keep = select_tokens(small(name, check_finite=False), **inputs, prompt_length=5).keep
            assert all({*SINKS} <= set(kept) and len(set(kept)) == 16 for kept in keep.flatten(0, 1).tolist())


def test_queries_that_no_stage_reads_are_not_checked():
    keys, values, queries = make()
    assert select_tokens(small("vase-dkv"), keys, values, queries * torch.nan).keep.shape == (1, 2, 16)
    assert select_tokens(small("vase-dkv"), keys, values, queries[:, :, :0]).keep.shape == (1, 2, 16)


@pytest.mark.parametrize("name", ["vase-dkv", "cur-dkv"])
@pytest.mark.parametrize("zero", ["keys", "values", "both"])
def test_row_13_all_zero_leverage(name, zero):
    """0 / 0 made NaN scores, silently accepted."""
    keys, values, queries = make()
    keys *= zero == "values"
    values *= zero == "keys"
    selection = select_tokens(small(name), keys, values, queries)
    assert selection.scores.tolist() == [[[0.0] * 30] * 2]
    assert selection.keep[0, 0].tolist() == [*SINKS, *range(18, 30)]


def shuffled(keys, values, queries, config, **given):
    """Selection with the slots in another order, as sets of positions: nothing may hang on slot numbers."""
    order = torch.randperm(keys.shape[2], generator=torch.Generator().manual_seed(1))
    selection = select_tokens(config, keys[:, :, order], values[:, :, order], queries, positions=order, **given)
    return [sorted(order[kept].tolist()) for kept in selection.keep[0]], selection


def test_row_14_no_score_ties_with_the_sinks():
    """Sinks were given the score 1 and the range infinity, which others could reach, and were known by slot."""
    keys, values, queries = make()
    keys[:, :, 20] *= 1e15  # all leverage on one token: its normalized score is 1
    for name in ("vase-dkv", "cur-dkv"):
        kept, selection = shuffled(keys, values, queries, small(name))
        assert float(selection.scores.max()) == 1.0
        assert all({*SINKS, 20} <= set(head) for head in kept)
    # Finite values whose range overflows float32, more of them than there are slots.
    values[:, :, 10:, :8], values[:, :, 10:, 8:] = 3e38, -3e38
    for name in ("value-range-only", "vase-attnv", "attn-value-top"):
        kept, selection = shuffled(keys, values, queries, small(name))
        assert all({*SINKS} <= set(head) for head in kept)
        assert int(selection.protected.sum(-1).max()) <= 6


def test_overflowing_attention_leaves_sinks_and_recent_tokens():
    keys, values, queries = make()
    for name in ("snapkv", "tova", "h2o", "r-kv"):
        kept, _ = shuffled(keys * 1e20, values, queries * 1e20, small(name))
        assert kept[0] == [*SINKS, *range(18, 30)]


def test_row_20_smoothing_goes_by_position():
    """Attention (0.5, 0.1, ...) of positions 0, 10, 20, ... in shuffled slots."""
    slots = torch.tensor([3, 0, 5, 1, 4, 2])
    keys = torch.eye(6)[slots].reshape(1, 1, 6, 6)
    query = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]).log().reshape(1, 1, 1, 6)
    config = {"budget": 4, "buffer": 1, "stages": ["attention", "top_k"]}
    selection = select_tokens(config, keys, keys, query, positions=slots * 10, scaling=1.0)
    expected = torch.tensor([0.14, 0.16, 0.18, 0.10, 0.08, 0.06])[slots]
    torch.testing.assert_close(selection.scores[0, 0], expected)
    assert (slots * 10)[selection.keep[0, 0]].tolist() == [0, 10, 20]


DETERMINISTIC = [
    n for n in RECIPES if not {"sample", "random", "random_tokens"} & {s.stage for s in load_config(n).stages}
]


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_equal_tokens_keep_the_more_recent(name):
    """Where nothing is random and nothing distinguishes tokens, the implementation of a sort must not decide."""
    ones, config = torch.ones(1, 2, 30, 16), small(name)
    if "attention" in [stage.stage for stage in config.stages]:
        config = config.with_fields({"attention.smoothing": 1})  # zeros beyond the ends would distinguish tokens
    kept, _ = shuffled(ones, ones, torch.ones(1, 4, 8, 16), config)
    assert kept == [[*SINKS, *range(18, 30)]] * 2


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 16])
def test_short_prompts_are_left_whole(name, length):
    """Shorter than the window, the budget or nothing at all: a no-op (SnapKV raised, ratios floored to none)."""
    inputs = make(length=length, window=min(8, length + 1))
    assert select_tokens(small(name), *inputs).keep.tolist() == [[list(range(length))] * 2]


def test_the_smallest_budgets():
    keys, values, queries = make()
    smallest = load_config({"budget": 2, "buffer": 1, "stages": ["attention", "top_k"]})
    assert select_tokens(smallest, keys, values, queries).keep.shape == (1, 2, 1)
    with pytest.raises(ConfigError, match=r"budget: 5 leaves 4 slots .* buffer of 1.* sinks protect 5"):
        load_config("snapkv", {"sinks.tokens": 5}, budget=5, buffer=1)


WRONG = [
    ({"keys": torch.ones(2, 30, 16)}, "keys: has shape (2, 30, 16), must have 4 dimensions"),
    ({"values": torch.ones(1, 2, 30, 16, 1)}, "values: has shape (1, 2, 30, 16, 1), must have 4"),
    ({"queries": torch.ones(4, 8, 16)}, "queries: has shape (4, 8, 16), must have 4"),
    ({"keys": torch.ones(1, 2, 30, 16, dtype=torch.int64)}, "keys: has dtype torch.int64 ... floating point"),
    ({"values": torch.ones(1, 2, 29, 16)}, "values: shape (1, 2, 29, 16) ... keys (1, 2, 30, 16) ... tokens"),
    ({"values": torch.ones(1, 1, 30, 16)}, "values: shape (1, 1, 30, 16) ... kv_heads"),
    ({"queries": torch.ones(1, 4, 8, 15)}, "queries: shape (1, 4, 8, 15) ... head_dim"),
    ({"queries": torch.ones(2, 4, 8, 16)}, "queries: shape (2, 4, 8, 16) ... batch"),
    ({"queries": torch.ones(1, 3, 8, 16)}, "queries: 3 heads must be a multiple of the 2 heads of keys"),
    ({"queries": torch.ones(1, 4, 0, 16)}, "queries: ... at least one query, got none"),
    ({"positions": torch.arange(30.0)}, "positions: has dtype torch.float32 ... integer"),
    ({"positions": torch.arange(29)}, "positions: has shape (29,) ... (30,), (1, 30), (1, 2, 30)"),
    ({"positions": torch.arange(30) - 2}, "positions: -2 is negative"),
    ({"positions": torch.arange(30).clamp(max=28)}, "positions: 28 occurs twice in sequence 0, head 0"),
    ({"prompt_length": [3, 4]}, "prompt_length: has shape (2,), must be one number or (1,)"),
    ({"prompt_length": 3.5}, "prompt_length: 3.5 must be whole numbers"),
    ({"sequence_ids": [True]}, "sequence_ids: [True] must be whole numbers"),
    ({"sequence_ids": [1, 2, 3]}, "sequence_ids: has shape (3,), must be one number or (1,)"),
    ({"config": "full"}, "full: has no select stage"),
    ({"config": small("snapkv", budget=0.5)}, "budget: 0.5 is not a number of tokens ... config.resolve"),
    ({"config": "snapvk"}, "'snapvk' is not a packaged recipe"),
    (
        {"config": small("random-prompt"), "prompt_length": 17},
        "budget: 24 leaves 16 slots ... random-prompt protects 17 with a prompt of 17 ... raise budget to at least 25",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_calls_say_what_is_wrong(change, message):
    arguments = dict(zip(("keys", "values", "queries"), make(), strict=True)) | {"config": small("snapkv")} | change
    with pytest.raises(KVCompressError) as caught:
        select_tokens(**arguments)
    for fragment in message.split(" ... "):
        assert fragment in str(caught.value)
