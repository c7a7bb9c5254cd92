"""Every supported architecture against its own eager attention, and models that must be refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from oracle import Oracle
from replay import Recorder, replay
from tiny import ARCHITECTURES, VOCAB, WINDOW, distinct, feed, generate, left_padded, prompt, randomize, tiny
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import kvcompress
from kvcompress.cache import CompressedCache
from kvcompress.errors import UnsupportedModelError
from kvcompress.model import cache_keyword
from kvcompress.support import compressible_layers

EAGER_ONLY = ("gemma2", "gpt_oss", "mimo_v2_flash")
LARGE = {"budget": 200, "buffer": 8}
SMALL = {"budget": 24, "buffer": 8}
LENGTHS = (40, 25, 9)
NEW = 24
STEPS = 62


@cache
def model_of(kind: str, attention: str = "eager") -> PreTrainedModel:
    """One model per architecture; every test gives it back as it was."""
    return tiny(kind, attention)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that reading it shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rows() -> list[Tensor]:
    return [prompt(length, seed=index) for index, length in enumerate(LENGTHS)]


@cache
def eager_output(kind: str) -> tuple[Tensor, Tensor]:
    """What the model itself generates with eager attention: for one prompt, and for the ragged batch."""
    model = model_of(kind)
    ids, mask = left_padded(rows())
    return generate(model, rows()[0], NEW), generate(model, ids, NEW, mask)


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """What a cache layer of transformers holds: keys and values, or the states of linear attention."""
    found = {name: value for name, value in vars(layer).items() if name in ("keys", "values")}
    for name in ("conv_states", "recurrent_states"):
        found |= {f"{name}.{index}": value for index, value in vars(layer).get(name, {}).items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    assert tensors
    return tensors


def full_layers(model: PreTrainedModel) -> list[int]:
    return compressible_layers(model.config)


def run_small(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, CompressedCache, Recorder]:
    """Generate under a budget that the sequence outgrows; returns the new tokens, the cache, and a record of it all."""
    with kvcompress.apply(model, "vase-attnv", **SMALL) as handle:
        cache = handle.new_cache()
        recorder = Recorder(model, cache)
        tokens = generate(model, ids, STEPS, mask, cache)
        recorder.close()
        return tokens, cache, recorder


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_reference_output_is_worth_comparing(kind: str) -> None:
    alone, batch = eager_output(kind)
    assert alone.shape == (1, NEW)
    assert batch.shape == (len(LENGTHS), NEW)
    for row in (*alone, *batch):
        assert row.unique().numel() >= 6
    model = model_of(kind)
    ids = prompt(2 * WINDOW)
    other = ids.clone()
    other[0, 2] = (ids[0, 2] + 1) % VOCAB
    with torch.no_grad():
        logits, changed = model(ids).logits[0, -1], model(other).logits[0, -1]
    assert (changed - logits).norm() > 0.01 * logits.norm()


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        (kind, attention)
        for kind in ARCHITECTURES
        for attention in ("eager", "sdpa")
        if kind not in EAGER_ONLY or attention == "eager"
    ],
)
def test_large_budget_gives_the_tokens_of_eager_attention(kind: str, attention: str) -> None:
    alone, batch = eager_output(kind)
    ids, mask = left_padded(rows())
    model = model_of(kind, attention)
    with kvcompress.apply(model, "vase-attnv", **LARGE) as handle:
        assert torch.equal(generate(model, rows()[0], NEW), alone)
        assert handle.stats().tokens_kept == [LENGTHS[0] + NEW - 1]
        assert torch.equal(generate(model, ids, NEW, mask), batch)
        assert handle.stats().tokens_kept == [length + NEW - 1 for length in LENGTHS]
        assert handle.stats().events == [0, 0, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_small_budget(kind: str) -> None:
    model = model_of(kind)
    ids, mask = left_padded(rows())
    tokens, compressed, record = run_small(model, ids, mask)
    assert tokens.shape == (len(LENGTHS), STEPS)
    stats = compressed.stats()
    assert stats.tokens_seen == [length + STEPS - 1 for length in LENGTHS]
    assert all(24 <= kept <= 32 for kept in stats.tokens_kept)
    assert all(events >= 3 for events in stats.events)
    full = full_layers(model)
    assert sum(len(store.layers) for store in compressed.stores) == len(full)
    for store in compressed.stores:
        assert store.keys.shape[3] == store.values.shape[3] == 32
        assert ((store.positions >= 0).sum(dim=-1) <= 32).all()

    # The other layers hold what transformers' own cache would; before the first compressed one, the very same numbers.
    fed = torch.cat([ids, tokens[:, :-1]], dim=1)
    own = DynamicCache(config=model.config)
    ones = torch.ones(len(LENGTHS), STEPS - 1, dtype=mask.dtype)
    fed_mask = torch.cat([mask, ones], dim=1)
    positions = (fed_mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        model(fed, attention_mask=fed_mask, position_ids=positions, **{cache_keyword(model): own})
    for index, layer in enumerate(own.layers):
        if index in full:
            continue
        mine = compressed.layers[index]
        assert type(mine) is type(layer)
        expected, held = layer_tensors(layer), layer_tensors(mine)
        assert expected.keys() == held.keys()
        for name, value in expected.items():
            assert held[name].shape == value.shape
            if index < full[0]:
                real = fed_mask[:, None, -value.shape[2] :, None] if name in ("keys", "values") else 1
                assert ((held[name] - value) * real).abs().max() <= 1e-4 * (1 + value.abs().max())

    # Row 1 is padded by 15 columns in the batch.
    alone_tokens, alone, _ = run_small(model, rows()[1])
    assert torch.equal(tokens[1], alone_tokens[0])
    for layer in full:
        assert torch.equal(compressed.kept_positions(layer, 1), alone.kept_positions(layer, 0))

    # Both rows of unequal length are what the uncompressed model computes when it may not look at what was evicted.
    for row in (0, 1):
        calls = [LENGTHS[row]] + [1] * (STEPS - 1)
        sequence = torch.cat([rows()[row], tokens[row : row + 1, :-1]], dim=1)
        expected = replay(model, sequence, calls, record, row)[LENGTHS[row] - 1 :]
        logits = torch.stack([call[row, -1] for call in record.logits])
        torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


def test_layers_that_scale_logits_differently() -> None:
    """An event scores all layers of a store at once, and here each has a scaling of its own."""
    model = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    config = kvcompress.load_config("vase-attnv", **SMALL)
    oracle = Oracle(copy.deepcopy(model), config, sequence_id=0)
    ids = distinct(80)
    with kvcompress.apply(model, config) as handle:
        compressed = handle.new_cache([0])
        for part in (slice(0, 20), *(slice(index, index + 1) for index in range(20, 80))):
            logits = feed(model, compressed, ids[:, part])[0]
            torch.testing.assert_close(logits, oracle(ids[0, part].tolist()), rtol=2e-3, atol=2e-3)
        assert compressed.stats().events == [7]


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything apply may touch: attributes and hooks of all modules, their configs, and their classes."""
    found: dict[str, Any] = {"generation_config": model.generation_config.to_dict()}
    for name, module in model.named_modules():
        found[name] = {key: id(value) for key, value in vars(module).items()}
        hooks = {key: list(value.items()) for key, value in vars(module).items() if key.endswith("_hooks")}
        found[f"{name} hooks"] = hooks
        config = vars(module).get("config")
        if config is not None:
            found[f"{name} config"] = (id(config), copy.deepcopy(vars(config)))
        kind = type(module)
        found[str(kind)] = {key: id(value) for key, value in vars(kind).items() if callable(value)}
    return found


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_remove_restores_the_model(kind: str) -> None:
    model = model_of(kind)
    ids = prompt(20)
    with torch.no_grad():
        logits = model(ids).logits
    before = snapshot(model)
    handle = kvcompress.apply(model, "snapkv", **SMALL)
    assert snapshot(model) != before
    assert model.config.get_text_config()._attn_implementation == "kvcompress_eager"
    generate(model, ids, 20)
    assert handle.stats().events == [1]
    handle.remove()
    assert snapshot(model) == before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    handle.remove()
    assert snapshot(model) == before


def test_remove_restores_the_model_after_a_failed_call() -> None:
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(IndexError), kvcompress.apply(model, "snapkv", **SMALL):
        model.generate(input_ids=torch.tensor([[5, VOCAB + 1]]), max_new_tokens=2)
    assert snapshot(model) == before


def test_model_with_a_nested_text_config() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny("gemma3_text").config.to_dict() | {"model_type": "gemma3_text"}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        image_token_index=VOCAB - 1,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model, 0)
    ids, mask = left_padded(rows())
    expected = generate(model, ids, NEW, mask)
    before = snapshot(model)
    with kvcompress.apply(model, "vase-attnv", **LARGE) as handle:
        assert torch.equal(generate(model, ids, NEW, mask), expected)
        assert handle.stats().tokens_kept == [length + NEW - 1 for length in LENGTHS]
        assert model.config.vision_config._attn_implementation == "eager"
    assert snapshot(model) == before


def decode_alternately(models: list[PreTrainedModel], ids: Tensor, steps: int) -> list[list[int]]:
    """Greedy tokens of several models that take turns token by token."""
    outputs: list[list[int]] = [[] for _ in models]
    caches: list[Any] = [None] * len(models)
    with torch.no_grad():
        for _ in range(steps):
            for index, model in enumerate(models):
                inputs = torch.tensor([outputs[index][-1:]]) if outputs[index] else ids
                out = model(inputs, use_cache=True, **{cache_keyword(model): caches[index]})
                caches[index] = out.cache if "cache" in out else out.past_key_values
                outputs[index].append(int(out.logits[0, -1].argmax()))
    return outputs


@pytest.mark.parametrize("kinds", [("llama", "llama", "llama"), ("llama", "gpt_oss", "qwen3")])
def test_two_models_under_different_recipes_do_not_influence_each_other(kinds: tuple[str, str, str]) -> None:
    ids, steps = prompt(40), 20
    models = [tiny(kind, "eager", seed=index) for index, kind in enumerate(kinds)]
    recipes: list[dict[str, Any]] = [
        {"config": "vase-attnv", **SMALL},
        {"config": "streaming-llm", "budget": 16, "buffer": 4},
    ]
    expected = []
    for model, recipe in zip(models, recipes, strict=False):
        with kvcompress.apply(model, **recipe):
            expected += decode_alternately([model], ids, steps)
    # The third model is not compressed at all.
    expected += decode_alternately(models[2:], ids, steps)
    plain = decode_alternately(models[:2], ids, steps)
    assert plain[0] != expected[0]
    assert plain[1] != expected[1]
    first, second = (kvcompress.apply(model, **recipe) for model, recipe in zip(models, recipes, strict=False))
    assert decode_alternately(models, ids, steps) == expected
    assert first.stats().tokens_kept == [24 + (40 + steps - 1 - 40) % 8]
    assert second.stats().tokens_kept == [16 + (40 + steps - 1 - 40) % 4]
    first.remove()
    assert decode_alternately(models, ids, steps) == [plain[0], *expected[1:]]
    second.remove()
    assert decode_alternately(models, ids, steps) == [*plain, expected[2]]


def test_models_that_share_one_config_object() -> None:
    config = tiny("llama", "eager").config
    shared, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    randomize(shared, 0)
    randomize(other, 1)
    ids = prompt(40)
    plain = generate(other, ids, NEW)
    with kvcompress.apply(shared, "vase-attnv", **SMALL) as handle:
        assert torch.equal(generate(other, ids, NEW), plain)
        assert handle.cache is None
        assert not torch.equal(generate(shared, ids, NEW), plain)
    assert config._attn_implementation == "eager"


def _sequence_to_sequence() -> PreTrainedModel:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", vocab_size=VOCAB, **sizes))


def _causal(kind: str, **fields: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | fields)))


def _sharing_keys_and_values() -> PreTrainedModel:
    return _causal(
        "gemma3n_text",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        intermediate_size=[96] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        pad_token_id=0,
    )


REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "falcon": (lambda: _causal("falcon"), "FalconForCausalLM.*AttentionInterface"),
    "bloom": (lambda: _causal("bloom"), "BloomForCausalLM.*AttentionInterface"),
    "t5": (_sequence_to_sequence, "T5ForConditionalGeneration.*encoder-decoder"),
    "encoder": (
        lambda: AutoModel.from_config(AutoConfig.for_model("bert", num_hidden_layers=1)),
        "BertModel.*not a causal decoder",
    ),
    "sliding only": (
        lambda: tiny("mistral", sliding_window=WINDOW),
        "mistral.*no full-attention layer.*DynamicSlidingWindowLayer",
    ),
    "mamba": (lambda: _causal("mamba"), "mamba.*no full-attention layer.*LinearAttentionLayer"),
    "shared layers": (_sharing_keys_and_values, "gemma3n_text.*share each other's keys and values"),
    "not transformers": (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential.*not a transformers PreTrainedModel"),
    "wrapped": (lambda: nn.DataParallel(tiny("llama")), "DataParallel.*before any wrapper"),
    "flex": (lambda: tiny("llama", "flex_attention"), "LlamaForCausalLM.*'flex_attention'.*eager, sdpa"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_unsupported_model_is_refused_by_name_and_left_alone(case: str) -> None:
    build, message = REFUSALS[case]
    model = build()
    model.generation_config = getattr(model, "generation_config", None) or GenerationConfig()
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=message):
        kvcompress.apply(model, "vase-attnv", **SMALL)
    assert snapshot(model) == before


def test_model_cannot_be_wrapped_twice() -> None:
    model = tiny("llama")
    ids = prompt(40)
    with kvcompress.apply(model, "vase-attnv", **SMALL):
        expected = generate(model, ids, NEW)
        before = snapshot(model)
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*already under compression.*remove\(\)"):
            kvcompress.apply(model, "snapkv", **SMALL)
        assert snapshot(model) == before
        assert torch.equal(generate(model, ids, NEW), expected)
    with kvcompress.apply(model, "vase-attnv", **SMALL):
        assert torch.equal(generate(model, ids, NEW), expected)


def test_model_that_transforms_cached_keys_is_refused_when_it_runs() -> None:
    model = _causal("diffllama", num_key_value_heads=2, intermediate_size=96)
    ids = prompt(10)
    with torch.no_grad():
        logits = model(ids).logits
        with kvcompress.apply(model, "vase-attnv", **SMALL), pytest.raises(UnsupportedModelError, match="chunk"):
            model(ids)
        assert torch.equal(model(ids).logits, logits)


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    before = snapshot(model)
    monkeypatch.setattr("kvcompress.model.transformers.__version__", "5.16.2")
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.16\.2.*at least 5\.17"):
        kvcompress.apply(model, "vase-attnv", **SMALL)
    assert snapshot(model) == before
