"""Saving a cache, copying it, and asking several questions of one compressed context."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny import feed as feed_tensor
from tiny import tiny

import kvcompress

RECIPES = ["full", "vase-attnv", "vase-dkv", "h2o"]


def fields(name: str) -> dict[str, int]:
    return {} if name == "full" else {"budget": 24, "buffer": 8}


def feed(model, cache, ids) -> torch.Tensor:
    return feed_tensor(model, cache, torch.as_tensor(ids))


def prompt(rows: int = 2, length: int = 45) -> torch.Tensor:
    return torch.randint(1, 127, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("name", RECIPES)
def test_saved_state_continues_bit_for_bit(tmp_path, kind, name):
    model = tiny(kind)
    with kvcompress.apply(model, name, **fields(name)) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt())
        feed(model, cache, [[3], [4]])
        torch.save(cache.state_dict(), tmp_path / "cache.pt")
        other = handle.new_cache()
        other.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
        for step in range(30):
            ids = [[step + 5], [step + 50]]
            assert torch.equal(feed(model, cache, ids), feed(model, other, ids))
        assert cache.stats() == other.stats()


def test_saved_state_continues_in_another_process(tmp_path):
    script = """
import sys, torch, kvcompress
sys.path.insert(0, sys.argv[2])
from tiny import feed, tiny
model = tiny("llama")
handle = kvcompress.apply(model, "vase-attnv", budget=24, buffer=8)
cache = handle.new_cache()
cache.load_state_dict(torch.load(sys.argv[1] + "/cache.pt", weights_only=True))
logits = [feed(model, cache, torch.tensor([[i], [i + 40]])) for i in range(5, 25)]
torch.save(torch.cat(logits), sys.argv[1] + "/logits.pt")
"""
    model = tiny("llama")
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=8) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt())
        torch.save(cache.state_dict(), tmp_path / "cache.pt")
        expected = torch.cat([feed(model, cache, [[i], [i + 40]]) for i in range(5, 25)])
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", script, str(tmp_path), here], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt", weights_only=True), expected, rtol=0, atol=1e-5)


def test_a_state_of_another_recipe_or_model_is_refused():
    model = tiny("llama")
    with kvcompress.apply(model, "snapkv", budget=24, buffer=8) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt())
        state = cache.state_dict()
    with kvcompress.apply(model, "snapkv", budget=32, buffer=8) as handle:
        other = handle.new_cache()
        with pytest.raises(kvcompress.CacheError, match="budget: 24"):
            other.load_state_dict(state)
        assert other.columns == 0
    with kvcompress.apply(tiny("gemma3_text"), "snapkv", budget=24, buffer=8) as handle:
        other = handle.new_cache()
        with pytest.raises(kvcompress.CacheError, match=r"holds layers \[0, 1\]"):
            other.load_state_dict(state)


def test_loading_copies():
    """Running the loaded cache must not change the state it came from."""
    model = tiny("llama")
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=8) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt())
        state = cache.state_dict()
        kept = state["stores"][0]["tensors"]["keys"].clone()
        other = handle.new_cache()
        other.load_state_dict(state)
        for step in range(20):
            feed(model, other, [[step + 1], [step + 2]])
        assert torch.equal(state["stores"][0]["tensors"]["keys"], kept)


@pytest.fixture
def failing_layer():
    """Makes the second layer of a model fail while the context lasts."""

    @contextmanager
    def failing(model):
        def fail(*_):
            raise KeyboardInterrupt

        hook = model.model.layers[1].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            yield
        hook.remove()

    return failing


def test_a_decode_step_that_fails_half_way_can_be_repeated(failing_layer):
    """Ctrl-C in the middle of a step loses nothing."""
    model = tiny("llama")
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=8) as handle:
        cache, same = handle.new_cache(), handle.new_cache()
        for each in (cache, same):
            feed(model, each, prompt())
        for step in range(30):
            ids = [[step + 5], [step + 50]]
            if step in (3, 4, 20):
                with failing_layer(model):
                    feed(model, cache, ids)
            assert torch.equal(feed(model, cache, ids), feed(model, same, ids))
        assert cache.stats() == same.stats()


def test_a_prompt_that_fails_half_way_is_noticed(failing_layer):
    """Layers before the fault have stored and compressed the tokens, those after it have not: never just go on."""
    model = tiny("llama")
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=8) as handle:
        cache, fresh = handle.new_cache(), handle.new_cache()
        with failing_layer(model):
            feed(model, cache, prompt())
        with pytest.raises(kvcompress.CacheError, match="failed half way"):
            feed(model, cache, prompt())
        cache.reset()
        for ids in (prompt(), [[9], [9]]):
            assert torch.equal(feed(model, cache, ids), feed(model, fresh, ids))


def test_an_operation_that_other_layers_lack_changes_nothing():
    """transformers' linear-attention layers cannot select rows; the compressed ones must not have done so already."""
    model = tiny("qwen3_next")
    with kvcompress.apply(model, "vase-attnv", budget=24, buffer=8) as handle:
        cache = handle.new_cache()
        feed(model, cache, prompt())
        before = cache.stats()
        for operation, argument in (("batch_select_indices", torch.tensor([0])), ("batch_repeat_interleave", 2)):
            with pytest.raises(kvcompress.CacheError, match=f"{operation}: LinearAttentionLayer"):
                getattr(cache, operation)(argument)
        assert cache.stats() == before


def test_a_model_that_shares_its_config_with_a_compressed_one_is_refused():
    model = tiny("llama")
    twin = type(model)(model.config)
    handle = kvcompress.apply(model, "snapkv", budget=24, buffer=8)
    with pytest.raises(kvcompress.UnsupportedModelError, match="shares its config object"):
        kvcompress.apply(twin, "snapkv", budget=24, buffer=8)
    handle.remove()
    kvcompress.apply(twin, "snapkv", budget=24, buffer=8).remove()
