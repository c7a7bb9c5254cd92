"""The torch references of the kernels against float64 loops, on data and shapes chosen to hurt."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels import slot_attention as slot_attention_module
from kvcompress.kernels import window_scores
from kvcompress.kernels.leverage_scores import leverage_scores
from kvcompress.kernels.redundancy import mean_similarity
from kvcompress.kernels.replace_slots import Replacement, plan_replacement, replace_slots, take
from kvcompress.kernels.slot_attention import attention_mass, attention_reference, slot_attention
from kvcompress.kernels.value_statistics import value_statistic

ROWS, KV_HEADS = 2, 2
EPS = float(torch.finfo(torch.float32).eps)

# (group, head_dim, N): odd groups, dims that are no power of two, lengths around a block border.
SHAPES = [(1, 16, 1), (2, 20, 63), (3, 64, 65), (5, 80, 63), (8, 16, 65)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "g{}-d{}-n{}".format(*shape))
# Normal noise alone hides wrong offsets, scales and padding.
KINDS = ["normal", "offset", "constant", "outlier", "zero", "large"]
kinds = pytest.mark.parametrize("kind", KINDS)


def data(kind, *shape, seed=0):
    normal = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "offset":
        return 5 + normal.sigmoid()
    if kind == "constant":
        return torch.full(shape, 5.5)
    if kind == "outlier":
        normal[..., -1, 0] = 6e4
        return normal
    return {"normal": normal, "zero": torch.zeros(shape), "large": normal * 50}[kind]


def double(tensor):
    return tensor.double().numpy()


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def close(ours, expected, tolerance):
    assert ours.shape == expected.shape
    assert torch.isfinite(ours).all()
    np.testing.assert_allclose(double(ours), expected, rtol=1e-5, atol=tolerance)


def probability_error(queries, keys, scaling):
    """In float32 a logit of size x is known to about x eps, and a probability moves at most as its logit does."""
    largest_logit = float(queries.norm(dim=-1).max() * keys.norm(dim=-1).max()) * scaling
    return 8 * EPS * (1 + largest_logit)


@kinds
@shapes
def test_window_scores(shape, kind):
    group, dim, length = shape
    queries, keys = data(kind, ROWS, KV_HEADS * group, 7, dim), data(kind, ROWS, KV_HEADS, length, dim, seed=1)
    scaling = dim**-0.5
    ours = window_scores.window_scores(queries, keys, scaling)
    expected = np.zeros((ROWS, KV_HEADS, group, length))
    for row in range(ROWS):
        for head in range(KV_HEADS * group):
            for query in double(queries[row, head]):
                logits = double(keys[row, head // group]) @ query * scaling
                expected[row, head // group, head % group] += softmax(logits) / 7
    close(ours, expected, probability_error(queries, keys, scaling))
    np.testing.assert_allclose(double(ours.sum(-1)), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_window_scores_compute_in_float32(dtype):
    """4,096 nearly equal scores: rounded to bfloat16 they would tie at the cut (VASE section 10, row 19)."""
    queries, keys = data("normal", 1, 1, 3, 16).to(dtype), 0.05 * data("normal", 1, 1, 4096, 16, seed=1)
    keys = keys.to(dtype)
    ours = window_scores.window_scores(queries, keys, 0.25)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, window_scores.window_scores(queries.float(), keys.float(), 0.25))
    assert len(set(ours.flatten().tolist())) > 4000


@pytest.mark.parametrize("elements", [1, 2 * 7 * 33, 3 * 2 * 7 * 33, 2 * 3 * 2 * 7 * 33])
def test_window_scores_in_slices(monkeypatch, elements):
    queries, keys = data("normal", 5, 6, 7, 20), data("normal", 5, 3, 33, 20, seed=1)
    whole = window_scores.window_scores(queries, keys, 0.2)
    monkeypatch.setattr(window_scores, "_SLICE_ELEMENTS", elements)
    largest_slice, softmax_of = 0, torch.softmax

    def measured(logits, **kwargs):
        nonlocal largest_slice
        largest_slice = max(largest_slice, logits.numel())
        return softmax_of(logits, **kwargs)

    monkeypatch.setattr(torch, "softmax", measured)
    torch.testing.assert_close(window_scores.window_scores(queries, keys, 0.2), whole)
    # Never more than was allowed, except that one head is the least (VASE section 10, row 17).
    assert 0 < largest_slice <= max(elements, 2 * 7 * 33)


@kinds
@pytest.mark.parametrize("dim", [2, 16, 20, 64, 80])
@pytest.mark.parametrize("statistic", ["range", "absmax", "l2", "var"])
def test_value_statistic(statistic, kind, dim):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = data(kind, ROWS, KV_HEADS, 9, dim).to(dtype)
        ours = value_statistic(values, statistic)
        assert ours.dtype == torch.float32
        for vector, found in zip(double(values).reshape(-1, dim), ours.flatten().tolist(), strict=True):
            mean = sum(vector) / dim
            expected = {
                "range": max(vector) - min(vector),
                "absmax": max(abs(vector)),
                "l2": sum(vector**2) ** 0.5,
                "var": sum((vector - mean) ** 2) / (dim - 1),
            }[statistic]
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_value_statistic_worked_and_saturating():
    assert float(value_statistic(torch.tensor([-1.0, 0.0, 3.0]), "range")) == 4
    assert float(value_statistic(torch.full((4,), 7.5), "range")) == 0
    # Infinity is what marks the protected; a finite vector, however wide, must not reach it.
    wide = torch.tensor([3e38, -3e38, 3e38])
    for statistic in ("range", "absmax", "l2", "var"):
        assert 2e38 < float(value_statistic(wide, statistic)) < float("inf")


@kinds
@shapes
@pytest.mark.parametrize("rank", [None, 1, 20])
def test_leverage_scores(shape, kind, rank):
    _, dim, length = shape
    value_dim = dim // 2
    keys, values = data(kind, ROWS, KV_HEADS, length, dim), data(kind, ROWS, KV_HEADS, length, value_dim, seed=1)
    projection = None if rank is None else data("normal", ROWS, 1, dim, rank, seed=2)
    ours = leverage_scores(keys, values, projection)
    expected = np.zeros(ours.shape)
    for row in range(ROWS):
        matrix = np.eye(dim) if projection is None else double(projection[row, 0])
        for head in range(KV_HEADS):
            for i in range(length):
                key, value = double(keys[row, head, i]), double(values[row, head, i])
                expected[row, head, i] = sum((key @ matrix) ** 2) * sum((value @ matrix[:value_dim]) ** 2)
            expected[row, head] /= expected[row, head].sum() or 1
    close(ours, expected, tolerance=1e-6)


def test_leverage_scores_worked_zero_and_huge():
    keys, values = torch.tensor([[1.0, 0], [2, 0], [0, 3]]), torch.tensor([[1.0, 1], [0, 1], [1, 0]])
    keys, values = keys.reshape(1, 1, 3, 2), values.reshape(1, 1, 3, 2)
    expected = torch.tensor([2, 4, 9]) / 15
    torch.testing.assert_close(leverage_scores(keys, values, None)[0, 0], expected)
    torch.testing.assert_close(leverage_scores(keys, values, torch.eye(2)[None, None])[0, 0], expected)
    # The squares and products of these over- and underflow float32, their ratios don't.
    torch.testing.assert_close(leverage_scores(keys * 1e30, values * 1e-25, None)[0, 0], expected)
    assert leverage_scores(torch.zeros_like(keys), values, None).tolist() == [[[0, 0, 0]]]
    assert leverage_scores(keys, torch.zeros_like(values), None).tolist() == [[[0, 0, 0]]]


@kinds
@shapes
def test_mean_similarity(shape, kind):
    _, dim, length = shape
    keys = data(kind, ROWS, KV_HEADS, length, dim)
    ours = mean_similarity(keys)
    expected = np.zeros(ours.shape)
    for row in range(ROWS):
        for head in range(KV_HEADS):
            unit = [key / (np.sqrt(sum(key**2)) + 1e-8) for key in double(keys[row, head])]
            for i in range(length):
                expected[row, head, i] = sum(unit[i] @ unit[j] for j in range(length) if j != i) / length
    close(ours, expected, tolerance=1e-5)


def test_mean_similarity_worked():
    keys = torch.tensor([[1.0, 0], [1, 0], [0, 1]]).reshape(1, 1, 3, 2)
    torch.testing.assert_close(mean_similarity(keys)[0, 0], torch.tensor([1 / 3, 1 / 3, 0]))


def attend_by_hand(queries, keys, values, mask, scaling, softcap, sinks):
    """One query head and one query at a time, in float64; returns outputs and probabilities."""
    rows, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros((rows, heads, length, values.shape[-1]))
    seen = np.zeros((rows, heads, length, keys.shape[2]))
    allowed = np.ones(seen.shape, bool) if mask is None else np.broadcast_to(mask.numpy(), seen.shape)
    for row, head, q in np.ndindex(rows, heads, length):
        visible = np.flatnonzero(allowed[row, head, q])
        logits = double(keys[row, head // group])[visible] @ double(queries[row, head, q]) * scaling
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if len(visible):
            extra = [] if sinks is None else [double(sinks)[head]]
            seen[row, head, q, visible] = softmax(np.append(logits, extra))[: len(visible)]
            out[row, head, q] = seen[row, head, q, visible] @ double(values[row, head // group])[visible]
    return out, seen


def attention_inputs(shape, kind, length, masked):
    group, dim, slots = shape
    queries = data(kind, ROWS, KV_HEADS * group, length, dim)
    keys, values = data(kind, ROWS, KV_HEADS, slots, dim, seed=1), data("offset", ROWS, KV_HEADS, slots, dim, seed=2)
    mask = None
    if masked:
        mask = torch.rand(ROWS, 1, length, slots, generator=torch.Generator().manual_seed(3)) < 0.6
        mask[0, 0, 0] = False  # a query that may look nowhere, e.g. a padding token
    return queries, keys, values, mask


@pytest.mark.parametrize("kind", ["normal", "offset", "constant", "zero"])
@shapes
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("option", ["plain", "mask", "softcap", "sinks", "all"])
def test_attention(shape, kind, length, option):
    queries, keys, values, mask = attention_inputs(shape, kind, length, masked=option in ("mask", "all"))
    softcap = 3.0 if option in ("softcap", "all") else None
    sinks = torch.linspace(-2, 4, queries.shape[1]) if option in ("sinks", "all") else None
    arguments = (queries, keys, values, mask, queries.shape[-1] ** -0.5, softcap, sinks)
    out, probabilities = attend_by_hand(*arguments)
    ours, seen = attention_reference(*arguments)
    error = probability_error(queries, keys, arguments[4])
    close(seen, probabilities, error)
    close(ours, out, error * 6)  # values are at most 6
    close(slot_attention(*arguments), out, error * 6)
    mass = attention_mass(queries, keys, mask, *arguments[4:])
    close(mass, probabilities.reshape(ROWS, KV_HEADS, shape[0], length, -1).mean(2).sum(2), error * length)


@pytest.mark.parametrize("kind", ["outlier", "large"])
def test_attention_with_extreme_logits(kind):
    """Logits far apart: all mass on one key, and no overflow on the way."""
    queries, keys, values, _ = attention_inputs((2, 16, 33), kind, 3, masked=False)
    out, _ = attend_by_hand(queries, keys, values, None, 1.0, None, None)
    tolerance = min(6 * probability_error(queries, keys, 1.0), 0.1)
    close(attention_reference(queries, keys, values, None, 1.0)[0], out, tolerance)
    close(slot_attention(queries, keys, values, None, 1.0), out, tolerance)


def test_attention_hides_garbage_behind_the_mask_but_no_other_nan():
    queries, keys, values, _ = attention_inputs((2, 16, 9), "normal", 1, masked=False)
    mask = torch.ones(ROWS, 1, 1, 9, dtype=torch.bool)
    mask[..., 5:] = False
    expected = attention_reference(queries, keys[:, :, :5], values[:, :, :5], None, 0.25)[0]
    keys[:, :, 5:] = torch.nan
    torch.testing.assert_close(attention_reference(queries, keys, values, mask, 0.25)[0], expected)
    queries[1, 3] = torch.nan
    for given_mask in (mask[..., :5], None):
        out, seen = attention_reference(queries, keys[:, :, :5], values[:, :, :5], given_mask, 0.25)
        assert out[1, 3].isnan().all()
        assert not out[0].isnan().any()
        assert seen[1, 3].isnan().all()


def test_attention_keeps_the_dtype_of_the_queries():
    queries, keys, values, mask = attention_inputs((2, 16, 9), "normal", 1, masked=True)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = [tensor.to(dtype) for tensor in (queries, keys, values)]
        out, seen = attention_reference(*rounded, mask, 0.25)
        assert (out.dtype, seen.dtype) == (dtype, torch.float32)
        expected, _ = attend_by_hand(*rounded, mask, 0.25, None, None)
        close(out, expected, tolerance=6 * torch.finfo(dtype).eps)
        close(slot_attention(*rounded, mask, 0.25), expected, tolerance=6 * 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("mask_rows", [None, 1, 6])
@pytest.mark.parametrize("elements", [1, 2 * ROWS * KV_HEADS * 3 * 17])
def test_attention_mass_in_slices(monkeypatch, elements, mask_rows):
    queries, keys, _, _ = attention_inputs((3, 20, 17), "normal", 6, masked=False)
    mask = None
    if mask_rows is not None:
        mask = torch.rand(ROWS, 1, mask_rows, 17, generator=torch.Generator().manual_seed(4)) < 0.5
    _, probabilities = attend_by_hand(queries, keys, keys, mask, 0.3, None, None)
    monkeypatch.setattr(slot_attention_module, "_SLICE_ELEMENTS", elements)
    sizes, reference = [], attention_reference

    def measured(part, *rest):
        sizes.append(part.shape[2])
        return reference(part, *rest)

    monkeypatch.setattr(slot_attention_module, "attention_reference", measured)
    mass = attention_mass(queries, keys, mask, 0.3)
    assert sizes == ([1] * 6 if elements == 1 else [2] * 3)
    close(mass, probabilities.reshape(ROWS, KV_HEADS, 3, 6, 17).mean(2).sum(2), tolerance=1e-5)


@given(st.data())
def test_plan_replacement(data):
    """Every arrival lands in its own slot, and no token that stays is moved or overwritten."""
    slots, arrivals = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    leaves = [data.draw(st.sets(st.integers(0, slots - 1), max_size=min(slots, arrivals))) for _ in range(3)]
    orders = [data.draw(st.permutations(range(arrivals))) for _ in leaves]
    comes = [set(order[: len(gone)]) for order, gone in zip(orders, leaves, strict=True)]
    width = data.draw(st.integers(max(map(len, leaves)), min(slots, arrivals)))
    plan = plan_replacement(_flags(leaves, slots, inside=False), _flags(comes, arrivals, inside=True), width)
    assert plan.slots.shape == plan.arrivals.shape == plan.live.shape == (1, 3, width)
    for head in range(3):
        # A stable sort: free slots and arrivals first, all in ascending order.
        assert plan.slots[0, head].tolist() == sorted(range(slots), key=lambda i: i not in leaves[head])[:width]
        assert plan.arrivals[0, head].tolist() == sorted(range(arrivals), key=lambda i: i not in comes[head])[:width]
        live = plan.live[0, head]
        assert set(plan.slots[0, head][live].tolist()) == leaves[head]
        assert set(plan.arrivals[0, head][live].tolist()) == comes[head]


def _flags(members, size, inside):
    return torch.tensor([[[(i in chosen) == inside for i in range(size)] for chosen in members]], dtype=torch.bool)


@pytest.mark.parametrize("tail", [(), (4,), (2, 3)])
def test_take(tail):
    pool = torch.randn(2, 3, 5, *tail)
    index = torch.tensor([[[0, 4], [3, 3], [2, 0]], [[1, 2], [4, 0], [3, 4]]])
    taken = take(pool, index)
    for row, head, i in np.ndindex(2, 3, 2):
        assert torch.equal(taken[row, head, i], pool[row, head, int(index[row, head, i])])


@pytest.mark.parametrize("tail", [(), (4,)])
def test_replace_slots(tail):
    pool = torch.arange(2 * 3 * 5).reshape(2, 3, 5, *[1] * len(tail)).expand(2, 3, 5, *tail).contiguous()
    before, address = pool.clone(), pool.data_ptr()
    victims = torch.tensor([[[0, 4], [3, 1], [2, 0]], [[1, 2], [4, 0], [3, 4]]])
    rows = -torch.arange(1, 13).reshape(2, 3, 2, *[1] * len(tail)).expand(2, 3, 2, *tail)
    live = torch.tensor([True, False]).expand(2, 3, 2)
    replace_slots(pool, Replacement(victims, victims, live), rows)
    assert pool.data_ptr() == address
    for row, head, slot in np.ndindex(2, 3, 5):
        written = [rows[row, head, 0]] if int(victims[row, head, 0]) == slot else []
        expected = written[0] if written else before[row, head, slot]
        assert torch.equal(pool[row, head, slot], expected)
