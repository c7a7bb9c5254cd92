"""Which implementation runs, end to end: the same tokens by kernels (in the interpreter) as by their references."""

import sys
import types
from unittest.mock import patch

import pytest
import torch
from tiny import feed, tiny

import kvcompress
from kvcompress import scoring
from kvcompress.errors import ConfigError
from kvcompress.kernels import backend as backends
from kvcompress.kernels import decode_attention as decode_module
from kvcompress.kernels.backend import backend, check_backend, use_flash_attn, use_triton
from kvcompress.kernels.launch import Tiling, is_interpreted, tilings
from kvcompress.kernels.segment_attention import Segment
from kvcompress.kernels.slot_attention import attention_reference
from kvcompress.quant.coded import Coded
from kvcompress.quant.nf4 import NF4
from kvcompress.quant.per_channel import PerChannel

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")

SETTINGS = {"budget": 24, "buffer": 8}
RECIPES = {
    "vase-attnv": SETTINGS,
    "vase-dkv": SETTINGS,
    "r-kv": SETTINGS,
    "vase-attnv-int4": SETTINGS,
    "ladder": SETTINGS,
    "int4-rotated": {"buffer": 8},
}
# What each recipe has to run by kernels, besides attention.
KERNELS = {
    "vase-attnv": {"window_scores", "value_statistic", "gumbel_scores", "replace_slots"},
    "vase-dkv": {"leverage_scores", "normal_matrix", "replace_slots"},
    "r-kv": {"window_scores", "redundancy", "replace_slots"},
    "vase-attnv-int4": {"quantize_tokens", "replace_slots"},
    "int4-rotated": {"quantize_tokens", "hadamard"},
}


def run(model, name, how):
    """Logits of every call, and what is held at the end, of two ragged rows."""
    config = kvcompress.load_config(name, **RECIPES[name])
    ids = torch.randint(2, 127, (2, 28), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(2, 28, dtype=torch.int64)
    mask[0, :3] = 0
    ids[0, :3] = 0
    steps = torch.randint(2, 127, (9, 2, 1), generator=torch.Generator().manual_seed(6))
    logits = []
    with kvcompress.apply(model, config, backend=how) as handle:
        cache = handle.new_cache()
        logits.append(feed(model, cache, ids, mask))
        for step in steps:
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            logits.append(feed(model, cache, step, mask))
        held = [cache.kept_positions(layer, row) for layer in cache.compressed for row in (0, 1)]
        return torch.cat([part[:, -1:] for part in logits], dim=1), held, cache.stats()


@pytest.fixture(scope="module")
def model():
    return tiny("llama", head_dim=32, num_attention_heads=6, hidden_size=96)


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_give_what_the_references_give(model, name):
    expected, kept, stats = run(model, name, "torch")
    assert {how for operation, how in stats.kernels.items() if operation != "prefill"} == {"torch"}
    with tilings(decode_attention=Tiling(16)), patch.object(decode_module, "LEAST_SPLITS", 2):
        logits, held, stats = run(model, name, "triton")
    assert all(torch.equal(*pair) for pair in zip(kept, held, strict=True))
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert stats.backend == "triton"
    assert KERNELS.get(name, set()) <= {op for op, how in stats.kernels.items() if how == "triton"}, stats.kernels


@pytest.mark.parametrize("name", ["vase-attnv", "vase-dkv", "r-kv", "vase-attnv-int4"])
def test_statistics_computed_where_tokens_lie(monkeypatch, model, name):
    """As on a GPU, where keys and values aren't brought into order before they are scored."""
    expected, kept, _ = run(model, name, "torch")
    monkeypatch.setattr(scoring, "_moves_first", lambda device: False)
    logits, held, _ = run(model, name, "torch")
    assert all(torch.equal(*pair) for pair in zip(kept, held, strict=True))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash"])
def test_architectures(kind):
    """Soft caps, learned sinks, latents, keys and values of different size."""
    model = tiny(kind, attention="eager")
    ids = torch.randint(2, 127, (1, 34), generator=torch.Generator().manual_seed(5))
    logits = {}
    for how in ("torch", "triton"):
        with kvcompress.apply(model, "vase-attnv", **SETTINGS, backend=how) as handle, torch.no_grad():
            cache = handle.new_cache()
            outs = [feed(model, cache, ids[:, :28])[:, -1:]]
            outs += [feed(model, cache, ids[:, step : step + 1]) for step in range(28, 34)]
            logits[how] = torch.cat(outs, dim=1)
    torch.testing.assert_close(logits["triton"], logits["torch"], rtol=0, atol=2e-4)
    assert cache.stats().backend == "triton"


@pytest.mark.parametrize("codec", [NF4(group=32), PerChannel(bits=4, tokens=32)], ids=lambda codec: codec.label)
def test_codecs_without_a_kernel_are_decoded_by_torch(codec):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 32, generator=generator)
    vectors = torch.randn(2, 2, 32, 32, generator=generator)
    coded = Coded(codec, codec.encode(vectors, torch.float16), 32)
    ran: dict[str, str] = {}
    with backend("triton", ran):
        out, lse = decode_module.decode_attention(q, [Segment(coded, coded, None)], 0.2)
    assert ran == {"decode_attention": "torch"}
    expected, expected_lse = decode_module.decode_attention_reference(q, [Segment(coded, coded, None)], 0.2)
    torch.testing.assert_close((out, lse), (expected, expected_lse))


def test_unknown_or_impossible_backends_are_refused(monkeypatch, model):
    with pytest.raises(ConfigError, match=r"backend: 'cuda' is not a backend; known: auto, triton, flash_attn, torch"):
        kvcompress.apply(model, "full", backend="cuda")
    with pytest.raises(ConfigError, match=r"backend: 'flash_attn' needs the package flash-attn.*use auto or torch"):
        kvcompress.apply(model, "full", backend="flash_attn")
    monkeypatch.setattr(backends, "_has_flash_attn", lambda: True)
    with pytest.raises(ConfigError, match=r"'flash_attn' needs a CUDA device, and the model lies on cpu"):
        check_backend("flash_attn", torch.device("cpu"))
    monkeypatch.setattr(backends.launch, "is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match=r"'triton' needs a CUDA or ROCm device, and the model lies on cpu"):
        check_backend("triton", torch.device("cpu"))
    monkeypatch.setattr(backends.launch, "triton", None)
    with pytest.raises(ConfigError, match=r"'triton' needs the package triton"):
        check_backend("triton", torch.device("cuda"))
    check_backend("auto", torch.device("cuda"))


@pytest.mark.parametrize(
    ("asked", "device", "supported", "chosen"),
    [
        ("auto", "cpu", True, "torch"),
        ("auto", "cuda", True, "triton"),
        ("auto", "cuda", False, "torch"),
        ("flash_attn", "cuda", True, "triton"),
        ("torch", "cuda", True, "torch"),
        ("triton", "cpu", True, "triton"),
        ("triton", "cuda", False, "torch"),
    ],
)
def test_choice(asked, device, supported, chosen):
    ran: dict[str, str] = {}
    with backend(asked, ran):
        assert use_triton("x", torch.device(device), supported) == (chosen == "triton")
    assert ran == {"x": chosen}


@pytest.fixture
def flash_attn(monkeypatch):
    """A stand-in with flash-attn's signature and layout, since the package needs a GPU; lists its calls."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale, causal, softcap):
        calls.append((tuple(q.shape), tuple(k.shape), causal, softcap))
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril() if causal else None
        out, _ = attention_reference(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, softmax_scale, softcap or None
        )
        return out.transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr("kvcompress.kernels.flash_attention.use_flash_attn", lambda device, dtype: True)
    return calls


def test_flash_attn_serves_single_pools_of_vectors(flash_attn):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 1, 32, generator=generator).half()
    k, v = (torch.randn(2, 3, 9, 32, generator=generator).half() for _ in range(2))
    expected, _ = attention_reference(q, k, v, None, 0.2, 5.0)
    ran: dict[str, str] = {}
    with backend("flash_attn", ran):
        out, _ = decode_module.decode_attention(q, [Segment(k, v, None)], 0.2, 5.0)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        assert ran == {"decode_attention": "flash_attn"}
        assert flash_attn == [((2, 1, 6, 32), (2, 9, 3, 32), False, 5.0)]
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        sinks = torch.zeros(6)
        for segments, options in (
            ([Segment(k, v, mask)], {}),
            ([Segment(k, v, None)], {"sinks": sinks}),
            ([Segment(k, v, None)], {"return_lse": True}),
            ([Segment(k, v, None), Segment(k, v, None)], {}),
        ):
            decode_module.decode_attention(q, segments, 0.2, **options)
            assert ran["decode_attention"] == "torch"
    assert len(flash_attn) == 1


@pytest.mark.parametrize("padded", [False, True])
def test_flash_attn_serves_prompts_and_steps(flash_attn, model, padded):
    """A batch without padding through flash-attn from the first token on; padding goes through the model's own."""
    ids = torch.randint(2, 127, (2, 30), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, : 3 * padded] = 0
    logits = {}
    for name in ("torch", "flash_attn"):
        with kvcompress.apply(model, "full") as handle:
            cache = handle.new_cache()
            cache.backend = "auto"
            if name == "torch":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("kvcompress.kernels.flash_attention.use_flash_attn", lambda device, dtype: False)
                    logits[name] = [feed(model, cache, ids, mask), feed(model, cache, ids[:, :1], mask.new_ones(2, 31))]
            else:
                logits[name] = [feed(model, cache, ids, mask), feed(model, cache, ids[:, :1], mask.new_ones(2, 31))]
            kernels = cache.stats().kernels
    assert kernels["prefill"] == ("model" if padded else "flash_attn")
    assert [call[2] for call in flash_attn] == ([] if padded else [True, True, False, False])
    if not padded:
        torch.testing.assert_close(logits["flash_attn"], logits["torch"], rtol=0, atol=1e-4)


def test_flash_attn_only_in_sixteen_bits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "_has_flash_attn", lambda: True)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    served = [(cuda, torch.float16), (cuda, torch.bfloat16), (cuda, torch.float32), (cpu, torch.float16)]
    assert [use_flash_attn(*pair) for pair in served] == [True, True, False, False]
    for name in ("torch", "triton"):
        with backend(name):
            assert not use_flash_attn(cuda, torch.float16)


def test_outputs_do_not_depend_on_the_batch():
    """A pool is cut by its length alone: a row's output has the same bits whatever rows are beside it."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 1, 32, generator=generator)
    k, v = (torch.randn(3, 2, 70, 32, generator=generator) for _ in range(2))
    with backend("triton"), tilings(decode_attention=Tiling(16)), patch.object(decode_module, "LEAST_SPLITS", 2):
        whole, _ = decode_module.decode_attention(q, [Segment(k, v, None)], 0.2)
        for row in range(3):
            part = slice(row, row + 1)
            alone, _ = decode_module.decode_attention(q[part], [Segment(k[part], v[part], None)], 0.2)
            assert torch.equal(alone, whole[part])


def test_queries_that_need_gradients_get_them():
    """The kernel has no backward pass; the reference does."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 1, 32, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, 2, 9, 32, generator=generator) for _ in range(2))
    ran: dict[str, str] = {}
    with backend("triton", ran):
        out, _ = decode_module.decode_attention(q, [Segment(k, v, None)], 0.2)
        assert ran == {"decode_attention": "torch"}
        out.square().sum().backward()
        assert q.grad is not None
        with torch.no_grad():
            decode_module.decode_attention(q, [Segment(k, v, None)], 0.2)
        assert ran == {"decode_attention": "triton"}
