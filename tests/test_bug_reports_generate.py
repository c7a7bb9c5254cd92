"""Failures that users of other libraries reported, tried on ours: compiling, copying, moving, lengths, host reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import Oracle
from tiny import distinct, feed, left_padded, prompt, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

import kvcompress
from kvcompress.cache import CompressedCache

# The oracle attends in float64, the model in float32.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
E24 = kvcompress.load_config("vase-attnv", budget=24, buffer=8)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(llama: PreTrainedModel) -> PreTrainedModel:
    """The same model, never compressed."""
    return copy.deepcopy(llama)


def decode(model: Any, cache: CompressedCache, ids: Tensor, steps: int) -> list[int]:
    """Greedy tokens, one call each."""
    chosen = []
    for _ in range(steps):
        ids = feed(model, cache, ids)[:, -1:].argmax(dim=-1)
        chosen.append(int(ids))
    return chosen


def test_10_compiled_decoding_gives_the_same_tokens_and_never_recompiles() -> None:
    model = tiny("llama", num_hidden_layers=1)
    counter = CompileCounterWithBackend("eager")
    with kvcompress.apply(model, E24) as handle, torch._dynamo.config.patch(recompile_limit=64):
        expected = decode(model, handle.new_cache(), prompt(40), 68)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=counter)
        cache = handle.new_cache()
        # Warm-up: the prompt, then the first steps, after which lengths are known to vary.
        tokens = decode(model, cache, prompt(40), 1)
        tokens += decode(compiled, cache, torch.tensor([tokens[-1:]]), 3)
        frames = counter.frame_count
        with torch._dynamo.config.patch(error_on_recompile=True):
            tokens += decode(compiled, cache, torch.tensor([tokens[-1:]]), 64)
        torch._dynamo.reset()
    assert tokens == expected
    assert counter.frame_count == frames > 0
    assert cache.stats().events == [9]
