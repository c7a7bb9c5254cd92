"""The figures of a comparison, checked against other ways to compute them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny import prompt, tiny
from transformers import DynamicCache

import kvcompress
from kvcompress import compare as compare_module
from kvcompress.compare import block_bootstrap_error, compare, comparison_configs
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.model import cache_keyword
from kvcompress.report import format_bytes, spread

NEW = 40


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def configs(*names, **options):
    return comparison_configs(names, budget=24, buffer=8, **options)


def test_full_cache_diverges_from_transformers_only_by_rounding(model):
    outcome = compare(model, prompt(50), configs("full", "snapkv"), max_new_tokens=NEW)
    full = outcome.results[0]
    assert max(full.kl) < 1e-5
    assert all(full.agrees)
    assert full.tokens_kept == 50 + NEW - 1
    assert full.events == 0


def test_reference_is_what_transformers_generates(model):
    outcome = compare(model, prompt(50), configs("snapkv"), max_new_tokens=NEW)
    generated = model.generate(prompt(50), max_new_tokens=NEW, do_sample=False)
    assert outcome.reference.tokens.tolist() == generated[0, 50:].tolist()
    cache = DynamicCache(config=model.config)
    model(generated[:, :-1], **{cache_keyword(model): cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert outcome.reference.kv_bytes[-1] == held == outcome.results[0].bytes_full


def test_divergence_is_that_of_the_logits_under_teacher_forcing(model):
    outcome = compare(model, prompt(50), configs("streaming-llm"), max_new_tokens=NEW)
    tokens = outcome.reference.tokens
    with torch.inference_mode():
        whole = torch.cat([prompt(50), tokens[None, :-1]], dim=1)
        full = model(whole).logits[0, 50:].double().log_softmax(-1)
        with kvcompress.apply(model, "streaming-llm", budget=24, buffer=8) as handle:
            cache = handle.new_cache()
            model(prompt(50), **{cache_keyword(model): cache})
            steps = [model(token[None, None], **{cache_keyword(model): cache}).logits[0, -1] for token in tokens[:-1]]
    other = torch.stack(steps).double().log_softmax(-1)
    expected = (full.exp() * (full - other)).sum(-1)
    result = outcome.results[0]
    torch.testing.assert_close(torch.tensor(result.kl, dtype=torch.float64), expected, atol=1e-5, rtol=1e-3)
    assert result.agrees == (full.argmax(-1) == other.argmax(-1)).tolist()
    assert result.mean_kl.mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert result.mean_kl.mean > 1e-3
    assert len(result.kl) == len(result.kv_bytes) == NEW - 1
    assert result.ratio == result.bytes_full / result.bytes_held
    assert (result.events, result.tokens_kept) == (cache.stats().events[0], cache.stats().tokens_kept[0])


def test_log_probabilities_in_a_file_give_the_same_and_leave_nothing(model, monkeypatch, tmp_path):
    in_memory = compare(model, prompt(50), configs("r-kv"), max_new_tokens=NEW)
    monkeypatch.setattr(compare_module, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    in_file = compare(model, prompt(50), configs("r-kv"), max_new_tokens=NEW)
    assert in_file.results[0].kl == in_memory.results[0].kl
    assert list(tmp_path.iterdir()) == []


def test_too_full_a_disk_is_reported_before_anything_runs(model, monkeypatch):
    monkeypatch.setattr(compare_module, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(KVCompressError, match=r"log-probabilities of 39 tokens take .* free"):
        compare(model, prompt(50), configs("r-kv"), max_new_tokens=NEW)


def test_answer_ends_at_the_end_token_unless_ignored(model):
    tokens = compare(model, prompt(50), comparison_configs(["full"]), max_new_tokens=NEW).reference.tokens
    model.generation_config.eos_token_id = [int(tokens[10]), 99999]
    try:
        first = tokens.tolist().index(int(tokens[10]))
        ended = compare(model, prompt(50), comparison_configs(["full"]), max_new_tokens=NEW)
        assert ended.reference.ended
        assert ended.reference.tokens.tolist() == tokens[: first + 1].tolist()
        whole = compare(model, prompt(50), comparison_configs(["full"]), max_new_tokens=NEW, ignore_eos=True)
        assert whole.reference.tokens.tolist() == tokens.tolist()
        model.generation_config.eos_token_id = int(tokens[0])
        with pytest.raises(KVCompressError, match="ended its answer after one token"):
            compare(model, prompt(50), comparison_configs(["full"]), max_new_tokens=NEW)
    finally:
        model.generation_config.eos_token_id = None


def test_model_is_left_as_it_was_also_after_an_error(model):
    before = model(prompt(20)).logits
    with pytest.raises(KVCompressError):
        compare(model, prompt(50), comparison_configs(["random-prompt"], budget=24, buffer=8), max_new_tokens=NEW)
    assert torch.equal(model(prompt(20)).logits, before)
    kvcompress.apply(model, "full").remove()


def test_ratio_budgets_count_prompt_and_new_tokens(model):
    outcome = compare(model, prompt(50), comparison_configs(["snapkv"], budget=0.5, buffer=8), max_new_tokens=NEW)
    assert outcome.results[0].config.budget == (50 + NEW) // 2


def test_ruled_out_tokens_do_not_make_the_divergence_nan():
    full = torch.tensor([0.5, 0.5, 0.0]).log()
    other = torch.tensor([0.25, 0.75, 0.0]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(compare_module._divergence(full, other)) == pytest.approx(expected, rel=1e-6)


def test_infinite_divergence_is_an_error_not_a_figure(model, monkeypatch):
    monkeypatch.setattr(compare_module, "_divergence", lambda full, other: torch.tensor(torch.inf))
    with pytest.raises(KVCompressError, match="recipe snapkv: the KL divergence at step 1 is inf"):
        compare(model, prompt(50), configs("snapkv"), max_new_tokens=4)


@pytest.mark.parametrize(("count", "block"), [(60, 5), (61, 7), (8, 1), (5, 5), (3, 9)])
def test_bootstrap_error_is_the_limit_of_resampling(count, block):
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator, dtype=torch.float64).cumsum(0)
    block = min(block, count)
    blocks = torch.stack([values.roll(-start)[:block].mean() for start in range(count)])
    # The mean of a resample is that of count / block blocks, each drawn out of all.
    draws = blocks[torch.randint(count, (200_000,), generator=generator)]
    expected = float(draws.std()) / math.sqrt(count / block)
    assert block_bootstrap_error(values.tolist(), block) == pytest.approx(expected, rel=0.02, abs=1e-12)


def test_bootstrap_error_of_independent_values_is_the_textbook_one():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    textbook = float(values.std()) / math.sqrt(4000)
    assert block_bootstrap_error(values.tolist(), 1) == pytest.approx(textbook, rel=1e-3)
    assert block_bootstrap_error(values.tolist(), 16) == pytest.approx(textbook, rel=0.15)
    assert block_bootstrap_error([0.25] * 7, 2) == 0.0


def test_budget_and_overrides_go_where_they_fit():
    full, vase, snap = comparison_configs(
        ["full", "vase-attnv", "snapkv"], budget=200, seed=5, overrides={"value_range.share": 0.5}
    )
    assert (full.budget, vase.budget, snap.budget) == (None, 200, 200)
    assert {config.seed for config in (full, vase, snap)} == {5}
    assert next(stage for stage in vase.stages if stage.stage == "value_range").share == 0.5


@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        (["snapkv", "full", "snapkv"], {}, "'snapkv' is given twice"),
        (["snapk"], {}, "did you mean 'snapkv'"),
        (["snapkv"], {"overrides": {"value_range.share": 0.5}}, "'value_range.share': fits none of the recipes snapkv"),
        (["full"], {"budget": 100}, "'budget': fits none of the recipes full"),
        (["snapkv"], {"budget": 100, "overrides": {"budget": 90}}, "budget: is set twice"),
        (["snapkv"], {"overrides": {"bogus": 1}}, "'bogus': not a field"),
        (["snapkv"], {"budget": 30, "buffer": 30}, "buffer: 30 must be smaller than budget 30"),
    ],
)
def test_impossible_comparisons_are_refused(recipes, options, message):
    with pytest.raises(ConfigError, match=message):
        comparison_configs(recipes, **options)


def test_labels_are_spread_apart_near_their_lines():
    places = spread([0.1, 0.1, 0.1, 0.5, 0.98, 1.0], gap=0.06, lowest=0.0, highest=1.0)
    assert places == pytest.approx([0.04, 0.1, 0.16, 0.5, 0.94, 1.0])
    assert spread([0.0, 0.0], gap=0.1, lowest=0.0, highest=1.0) == pytest.approx([0.0, 0.1])
    crowded = spread([0.0, 0.05, 0.11, 0.12], gap=0.1, lowest=0.0, highest=1.0)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(crowded))


def test_bytes_are_shown_in_the_unit_that_fits():
    assert [format_bytes(size) for size in (10, 1024, 12.34 * 2**20, 1000 * 2**20, 3 * 2**30)] == [
        "10 B",
        "1 KiB",
        "12.3 MiB",
        "1000 MiB",
        "3 GiB",
    ]
