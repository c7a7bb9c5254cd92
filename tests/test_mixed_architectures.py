"""Every supported architecture with its cache in codes: itself when codes lose nothing, refused when they don't fit."""

from __future__ import annotations

import pytest
import torch
from test_mixed_invariants import LosslessStore
from tiny import ARCHITECTURES, distinct, feed, generate, left_padded, prompt, tiny

import kvcompress
from kvcompress import CompressionConfig
from kvcompress.errors import ConfigError

EAGER_ONLY = ("gemma2", "gpt_oss", "mimo_v2_flash")
LENGTHS = (40, 25, 9)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_lossless_codes_change_nothing(kind, rotate):
    """Sinks, soft caps, latents, sliding layers, unequal heads: attention over pools must know about all of them."""
    model = tiny(kind, "eager" if kind in EAGER_ONLY else "sdpa")
    ids, mask = left_padded(prompt(length, seed=length) for length in LENGTHS)
    own = generate(model, ids, 30, mask)
    config = CompressionConfig(buffer=4, stages=[LosslessStore(rotate=rotate)])
    with kvcompress.apply(model, config) as handle:
        assert torch.equal(generate(model, ids, 30, mask), own)
        kept = handle.stats().precisions
        assert [sum(counts) for counts in zip(*kept.values(), strict=True)] == [length + 29 for length in LENGTHS]
        assert max(kept["float32"]) < 40


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_eight_bits_stay_close(kind):
    """Logits after a prompt in codes, against the model's own; random weights make attention as touchy as it gets."""
    model = tiny(kind, "eager" if kind in EAGER_ONLY else "sdpa")
    ids = distinct(60, seed=1)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[:, 40:]
    config = {"buffer": 4, "stages": [{"stage": "quantize", "keys": "int8", "values": "int8", "share": 0.0}]}
    with kvcompress.apply(model, config) as handle:
        cache = handle.new_cache()
        feed(model, cache, ids[:, :40])
        coded = torch.cat([feed(model, cache, ids[:, i : i + 1]) for i in range(40, 60)], dim=1)
        assert cache.stats().precisions["int8"] == [52]
    assert float((coded - own).square().mean().sqrt()) < 0.1 * float(own.std())


REFUSED = {
    "group that does not divide": (
        {"bits": 4, "group": 12},
        r"quantize.keys.group: 12 .* head size 16; legal groups: 16, 8",
    ),
    "group larger than the head": (
        {"bits": 4, "group": 32},
        r"quantize.keys.group: 32 .* head size 16; legal groups: 16, 8",
    ),
    "block that bitsandbytes lacks": ({"codec": "nf4", "group": 16}, r"quantize.keys.group: 16"),
}


@pytest.mark.parametrize(("codec", "message"), REFUSED.values(), ids=REFUSED)
def test_codecs_that_do_not_fit_are_refused_before_anything_runs(codec, message):
    model = tiny("llama")
    before = dict(vars(model))
    with pytest.raises(ConfigError, match=message):
        kvcompress.apply(model, {"stages": [{"stage": "quantize", "keys": codec, "values": "int8"}]})
    assert vars(model) == before
    assert not str(model.config._attn_implementation).startswith("kvcompress")


def test_three_bits_need_eight_channels():
    model = tiny("llama", head_dim=20)
    with pytest.raises(ConfigError, match=r"quantize.values.bits: 3-bit codes .* it is 20; legal bits: 2, 4, 8"):
        kvcompress.apply(model, {"stages": [{"stage": "quantize", "keys": "int4", "values": "int3"}]})
    with kvcompress.apply(model, {"stages": [{"stage": "quantize", "keys": "int4", "values": "int2"}]}):
        generate(model, prompt(20), 5)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"stage": "quantize", "keys": "int4", "values": "int4", "share": 1.0}], "share: Input should be less than 1"),
        (["quantize"], "keys: Field required"),
        ([{"stage": "quantize", "keys": "int4", "values": "int4"}] * 2, "2 store stages .*at most one"),
        (["sinks", {"stage": "quantize", "keys": "int4", "values": "int4"}], "sinks without a select stage"),
        ([{"stage": "ladder"}], "exactly one of shares and mean_bits"),
        ([{"stage": "ladder", "mean_bits": 2.0}], "mean_bits: 2.0 is less than the lowest rung"),
        ([{"stage": "ladder", "shares": [0.5, 0.5]}], "shares: 2 given for 4 rungs"),
        ([{"stage": "ladder", "shares": [0.5, 0.5, 0.5, -0.5]}], "shares: must not be negative"),
        ([{"stage": "ladder", "bits": [4, 8], "mean_bits": 6}], "bits: must descend"),
        ([{"stage": "ladder", "by": "error", "mean_bits": 6}], "put a score stage before it"),
    ],
)
def test_impossible_store_stages_are_refused(stages, message):
    with pytest.raises(ConfigError, match=message):
        kvcompress.load_config({"stages": stages})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": "defer"}, "prefill: defer keeps a long prompt in full precision"),
        ({"quantize.keys": {"codec": "per_channel", "bits": 4}}, "eviction would tear apart"),
        ({"quantize.share": 0.97}, "leave nothing to quantize"),
    ],
)
def test_impossible_hybrids_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        kvcompress.load_config("vase-attnv-int4", fields)


def test_per_channel_keys_need_whole_blocks():
    with pytest.raises(ConfigError, match=r"a buffer that is a multiple of 32 \(it is 48\)"):
        kvcompress.load_config("kivi", buffer=48)
    with pytest.raises(ConfigError, match="no token in full precision"):
        kvcompress.load_config("kivi", {"quantize.share": 0.1})
