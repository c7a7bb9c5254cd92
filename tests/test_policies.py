"""Every stage against a per-head reference in float64, and the worked examples of the VASE notes."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from test_philox import words_by_hand

from kvcompress import select_tokens
from kvcompress.policies import (
    AccumulatedAttention,
    Attention,
    KeyDiff,
    KeyNorm,
    LastQuery,
    Leverage,
    Prompt,
    Random,
    RandomTokens,
    Recency,
    Recent,
    Redundancy,
    Sample,
    Sinks,
    TopK,
    ValueNorm,
    ValueRange,
)
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage

SEED, BUDGET, BUFFER = 77, 20, 6


class Given(ScoreStage):
    """Scores written down by hand, the same for all heads."""

    stage: str = "given"
    numbers: tuple[float, ...]

    def score(self, tokens):
        return torch.tensor(self.numbers).expand(tokens.shape)


def make_tokens(group=3, length=15, dim=16, seed=0, **changes):
    """Two rows of different layer, sequence and event; two KV heads that hold different positions, with gaps."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(30, generator=g)[:length].sort().values for _ in range(4)])
    fields = {
        "keys": torch.randn(2, 2, length, dim, generator=g),
        "values": torch.randn(2, 2, length, dim // 2, generator=g) + 5,
        "queries": torch.randn(2, 2 * group, BUFFER, dim, generator=g) * 3,
        "positions": positions.reshape(2, 2, length),
        "prompt_length": torch.tensor([9, 3]),
        "sequence": torch.tensor([5, -(2**40)]),
        "layer": torch.tensor([0, 35]),
        "event": torch.tensor([4, 0]),
        "seed": SEED,
        "budget": BUDGET,
        "buffer": BUFFER,
        "scaling": dim**-0.5,
    }
    return TokenStatistics(**{**fields, **changes})


def per_head(tokens, function):
    """function(row, head) for every head, as a numpy array (rows, kv_heads, ...)."""
    rows, kv_heads, _ = tokens.shape
    return np.array([[function(row, head) for head in range(kv_heads)] for row in range(rows)])


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def attention_by_hand(tokens, row, head, window, temperature=1.0):
    """(group, window, N): what each of the last queries of each query head pays to each candidate."""
    keys, group = tokens.keys[row, head].double().numpy(), tokens.queries.shape[1] // tokens.keys.shape[1]
    heads = tokens.queries[row, head * group : (head + 1) * group, -window:].double().numpy()
    return np.array([[softmax(keys @ query * tokens.scaling / temperature) for query in each] for each in heads])


def smooth_by_hand(scores, width, pooling, edges):
    smooth = []
    for middle in range(len(scores)):
        near = [scores[i] for i in range(middle - width // 2, middle + width // 2 + 1) if 0 <= i < len(scores)]
        if pooling == "max":
            smooth.append(max(near))
        else:
            smooth.append(sum(near) / (width if edges == "zero" else len(near)))
    return np.array(smooth)


def uniforms_by_hand(tokens, row, head, stage):
    """The draw of each candidate, keyed by its position."""
    place = (int(tokens.sequence[row]), int(tokens.layer[row]), head, int(tokens.event[row]))
    stream = zlib.crc32(stage.encode())
    words = [words_by_hand(SEED, *place, position, stream) for position in tokens.positions[row, head].tolist()]
    return np.array([((word[0] >> 9) + 0.5) / 2**23 for word in words])


def close(ours, expected, tolerance=1e-5):
    assert ours.dtype == torch.float32
    assert tuple(ours.shape) == expected.shape
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"smoothing": 1},
        {"smoothing": 3, "edges": "shrink"},
        {"smoothing": 7, "pooling": "max", "window": 2},
        {"smoothing": 31},
        {"window": 1, "temperature": 3.0, "group": "max"},
        {"temperature": 0.2, "edges": "shrink", "group": "max"},
    ],
    ids=str,
)
def test_attention(group, settings):
    tokens, stage = make_tokens(group), Attention(**settings)

    def expected(row, head):
        window = min(stage.window or BUFFER, BUFFER)
        attention = attention_by_hand(tokens, row, head, window, stage.temperature)
        smooth = [smooth_by_hand(m, stage.smoothing, stage.pooling, stage.edges) for m in attention.mean(axis=1)]
        return np.mean(smooth, axis=0) if stage.group == "mean" else np.max(smooth, axis=0)

    close(stage.score(tokens), per_head(tokens, expected))
    assert stage.queries_needed(BUFFER) == (stage.window or BUFFER)


def test_attention_worked_smoothing():
    """One-hot keys and a query of logarithms make the attention (0.5, 0.1, ...), zeros outside, divisor 5."""
    keys, query = torch.eye(6).reshape(1, 1, 6, 6), torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]).log()
    config = {"budget": 4, "buffer": 1, "stages": ["attention", "top_k"]}
    scores = select_tokens(config, keys, keys, query.reshape(1, 1, 1, 6), scaling=1.0).scores
    torch.testing.assert_close(scores[0, 0], torch.tensor([0.14, 0.16, 0.18, 0.10, 0.08, 0.06]))
    shrink = Attention(edges="shrink").smooth(torch.tensor([[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]]))
    torch.testing.assert_close(shrink[0], torch.tensor([0.7 / 3, 0.8 / 4, 0.18, 0.10, 0.1, 0.1]))


def test_accumulated_attention():
    tokens = make_tokens(group=2)
    expected = per_head(tokens, lambda r, h: attention_by_hand(tokens, r, h, BUFFER).mean(axis=0).sum(axis=0))
    close(AccumulatedAttention().score(tokens), expected)
    mass = torch.arange(60.0).reshape(2, 2, 15)
    assert torch.equal(AccumulatedAttention().score(make_tokens(mass=mass)), mass)
    assert AccumulatedAttention().needs_mass
    assert not Attention().needs_mass


def test_last_query_is_one_score_for_all_kv_heads():
    tokens = make_tokens(group=3)
    scores = LastQuery().score(tokens)
    every = per_head(tokens, lambda row, head: attention_by_hand(tokens, row, head, 1)[:, 0])
    expected = every.mean(axis=(1, 2))
    close(scores, np.stack([expected, expected], axis=1))
    assert LastQuery().queries_needed(BUFFER) == 1


def test_redundancy():
    tokens = make_tokens()

    def expected(row, head):
        keys = tokens.keys[row, head].double().numpy()
        unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + 1e-8)
        cosines = unit @ unit.T
        np.fill_diagonal(cosines, 0)
        return -softmax(cosines.mean(axis=1))

    close(Redundancy().score(tokens), per_head(tokens, expected))


def test_r_kv_worked():
    """lambda = 0.5 on s = (0.2, 0.3, 0.5) and keys e1, e1, e2."""
    keys = torch.tensor([[1.0, 0], [1, 0], [0, 1]]).reshape(1, 1, 3, 2)
    stages = [Given(numbers=(0.2, 0.3, 0.5), weight=0.5), Redundancy(weight=0.5), TopK()]
    selection = select_tokens({"budget": 3, "buffer": 1, "stages": stages}, keys, keys, keys)
    expected = torch.tensor([-0.0841, -0.0341, 0.1181])
    torch.testing.assert_close(selection.scores[0, 0], expected, atol=5e-5, rtol=0)
    assert selection.keep.tolist() == [[[1, 2]]]


def test_scores_combine_in_order_of_the_recipe():
    a, b, c = (1.0, 2.0, 3.0), (5.0, -1.0, 0.5), (2.0, 2.0, -4.0)
    stages = [
        Given(numbers=a, weight=2),
        Given(numbers=b, weight=-1, combine="multiply"),
        Given(numbers=c, weight=0.5),
        TopK(),
    ]
    keys = torch.ones(1, 1, 3, 2)
    scores = select_tokens({"budget": 3, "buffer": 1, "stages": stages}, keys, keys, keys).scores
    assert scores[0, 0].tolist() == [2 * x * -y + 0.5 * z for x, y, z in zip(a, b, c, strict=True)]


def projection_by_hand(tokens, row, height, rank, resample):
    """G of one row in float64: Box-Muller on the words keyed by the entry; heads never enter."""
    matrix, event = np.zeros((height, rank)), int(tokens.event[row]) if resample else 0
    for i, j in np.ndindex(height, rank):
        place = (int(tokens.sequence[row]), int(tokens.layer[row]), 0, event, i * rank + j)
        first, second = words_by_hand(SEED, *place, zlib.crc32(b"leverage"))[:2]
        u, v = ((first >> 9) + 0.5) / 2**23, ((second >> 9) + 0.5) / 2**23
        matrix[i, j] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v) / np.sqrt(rank)
    return matrix


@pytest.mark.parametrize("resample", [True, False])
@pytest.mark.parametrize("rank", [None, 3, 20])
def test_leverage(rank, resample):
    tokens = make_tokens()

    def expected(row, head):
        keys, values = tokens.keys[row, head].double().numpy(), tokens.values[row, head].double().numpy()
        if rank is not None:
            matrix = projection_by_hand(tokens, row, 16, rank, resample)
            keys, values = keys @ matrix, values @ matrix[:8]
        product = (keys**2).sum(axis=1) * (values**2).sum(axis=1)
        return product / product.sum()

    close(Leverage(rank=rank, resample=resample).score(tokens), per_head(tokens, expected))


def test_leverage_projection_is_shared_by_heads_and_redrawn_as_told():
    tokens = make_tokens()
    twins = {"keys": tokens.keys[:1, :1].expand(2, 2, -1, -1), "values": tokens.values[:1, :1].expand(2, 2, -1, -1)}

    def score(resample, **changes):
        return Leverage(resample=resample).score(make_tokens(**twins, **changes))

    same = {"sequence": torch.tensor([1, 1]), "layer": torch.tensor([2, 2])}
    for resample in (True, False):
        first, second = score(resample, **same, event=torch.tensor([0, 3]))
        assert torch.equal(first[0], first[1])  # heads
        assert torch.equal(first, second) is not resample  # events
        other_layer = score(resample, **{**same, "layer": torch.tensor([2, 3])}, event=torch.tensor([0, 0]))
        assert not torch.equal(other_layer[0], other_layer[1])
        other_sequence = score(resample, **{**same, "sequence": torch.tensor([1, 2])}, event=torch.tensor([0, 0]))
        assert not torch.equal(other_sequence[0], other_sequence[1])
        assert torch.equal(first, other_layer[0])


def test_leverage_projection_has_unit_scale():
    """E |k G|^2 = |k|^2, and its relative standard deviation is sqrt(2 / r)."""
    many, tokens = 4000, make_tokens()
    events = replace(
        tokens, event=torch.arange(many), layer=torch.zeros(many).long(), sequence=torch.zeros(many).long()
    )
    matrix = events.normal_matrix("leverage", 16, 20, resample=True) / 20**0.5
    key = tokens.keys[0, 0, 0]
    norms = (key @ matrix).square().sum(-1).flatten() / key.square().sum()
    assert float(norms.mean()) == pytest.approx(1, abs=0.03)
    assert float(norms.std()) == pytest.approx((2 / 20) ** 0.5, rel=0.06)


def test_scores_of_single_vectors():
    tokens = make_tokens()
    keys, values = tokens.keys.double().numpy(), tokens.values.double().numpy()
    # To 11 significant bits, as float16 has.
    close(KeyNorm().score(tokens), -np.sqrt((keys**2).sum(-1)).astype(np.float16))
    close(ValueNorm().score(tokens), np.sqrt((values**2).sum(-1)).astype(np.float16))
    close(ValueNorm(statistic="range").score(tokens), (values.max(-1) - values.min(-1)).astype(np.float16))
    close(ValueNorm(statistic="absmax").score(tokens), np.abs(values).max(-1).astype(np.float16))
    close(ValueNorm(statistic="var").score(tokens), values.var(-1, ddof=1).astype(np.float16))
    close(Recency().score(tokens), tokens.positions.numpy().astype(float))
    close(Random().score(tokens), per_head(tokens, lambda row, head: uniforms_by_hand(tokens, row, head, "random")))

    def key_diff(row, head):
        anchor = np.mean([key / np.linalg.norm(key) for key in keys[row, head]], axis=0)
        return np.array([-key @ anchor / np.linalg.norm(key) / np.linalg.norm(anchor) for key in keys[row, head]])

    close(KeyDiff().score(tokens), per_head(tokens, key_diff))


def strongest(numbers, already, count):
    """Mask of what is protected already and, until there are ``count``, the largest; ties keep the later one."""
    order = sorted(range(len(numbers)), key=lambda i: (already[i], numbers[i], i), reverse=True)
    chosen = set(order[:count]) | {i for i in range(len(numbers)) if already[i]}
    return [i in chosen for i in range(len(numbers))]


@pytest.mark.parametrize("count", [1, 4, 9, 15, 40])
@pytest.mark.parametrize("statistic", ["range", "absmax", "l2", "var"])
def test_value_range_counts_what_is_protected_already(statistic, count):
    # Whole numbers in few channels: many equal statistics, so that ties decide.
    tokens = make_tokens(values=torch.randint(0, 3, (2, 2, 15, 3), generator=torch.Generator().manual_seed(1)).float())
    already = tokens.positions < 8
    statistics = {
        "range": lambda v: v.max() - v.min(),
        "absmax": lambda v: np.abs(v).max(),
        "l2": lambda v: round(float((v**2).sum()), 6),
        "var": lambda v: round(float(v.var(ddof=1)), 6),
    }

    def expected(row, head):
        spread = [statistics[statistic](vector) for vector in tokens.values[row, head].double().numpy()]
        return strongest(spread, already[row, head].tolist(), count)

    ours = ValueRange(tokens=count, statistic=statistic).protect(tokens, already)
    assert ours.tolist() == per_head(tokens, expected).tolist()


def test_random_tokens():
    tokens = make_tokens()
    already = tokens.positions < 8

    def expected(row, head):
        return strongest(uniforms_by_hand(tokens, row, head, "random_tokens"), already[row, head].tolist(), 6)

    assert RandomTokens(share=0.3).protect(tokens, already).tolist() == per_head(tokens, expected).tolist()


def test_protection_by_position():
    tokens = make_tokens()
    already = torch.zeros(tokens.shape, dtype=torch.bool)
    already[..., 7] = True
    positions = tokens.positions.tolist()
    prompts = tokens.prompt_length.tolist()
    for row in range(2):
        for head in range(2):
            place = positions[row][head]
            found = {
                stage: {place[i] for i in stage.protect(tokens, already)[row, head].nonzero().flatten().tolist()}
                for stage in (
                    Sinks(),
                    Sinks(tokens=11),
                    Prompt(),
                    Recent(tokens=10),
                    Recent(share=0.3),
                    Recent(tokens=99),
                )
            }
            assert found[Sinks()] == {p for p in place if p < 4} | {place[7]}
            assert found[Sinks(tokens=11)] == {p for p in place if p < 11} | {place[7]}
            assert found[Prompt()] == {p for p in place if p < prompts[row]} | {place[7]}
            # The buffer of 6 is counted in, and 0.3 * 20 = 6 is all in the buffer.
            assert found[Recent(tokens=10)] == set(place[-4:]) | {place[7]}
            assert found[Recent(share=0.3)] == {place[7]}
            assert found[Recent(tokens=99)] == set(place)
    assert int(already.sum()) == 4, "stages must not write into the mask they are given"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.3}, {"weights": "softmax", "temperature": 2.0}])
def test_sample_ranks_by_log_weight_plus_gumbel(settings):
    tokens, stage = make_tokens(), Sample(**settings)
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5))
    weights[..., 3] = 0

    def expected(row, head):
        given = weights[row, head].double().numpy()
        with np.errstate(divide="ignore"):
            logs = np.log(given) if stage.weights == "score" else given
        return logs / stage.temperature - np.log(-np.log(uniforms_by_hand(tokens, row, head, "sample")))

    close(stage.rank(weights, tokens), per_head(tokens, expected))
    assert stage.needs_nonnegative_scores is (stage.weights == "score")


def test_top_k_ranks_by_score():
    tokens = make_tokens()
    scores = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(6))
    assert torch.equal(TopK().rank(scores, tokens), scores)
    assert not TopK().needs_nonnegative_scores


@pytest.mark.parametrize(
    ("share", "budget", "tokens"), [(0.25, 4096, 1024), (0.29, 100, 29), (1 / 3, 10, 3), (1, 7, 7)]
)
def test_shares_are_rounded_down(share, budget, tokens):
    assert ValueRange(share=share).reserved(budget) == tokens
    with pytest.raises(ValidationError):
        ValueRange(share=share, tokens=tokens)
