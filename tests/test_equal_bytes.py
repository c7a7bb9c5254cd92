"""Recipes at equal bytes: what is chosen, that it is the most generous choice, and that the bytes come out as said."""

from __future__ import annotations

import json

import pytest
import torch
from text_model import PROMPT, save_text_model
from tiny import feed, prompt, tiny
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.compare import compare, comparison_configs
from kvcompress.equal_bytes import equalize, solve_for_bytes
from kvcompress.errors import ConfigError
from kvcompress.footprint import cache_bytes
from kvcompress.shapes import LayerShape, layer_shapes

SHAPES = [LayerShape(layer, 9, 3, 64, 64) for layer in range(4)]
TOKENS = 700
FULL = cache_bytes(kvcompress.CompressionConfig(), SHAPES, TOKENS, dtype="float16")
EVICTING = ("streaming-llm", "snapkv", "h2o", "r-kv", "vase-attnv", "vase-dkv")
HYBRID = ("vase-attnv-int8", "vase-attnv-int4", "vase-attnv-int2", "vase-dkv-int4", "snapkv-int4")
QUANTIZED = ("int4", "int4-rotated", "int2", "nf4")


def recipe(name: str, buffer: int = 16) -> kvcompress.CompressionConfig:
    return kvcompress.load_config(name, buffer=buffer)


def test_full_takes_its_keys_values_and_positions():
    assert FULL == 4 * TOKENS * 3 * (2 * 64 * 2 + 4)


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("name", EVICTING + HYBRID)
def test_the_budget_is_the_largest_that_fits(name, share):
    solved = solve_for_bytes(recipe(name), SHAPES, TOKENS, int(share * FULL), "float16")
    assert solved.bytes_held == cache_bytes(solved.config, SHAPES, TOKENS, dtype="float16") <= share * FULL
    budget = solved.config.budget
    assert f"budget {budget}" in solved.chosen
    if budget < TOKENS:
        more = solved.config.with_fields({"budget": budget + 1})
        assert cache_bytes(more, SHAPES, TOKENS, dtype="float16") > share * FULL
    else:
        # Everything fits in codes, so the bytes that are left keep tokens in full precision.
        assert "share" in solved.chosen
        assert solved.bytes_held > 0.99 * share * FULL


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_share_in_full_precision_is_the_largest_that_fits(name):
    solved = solve_for_bytes(recipe(name), SHAPES, TOKENS, int(0.5 * FULL), "float16")
    assert 0.99 * 0.5 * FULL < solved.bytes_held <= 0.5 * FULL
    share = solved.config.stages[-1].share
    assert solved.chosen == f"share {share:g}"
    more = solved.config.with_fields({"quantize.share": share + 0.001})
    assert cache_bytes(more, SHAPES, TOKENS, dtype="float16") > 0.5 * FULL


def test_a_ladder_chooses_bits_and_budget_for_the_least_predicted_error():
    few = solve_for_bytes(recipe("ladder"), SHAPES, TOKENS, int(0.15 * FULL), "float16")
    many = solve_for_bytes(recipe("ladder"), SHAPES, TOKENS, int(0.5 * FULL), "float16")
    assert few.config.stages[-1].mean_bits < many.config.stages[-1].mean_bits
    assert few.config.budget < many.config.budget
    assert 0.98 * 0.5 * FULL < many.bytes_held <= 0.5 * FULL


def test_a_recipe_without_a_setting_stays_as_it_is():
    kivi = recipe("kivi", 32)
    solved = solve_for_bytes(kivi, SHAPES, TOKENS, FULL, "float16")
    assert (solved.config, solved.chosen) == (kivi, "nothing to choose")


@pytest.mark.parametrize(
    ("name", "share"), [("full", 0.9), ("int4", 0.2), ("kivi", 0.2), ("vase-attnv", 0.01), ("ladder", 0.01)]
)
def test_what_cannot_be_so_small_says_what_it_takes(name, share):
    config = recipe(name, 32) if name != "full" else kvcompress.load_config("full")
    with pytest.raises(
        ConfigError, match=rf"{name}: takes at least (\d+) bytes per sequence .* {int(share * FULL)} "
    ) as e:
        solve_for_bytes(config, SHAPES, TOKENS, int(share * FULL), "float16")
    least = int(str(e.value).split("at least ")[1].split()[0])
    assert solve_for_bytes(config, SHAPES, TOKENS, least, "float16").bytes_held <= least


def test_targets_are_sizes_ratios_and_recipes():
    configs = [kvcompress.load_config("full"), recipe("snapkv"), recipe("int4"), recipe("vase-attnv-int4")]
    by_size = equalize(configs, SHAPES, TOKENS, int(0.25 * FULL), "float16")
    by_ratio = equalize(configs, SHAPES, TOKENS, 0.25, "float16")
    assert by_size == by_ratio
    assert [entry.config.name for entry in by_size.solved] == ["full", "snapkv", "vase-attnv-int4"]
    assert len(by_size.left_out) == 1
    assert "int4: takes at least" in by_size.left_out[0]
    by_recipe = equalize(configs, SHAPES, TOKENS, "int4", "float16")
    assert by_recipe.target == cache_bytes(recipe("int4"), SHAPES, TOKENS, dtype="float16")
    assert not by_recipe.left_out
    for wrong, message in (("int5", "'int5' is no size"), (1.5, "1.5 is no ratio"), (10, "no recipe reaches 10 bytes")):
        with pytest.raises(ConfigError, match=message):
            equalize(configs, SHAPES, TOKENS, wrong, "float16")


def test_a_comparison_holds_the_bytes_it_was_asked_for():
    model = tiny("llama", max_position_embeddings=512)
    ids = prompt(120)
    configs = comparison_configs(["full", "snapkv", "int4", "vase-attnv-int4"], overrides={"buffer": 8})
    comparison = compare(model, ids, configs, max_new_tokens=60, ignore_eos=True, equal_bytes="int4")
    assert comparison.equalized is not None
    for result, solved in zip(comparison.results, comparison.equalized.solved, strict=True):
        assert result.config == solved.config
        assert result.bytes_held == solved.bytes_held
        if result.name != "full":
            assert 0.97 * comparison.equalized.target < result.bytes_held <= comparison.equalized.target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("model"))


def run(folder, target, *more):
    recipes = ("-r", "full", "-r", "snapkv", "-r", "vase-attnv-int8", "--set", "buffer=4")
    arguments = ["compare", PROMPT, "-m", folder, *recipes, "-n", 30, "--ignore-eos", "--equal-bytes", target, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("target", ["0.5", "24KB", "24000", "snapkv"])
def test_the_command_line_says_what_it_chose(folder, target):
    more = ["--budget", 40] if target == "snapkv" else []
    result = run(folder, target, "--json", *more)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    held = {entry["recipe"]: entry["kv_bytes_held"] for entry in document["recipes"]}
    asked = document["equal_bytes"]["target"]
    if target.startswith("24"):
        assert asked == 24_000
    elif target == "0.5":
        # Keys, values and positions of 62 + 30 tokens in 2 layers of 2 heads of 16 float32 numbers.
        assert asked == 2 * 92 * 2 * (2 * 16 * 4 + 4) // 2
    assert held["full"] > asked
    for name in ("snapkv", "vase-attnv-int8"):
        assert 0.9 * asked < held[name] <= asked
        assert document["equal_bytes"]["chosen"][name].startswith("budget ")
    assert document["settings"]["equal_bytes"] == target


def test_the_table_says_what_was_chosen(folder):
    result = run(folder, "0.2")
    assert result.exit_code == 0, result.stderr
    table = " ".join(result.stdout.split())
    assert "snapkv" in table
    assert "budget" in table
    assert "All recipes at" in table


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("8 parsecs", "'8 parsecs' is not a quantity; write 8MiB"),
        ("int5", "'int5' is no size"),
        ("-1", "-1.0 is no ratio"),
    ],
)
def test_other_targets_are_refused(folder, target, message):
    result = run(folder, target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize("name", ["full", "int4", "kivi", "vase-attnv-int4", "ladder", "h2o"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_predicted_bytes_are_allocated_bytes(name, dtype):
    model = tiny("llama", head_dim=64).to(dtype)
    fields = {"budget": 60} if kvcompress.load_config(name).evicts else {}
    for tokens in (70, 130):
        with kvcompress.apply(
            model, name, context_length=tokens, **fields, **({} if name == "full" else {"buffer": 32})
        ) as h:
            cache = h.new_cache()
            feed(model, cache, prompt(tokens - 1, rows=2))
            feed(model, cache, prompt(1, rows=2))
            predicted = cache_bytes(h.config, layer_shapes(model.config), tokens, 2, str(dtype).removeprefix("torch."))
            assert cache.stats().bytes_held == predicted
