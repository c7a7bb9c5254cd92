"""``apply`` and ``remove``: a model is restored exactly, models don't influence each other, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB, WINDOW, generate, left_padded, prompt, randomize, tiny
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import kvcompress
from kvcompress import support
from kvcompress.errors import UnsupportedModelError
from kvcompress.model import cache_keyword

SMALL = {"budget": 24, "buffer": 8}
NEW = 24


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
    model = tiny(kind, "eager")
    ids = prompt(30)
    with torch.no_grad():
        logits = model(ids).logits
    before = snapshot(model)
    handle = kvcompress.apply(model, "snapkv", **SMALL)
    assert snapshot(model) != before
    assert model.config.get_text_config()._attn_implementation == "kvcompress_eager"
    generate(model, ids, 4)
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
    ids, mask = left_padded([prompt(40), prompt(25, seed=1)])
    expected = generate(model, ids, NEW, mask)
    before = snapshot(model)
    with kvcompress.apply(model, "vase-attnv", budget=200, buffer=8) as handle:
        assert torch.equal(generate(model, ids, NEW, mask), expected)
        assert handle.stats().tokens_kept == [40 + NEW - 1, 25 + NEW - 1]
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
    monkeypatch.setattr(support.transformers, "__version__", "5.16.2")
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.16\.2.*at least 5\.17"):
        kvcompress.apply(model, "vase-attnv", **SMALL)
    assert snapshot(model) == before


def test_a_copy_of_a_compressed_model_is_compressed_on_its_own() -> None:
    """deepcopy takes the compression along: the copy must not run the original behind its back."""
    model = tiny("llama")
    ids = prompt(40)
    with kvcompress.apply(model, "vase-attnv", **SMALL) as handle:
        expected = generate(model, ids, NEW)
        twin = copy.deepcopy(model)
        randomize(model, 7)
        assert torch.equal(generate(twin, ids, NEW), expected)
        assert not torch.equal(generate(model, ids, NEW), expected)
        copied = twin.__dict__["_kvcompress_handle"]
        assert copied is not handle
        assert copied.cache is not handle.cache
        copied.remove()
        assert "generate" not in twin.__dict__
        assert handle.model is model
        assert generate(model, ids, NEW).shape == (1, NEW)
    assert torch.equal(generate(twin, ids, NEW), generate(tiny("llama"), ids, NEW))


def test_a_generate_of_the_users_own_is_kept() -> None:
    model = tiny("llama")
    calls = []

    def own(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = own
    with kvcompress.apply(model, "vase-attnv", **SMALL) as handle:
        generate(model, prompt(40), NEW)
        assert handle.stats().events[0] > 0
    assert len(calls) == 1
    assert model.generate is own


def test_a_call_without_tokens_gets_the_models_own_error() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds") as own:
        model()
    with kvcompress.apply(model, "vase-attnv", **SMALL), pytest.raises(ValueError, match="exactly one") as ours:
        model()
    assert str(ours.value) == str(own.value)
