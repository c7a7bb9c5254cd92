"""``kvcompress plan``: what it counts is what real caches hold, and the largest that fits really is the largest."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, feed, prompt, tiny
from transformers import AutoConfig
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.cli_plan import _hub_trouble
from kvcompress.errors import ConfigError, KVCompressError, UnsupportedModelError
from kvcompress.footprint import cache_bytes
from kvcompress.plan import MAX_CONTEXT, ModelSize, PlanRequest, Window, measure, plan
from kvcompress.shapes import LayerShape, layer_shapes

CONTEXT, BATCH, BUFFER = 50, 3, 8
GIB = 2**30
# Shapes of Qwen3-4B and of one with little to count.
SHAPES = ("--layers", 36, "--heads", 32, "--kv-heads", 8, "--head-dim", 128, "--parameters", "4B")


def recipe(name: str, budget: int = 24):
    fields = {"budget": budget, "buffer": BUFFER} if "vase" in name or name in ("h2o", "snapkv", "ladder") else {}
    return kvcompress.load_config(name, fields or {"buffer": BUFFER})


def held(model, config, context: int = CONTEXT, batch: int = BATCH) -> int:
    """Bytes of a real cache that has seen ``context`` tokens, most of them as a prompt and a last block apart."""
    ids = prompt(context, batch)
    with kvcompress.apply(model, config, context_length=context) as handle:
        cache = handle.new_cache()
        feed(model, cache, ids[:, : context - 2 * BUFFER])
        feed(model, cache, ids[:, context - 2 * BUFFER :])
        assert cache.stats().tokens_seen == [context] * batch
        return cache.stats().bytes_held


def run(*arguments, **environment):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env=environment)


def refuses(*arguments) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), (result.stdout, result.exception)
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvcompress: error: ")
    return result.stderr


# -- counts against real caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_command_tells_what_a_real_model_and_its_cache_hold(kind, tmp_path):
    model = tiny(kind, "eager")
    model.config.save_pretrained(tmp_path)
    names = ["full", "int4", "vase-attnv", "vase-attnv-int4"]
    settings = ("--set", "budget=24", "--set", f"buffer={BUFFER}")
    result = run(
        tmp_path, "--context", CONTEXT, "--batch", BATCH, "-r", ",".join(names), *settings, "--dtype", "fp32", "--json"
    )
    assert result.exit_code == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    assert document["model"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert not any("Not counted" in note for note in document["notes"])
    assert [row["recipe"] for row in document["recipes"]] == names
    checked = document["recipes"] if kind in ("llama", "gemma3_text", "gpt_oss") else document["recipes"][-1:]
    for row in checked:
        config = kvcompress.load_config(row["config"])
        assert row["cache_bytes"] == held(model, config), row["recipe"]
        assert row["bytes_per_token"] == row["bytes_per_sequence"] / CONTEXT
        assert row["ratio"] == document["transformers"]["cache_bytes"] / row["cache_bytes"]


@pytest.mark.parametrize("name", ["full", "int8", "h2o", "snapkv", "vase-dkv-int4"])
@pytest.mark.parametrize(("context", "batch"), [(17, 1), (40, 2), (63, 5)])
def test_bytes_at_other_sizes(llama, name, context, batch):
    size = measure(llama.config, "llama", "float32")
    row = plan(size, [recipe(name)], PlanRequest(context, batch)).recipes[0]
    assert row.cache_bytes == held(llama, row.config, context, batch)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_bytes_follow_the_type_of_the_model(kind, dtype):
    model = tiny(kind, "eager").to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    size = measure(model.config, kind)
    assert size.dtype == dtype
    assert size.weight_bytes() == sum(parameter.nbytes for parameter in model.parameters())
    row = plan(size, [recipe("vase-attnv-int4")], PlanRequest(CONTEXT, BATCH)).recipes[0]
    assert row.cache_bytes == held(model, row.config)


def test_reference_is_the_cache_of_transformers():
    model = tiny("gemma3_text")
    ids = prompt(CONTEXT, BATCH)
    cache = transformers.DynamicCache(config=model.config)
    feed(model, cache, ids)
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    result = plan(measure(model.config, "gemma", "float32"), [recipe("full")], PlanRequest(CONTEXT, BATCH))
    # 8 more: the sliding layer keeps its window as an int64.
    assert result.reference.cache_bytes == sum(t.nbytes for t in tensors) + 8


def test_tied_embeddings_count_once():
    untied, tied = (measure(tiny("llama", tie_word_embeddings=tie).config, "llama") for tie in (False, True))
    assert untied.parameters - tied.parameters == 128 * 64


def test_ratio_budgets_are_of_the_context(llama):
    size = measure(llama.config, "llama")
    ratio, tokens = (kvcompress.load_config("snapkv", budget=budget, buffer=8) for budget in (0.25, 100))
    rows = plan(size, [ratio, tokens], PlanRequest(400)).recipes
    assert rows[0].config.budget == 100
    assert rows[0].cache_bytes == rows[1].cache_bytes
    with pytest.raises(ConfigError, match=r"0\.25 of a context of 20 tokens is 5 tokens"):
        plan(size, [ratio], PlanRequest(20))


def test_layers_of_different_sizes_are_counted_as_they_are():
    """Gemma 4 has larger heads in its full-attention layers, which its config only tells layer by layer."""
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    settings |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "vocab_size_per_layer_input": 128}
    settings |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32}
    settings |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "max_position_embeddings": 1024}
    config = AutoConfig.for_model("gemma4_text", **settings)
    assert layer_shapes(config) == [LayerShape(1, 4, 2, 32, 32)]
    size = measure(config, "gemma4", "float32")
    assert (size.shapes, size.windows) == ((LayerShape(1, 4, 2, 32, 32),), (Window(16, 2, 16, 16),))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    row = plan(size, [recipe("int4")], PlanRequest(CONTEXT, BATCH)).recipes[0]
    assert row.cache_bytes == held(model, row.config)


# -- counts against published shapes -----------------------------------------------------------------------------------

QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
PUBLISHED = {
    "Qwen3-4B": (
        "qwen3",
        QWEN3
        | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"tie_word_embeddings": True},
        4_022_468_096,
        144,
    ),
    "Qwen3-8B": (
        "qwen3",
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        8_190_735_360,
        144,
    ),
    "Qwen3-14B": (
        "qwen3",
        QWEN3 | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
        14_768_307_200,
        160,
    ),
    "Llama-3.1-8B": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        8_030_261_248,
        128,
    ),
}


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request) -> tuple[ModelSize, int, int]:
    kind, fields, parameters, kib_per_token = PUBLISHED[request.param]
    config = AutoConfig.for_model(kind, dtype="bfloat16", **({"tie_word_embeddings": False} | fields))
    return measure(config, request.param), parameters, kib_per_token


def test_published_shapes(published):
    """Parameters as published, KiB per token of 16 bits as the number of elements says; int4 by hand."""
    size, parameters, kib_per_token = published
    assert size.parameters == parameters
    context = 32768
    result = plan(size, [kvcompress.load_config(name) for name in ("full", "int4")], PlanRequest(context))
    assert result.reference.bytes_per_token == kib_per_token * 1024
    full, coded = result.recipes
    heads = len(size.shapes) * 8
    # A position of 4 bytes for each token, layer and head.
    assert full.bytes_per_token == kib_per_token * 1024 + 4 * heads
    # int4 with bfloat16 scale and offset for each head of 128: 4.25 bits. Old tokens come in blocks of B = 64, and two
    # more blocks are the ring; 4 sinks and 3 % of the old ones keep 16 bits. Beside each token its position and, in 16
    # bits, the range of its values, which decides who keeps them.
    old = 32768 - 64
    high = 4 + int(0.03 * old)
    vectors = (high + 128) * 2 * 128 * 2 + (old - high) * 2 * 128 * Fraction("4.25") / 8
    assert coded.bytes_per_sequence == heads * (vectors + (old + 128) * (4 + 2))
    codes_alone = kib_per_token * 1024 * 4.25 / 16
    assert 1 < coded.bytes_per_token / codes_alone < 1.15


def test_whole_memory_of_a_published_measurement():
    """Qwen3-14B, batch 16, 16,640 tokens: 40.6 GiB of cache and 27.5 GiB of weights."""
    kind, fields, *_ = PUBLISHED["Qwen3-14B"]
    size = measure(AutoConfig.for_model(kind, tie_word_embeddings=False, **fields), "14B", "bfloat16")
    result = plan(size, [], PlanRequest(16640, 16))
    assert result.weight_bytes / GIB == pytest.approx(27.5, abs=0.05)
    assert result.reference.cache_bytes / GIB == pytest.approx(40.6, abs=0.05)
    assert result.reference.total_bytes == result.weight_bytes + result.reference.cache_bytes


# -- what fits ---------------------------------------------------------------------------------------------------------

SIZE = ModelSize(
    "hybrid",
    "bfloat16",
    tuple(LayerShape(layer, 8, 2, 64, 64) for layer in range(3)),
    windows=(Window(100, 2, 64, 64), Window(100, 2, 64, 64)),
    state_bytes=1000,
    parameters=10_000,
)


@pytest.mark.parametrize("spare", [0, 1, -1])
def test_memory_that_is_just_enough(spare):
    """A memory of exactly weights, reserve and cache fits the batch; a byte less doesn't."""
    configs = [kvcompress.load_config(name) for name in ("full", "int4", "vase-attnv", "vase-attnv-int4")]
    for config in configs:
        need = plan(SIZE, [config], PlanRequest(3000, 4)).recipes[0].total_bytes
        result = plan(SIZE, [config], PlanRequest(3000, 4, memory=need + 77 + spare, reserve=77))
        row = result.recipes[0]
        assert result.available == need + spare - 20_000
        assert row.fits == (spare >= 0)
        assert row.largest_batch == (4 if spare >= 0 else 3)
        if config.evicts:
            assert row.largest_budget == (1024 if spare >= 0 else 1023)
        else:
            # Blocks of int4 may leave room for a few tokens more.
            assert 3000 - 64 <= row.largest_context < 3000 + 64
            assert (row.largest_context >= 3000) == (spare >= 0)


def total(config, tokens: int, sequences: int) -> int:
    """Bytes of a cache of ``SIZE``, its windows of 99 tokens by hand: 2 heads, 2 * 64 channels of 2 bytes."""
    own = 1000 + 2 * min(tokens, 99) * 2 * 128 * 2
    return 2 * 8 + sequences * own + cache_bytes(config, SIZE.shapes, tokens, sequences)


def with_budget(config, budget: int):
    try:
        return config.with_fields({"budget": budget})
    except ConfigError:
        return None


@pytest.mark.parametrize("name", ["vase-attnv", "vase-attnv-int4", "h2o", "ladder", "full", "int4"])
@pytest.mark.parametrize("memory", [1_000_000, 5_555_555, 20_000_000])
def test_one_more_does_not_fit(name, memory):
    config = kvcompress.load_config(name)
    batch, context = 3, 2000
    result = plan(SIZE, [config], PlanRequest(context, batch, memory, reserve=100_000))
    row, room = result.recipes[0], result.available
    assert row.cache_bytes == total(config, context, batch)
    assert row.fits == (row.cache_bytes <= room)
    assert row.largest_batch == 0 or total(config, context, row.largest_batch) <= room
    assert total(config, context, row.largest_batch + 1) > room
    if not config.evicts:
        assert total(config, row.largest_context, batch) <= room < total(config, row.largest_context + 1, batch)
        assert row.largest_budget is None
        return
    assert row.largest_context is None
    least = next(filter(None, (with_budget(config, budget) for budget in range(2, context))))
    if row.largest_budget is None:
        assert total(least, context, batch) > room
        return
    assert total(with_budget(config, row.largest_budget), context, batch) <= room
    assert row.keeps_all == (row.largest_budget == context)
    assert row.keeps_all or total(with_budget(config, row.largest_budget + 1), context, batch) > room


@pytest.mark.parametrize("name", ["vase-attnv", "vase-attnv-int8", "vase-attnv-int2", "random-prompt", "ladder"])
def test_no_larger_budget_of_all_fits(name):
    """Against trying all of them, for memories around the least possible budget and far above it."""
    config = kvcompress.load_config(name, budget=100, buffer=8)
    context, batch = 150, 2
    sizes = {
        budget: total(smaller, context, batch)
        for budget in range(2, context + 1)
        if (smaller := with_budget(config, budget)) is not None
    }
    assert list(sizes.values()) == sorted(sizes.values())
    for room in (min(sizes.values()) - 1, min(sizes.values()), 700_000, 900_000, max(sizes.values())):
        row = plan(SIZE, [config], PlanRequest(context, batch, room + SIZE.weight_bytes())).recipes[0]
        assert row.largest_budget == max((b for b, size in sizes.items() if size <= room), default=None)


def test_nothing_fits_and_everything_does():
    config, full = kvcompress.load_config("vase-attnv"), kvcompress.load_config("full")
    scarce = plan(SIZE, [config, full], PlanRequest(5000, 1, memory=20_000 + 1500))
    assert [(row.fits, row.largest_batch, row.largest_budget) for row in scarce.recipes] == [(False, 0, None)] * 2
    assert scarce.recipes[1].largest_context == 0
    plenty = plan(SIZE, [config, full], PlanRequest(500, 1, memory=10**15))
    # The budget of 1024 is more than the context already.
    assert (plenty.recipes[0].largest_budget, plenty.recipes[0].keeps_all) == (1024, True)
    assert plenty.recipes[1].largest_context == MAX_CONTEXT


def test_weights_may_have_fewer_bits():
    size = ModelSize("odd", "bfloat16", SIZE.shapes, parameters=1001)
    assert (size.weight_bytes(), size.weight_bytes(Fraction("4.25")), size.weight_bytes(Fraction(1))) == (
        2002,
        532,
        126,
    )
    assert ModelSize("none", "float32", SIZE.shapes).weight_bytes() is None


def test_plan_refuses_what_it_cannot_count():
    with pytest.raises(
        KVCompressError, match=r"the weights take 19.5 KiB and 9.77 KiB are reserved, so 4.89 KiB are mis"
    ):
        plan(SIZE, [], PlanRequest(100, 1, memory=25_000, reserve=10_007))
    with pytest.raises(KVCompressError, match="--parameters: missing"):
        plan(ModelSize("none", "float32", SIZE.shapes), [], PlanRequest(100, 1, memory=10**9))
    with pytest.raises(ConfigError, match="head size 64"):
        plan(SIZE, [kvcompress.load_config("int4", {"quantize.keys": {"bits": 4, "group": 48}})], PlanRequest(100))
    with pytest.raises(UnsupportedModelError, match="AttentionInterface"):
        measure(AutoConfig.for_model("falcon", num_hidden_layers=1), "falcon")
    with pytest.raises(KVCompressError, match=r"t5 \(t5\) cannot be built as a causal language model"):
        measure(AutoConfig.for_model("t5"), "t5")


def test_quantized_checkpoints_say_so(llama):
    config = copy.deepcopy(llama.config)
    config.quantization_config = {"quant_method": "fp8"}
    size = measure(config, "llama", "bfloat16")
    assert size.notes == ("The checkpoint's weights are quantized; without --weight-bits they count as bfloat16.",)
    assert config.quantization_config == {"quant_method": "fp8"}
    assert size.parameters == measure(llama.config, "llama").parameters


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    config = tiny("gemma3_text").config
    config.dtype = torch.float32
    config.save_pretrained(path)
    return path


def test_table_is_legible_at_100_columns():
    arguments = ("--context", "32K", "--batch", 16, "--memory", "80GB")
    result = run(*SHAPES, *arguments, COLUMNS="100")
    assert result.exit_code == 0, result.stderr
    headline, *lines = result.stdout.splitlines()
    assert headline == (
        "36 layers x 8 KV heads x 128 in bfloat16; 4B parameters = 7.45 GiB; batch 16 x 32,768 tokens; memory 74.5 GiB "
        "(80 GB) - reserve 7.45 GiB - weights = 59.6 GiB for the cache"
    )
    assert max(map(len, lines)) <= 100
    assert "…" not in result.stdout
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    # 64 * 10**9 bytes are left: 13.2 times 32768 * 147456, or 16 times 27126.7 * 147456.
    assert " ".join(rows["(transformers)"]) == "(transformers) all 144 KiB 4.5 GiB 1.00x 79.5 GiB no 13 27,126"
    assert rows["vase-attnv"][:4] == ["vase-attnv", "K", "1,024", "5.38"]
    assert "K" in rows["vase-attnv-int4"][-2]
    assert "1 GB = 10^9" in result.stdout


def test_without_memory_only_bytes_are_told(folder):
    result = run(folder, "--context", 40, "--recipes", "full,vase-attnv", "--set", "budget=24", "--set", "buffer=8")
    assert result.exit_code == 0, result.stderr
    assert "fits" not in result.stdout
    assert "Layers that keep a window of 16 tokens under any recipe: 1, counted." in result.stdout
    unknown = run(*SHAPES[:-2], "--context", "1k", "--json")
    assert json.loads(unknown.stdout)["recipes"][0]["total_bytes"] is None


def test_json_has_the_numbers_of_the_plan(folder):
    arguments = (folder, "--context", 50, "--batch", 3, "--memory", "2MB", "--reserve", "100kB", "--json")
    result = run(*arguments, "-r", "full, int4", "-r", "vase-attnv", "--set", "budget=24", "--set", "buffer=8")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    model = tiny("gemma3_text")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert document["model"] == {"name": str(folder), "dtype": "float32", "parameters": weights // 4}
    assert document["weights"] == {"bits": None, "bytes": weights}
    available = 2_000_000 - 100_000 - weights
    assert document["memory"] == {"bytes": 2_000_000, "reserve_bytes": 100_000, "available_bytes": available}
    assert document["layers"] == {"compressed": 1, "window": 1}
    assert document["request"] == {"context": 50, "batch": 3}
    assert document["command"].startswith(f"kvcompress plan {folder}")
    assert [row["recipe"] for row in document["recipes"]] == ["full", "int4", "vase-attnv"]
    for row in document["recipes"]:
        config = kvcompress.load_config(row["config"])
        # Overrides go to the recipes that they concern.
        assert (config.budget, config.buffer) == {
            "full": (None, 64),
            "int4": (None, 8),
            "vase-attnv": (24, 8),
        }[config.name]
        expected = plan(measure(model.config, "", "float32"), [config], PlanRequest(50, 3, 2_000_000, 100_000)).recipes[
            0
        ]
        for field in (
            "cache_bytes",
            "bytes_per_sequence",
            "fits",
            "largest_batch",
            "largest_budget",
            "largest_context",
        ):
            assert row[field] == getattr(expected, field)


def test_context_is_the_models_most_by_default(folder):
    assert json.loads(run(folder, "--json").stdout)["request"] == {"context": 1024, "batch": 1}
    assert "goes past the 1,024 tokens of the model" in run(folder, "--context", "2K").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80g", 80 * 10**9),
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("1.5 TiB", 3 * 2**39),
        ("40000MB", 4 * 10**10),
        ("25000000000", 25 * 10**9),
        ("25000000000B", 25 * 10**9),
    ],
)
def test_units_of_memory(text, expected):
    document = json.loads(run(*SHAPES, "--context", "1K", "--memory", text, "--json").stdout)
    assert document["memory"]["bytes"] == expected
    assert document["memory"]["reserve_bytes"] == expected // 10
    assert document["request"]["context"] == 1024


@pytest.mark.parametrize(("text", "expected"), [("0", 0), ("25%", 6 * GIB), ("2GiB", 2 * GIB)])
def test_reserve(text, expected):
    arguments = (*SHAPES, "--context", "1K", "--memory", "24GiB", "--reserve", text, "--json")
    assert json.loads(run(*arguments).stdout)["memory"]["reserve_bytes"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "model: none given; give a hub id, a local folder, or shapes"),
        (("--layers", 3), "--heads: missing; without a model give --layers, --heads, --kv-heads, --head-dim"),
        (("--layers", 3, "--heads", 8, "--head-dim", 64), "--kv-heads: missing"),
        (("--layers", 0, *SHAPES[2:]), "--layers: 0 must be at least 1"),
        ((*SHAPES, "--kv-heads", 5, "--context", "1K"), "--heads: 32 must be a multiple of the 5 KV heads"),
        (SHAPES, "--context: missing; give tokens per sequence"),
        ((*SHAPES, "--context", "0"), "--context: '0' must be at least 1"),
        ((*SHAPES, "--context", "-5"), "--context: '-5' is not a quantity; write 16384 or 16K"),
        ((*SHAPES, "--context", "16KB"), "--context: '16KB' is not a quantity"),
        ((*SHAPES, "--context", "4000M"), "--context: '4000M' must be at least 1 and at most 2147483647"),
        ((*SHAPES, "--context", "1K", "--batch", "0"), "--batch: 0 must be at least 1"),
        ((*SHAPES, "--context", "1K", "--memory", "80XB"), "--memory: '80XB' is not a quantity; write 80GB, 24GiB"),
        ((*SHAPES, "--context", "1K", "--memory", "nan"), "--memory: 'nan' is not a quantity"),
        ((*SHAPES, "--context", "1K", "--memory", "8GB"), "memory: 7.45 GiB leaves nothing for the cache: the weights"),
        ((*SHAPES[:-2], "--context", "1K", "--memory", "8GB"), "--parameters: missing, to take the weights off"),
        ((*SHAPES, "--context", "1K", "--reserve", "1GiB"), "--reserve: '1GiB' has no effect without --memory"),
        ((*SHAPES, "--context", "1K", "--memory", "80GB", "--reserve", "100%"), "--reserve: '100%' is not a quantity"),
        ((*SHAPES, "--context", "1K", "--weight-bits", "0"), "--weight-bits: 0 must be above 0"),
        ((*SHAPES, "--context", "1K", "--weight-bits", "nan"), "--weight-bits: nan must be above 0"),
        ((*SHAPES, "--context", "1K", "--dtype", "int4"), "--dtype: 'int4' is not one of float32"),
        ((*SHAPES, "--context", "1K", "--recipes", "full,fulll"), "did you mean 'full'"),
        ((*SHAPES, "--context", "1K", "--recipes", "full,full"), "recipe: 'full' is given twice"),
        ((*SHAPES, "--context", "1K", "--set", "bogus=1"), "override 'bogus': not a field"),
        ((*SHAPES, "--context", "1K", "--parameters", "4X"), "--parameters: '4X' is not a quantity"),
        (("model", "--layers", "3"), "--layers: comes from the config of model 'model'; leave out one of the two"),
        (("model", "--parameters", "3B"), "--parameters: comes from the config of model 'model'"),
    ],
)
def test_bad_options_are_refused_in_one_line_before_a_model_is_read(monkeypatch, arguments, message):
    monkeypatch.setattr("kvcompress.cli_plan._from_model", lambda *_: pytest.fail("a model was read"))
    assert message in refuses(*arguments)


def test_models_that_cannot_be_read(tmp_path):
    assert "holds no config.json; give a hub id" in refuses(tmp_path)
    assert "holds no config.json" in refuses(__file__)
    (tmp_path / "config.json").write_text("{")
    assert f"model: the config of {tmp_path} cannot be read: " in refuses(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "cannot be read: " in refuses(tmp_path)
    assert "'./nonesuch' is no local folder and cannot be had from the hub" in refuses("./nonesuch")


def test_a_hub_out_of_reach_is_asked_once(monkeypatch):
    asked = []

    def unreachable(url: str):
        asked.append(url)
        raise OSError("Name or service not known\nand more lines")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    message = refuses("nosuch-org/nosuch-model", "--context", "1K")
    assert asked == ["https://huggingface.co/nosuch-org/nosuch-model/resolve/main/config.json"]
    assert (
        "'nosuch-org/nosuch-model' is no local folder and cannot be had from the hub (Name or service not known); give"
        in (message)
    )


def test_a_hub_that_refuses_is_left_to_transformers(monkeypatch):
    """A model that isn't there, or isn't for everybody, has an error message of transformers' own."""
    from huggingface_hub.errors import HfHubHTTPError

    def ask(status: int) -> str | None:
        def refusing(url: str):
            raise HfHubHTTPError("refused", response=SimpleNamespace(status_code=status, headers={}, request=None))

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refusing)
        return _hub_trouble("org/model")

    assert [ask(status) for status in (401, 404, 503)] == [None, None, "refused"]


def test_a_config_that_was_downloaded_before_will_do(monkeypatch, llama):
    def unreachable(url: str):
        raise OSError("no network")

    def from_cache(name, local_files_only, trust_remote_code):
        assert (name, local_files_only, trust_remote_code) == ("org/model", True, False)
        return llama.config

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_cache)
    result = run("org/model", "--context", "1K", "--dtype", "float16")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("org/model in float16; ")
