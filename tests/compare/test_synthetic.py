"""Eviction against quantization at equal bytes on made-up caches with skewed value ranges (VASE section 6.4)."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from kvcompress.bench.precision import (
    correlation,
    made_up_layer,
    output_errors,
    range_and_error,
    rank_correlation,
    saved_by_full_precision,
    squared_error,
)
from kvcompress.kernels.value_statistics import value_statistic
from kvcompress.quant.uniform import Uniform

SIGMAS = (0.25, 0.5, 1.0)


def layers(sigma: float, count: int = 3, **settings: float):
    return [made_up_layer(tokens=768, sigma=sigma, seed=seed, **settings) for seed in range(count)]


def test_correlations_are_those_of_scipy():
    layer = made_up_layer(tokens=200, seed=5)
    spread, error = value_statistic(layer.values, "range"), squared_error(layer.values, Uniform(bits=4))
    x, y = spread.flatten().numpy(), error.flatten().numpy()
    assert correlation(spread, error) == pytest.approx(pearsonr(x, y).statistic, abs=1e-6)
    assert rank_correlation(spread, error) == pytest.approx(spearmanr(x, y).statistic, abs=1e-3)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_value_range_orders_tokens_by_their_error(sigma, group, bits):
    """Spearman, since the error grows with the square of the range; the published check finds 0.95 and more."""
    for layer in layers(sigma):
        found = range_and_error(layer.values, Uniform(bits=bits, group=group))
        assert found["spearman"] > (0.97 if group is None else 0.9)
        assert found["pearson"] > 0.6


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("share", [0.05, 0.25])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_full_precision_for_the_widest_saves_what_the_ranges_predict(sigma, share, bits):
    for layer in layers(sigma):
        left = saved_by_full_precision(layer.values, Uniform(bits=bits), share)
        assert left["range"] == pytest.approx(left["predicted"], rel=0.06)
        # Random tokens save their own share, no more: a few wide ones decide how far off that is in one draw.
        assert left["random"] == pytest.approx(1 - share, abs=0.08)
        assert left["oracle"] <= left["range"] < left["random"]
        assert left["range"] - left["oracle"] < 0.25 * (left["random"] - left["oracle"])


@pytest.mark.parametrize("sigma", SIGMAS)
def test_few_bits_for_many_tokens_beat_many_bits_for_few(sigma):
    """At a tenth and a fifth of the bytes: evicting to 8 or 4 bits keeps two or four times the tokens."""
    for layer in layers(sigma):
        for share in (0.1, 0.2):
            errors = output_errors(layer, share)
            assert errors["evict + int8"] < errors["evict"]
            assert errors["evict + int4"] < errors["evict"]


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_ladder_beats_every_single_rung(sigma):
    """The allocation of least predicted error, where both eviction and quantization are possible."""
    for layer in layers(sigma):
        for share in (0.2, 0.3):
            errors = output_errors(layer, share)
            others = {name: error for name, error in errors.items() if name != "ladder"}
            assert errors["ladder"] < min(others.values())


def test_every_method_gets_better_with_bytes():
    for layer in layers(0.5):
        few, many = output_errors(layer, 0.15), output_errors(layer, 0.6)
        assert all(many[name] <= few[name] * 1.0001 for name in few)


def test_where_attention_is_flat_quantization_beats_eviction():
    """Without tokens that stand out, nothing can be dropped: all of them in 4 bits are better than a third of them."""
    for layer in layers(0.25, sharpness=0.3):
        errors = output_errors(layer, 0.3)
        assert errors["int4 + fp16"] < 0.1 * errors["evict"]


def test_where_attention_is_sharp_eviction_beats_quantization():
    """With few tokens that matter, all others can go, and what is left is exact."""
    for layer in layers(0.25, sharpness=8.0):
        errors = output_errors(layer, 0.6)
        assert errors["evict"] < errors["int4 + fp16"]


def test_errors_are_zero_when_everything_fits():
    layer = made_up_layer(tokens=128)
    errors = output_errors(layer, 1.0)
    assert errors["evict"] == errors["evict-vase"] == errors["ladder"] == 0.0
    assert errors["int4 + fp16"] == 0.0
    assert torch.tensor(errors["evict + int8"]) > 0
