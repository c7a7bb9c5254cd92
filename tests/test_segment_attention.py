"""Attention over pools of different precision, against the same written out in float64, one query at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, lcm
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcompress.kernels import segment_attention as module
from kvcompress.kernels.segment_attention import Segment, segment_attention, segment_mass
from kvcompress.kernels.slot_attention import attention_reference
from kvcompress.quant.codec import Codec
from kvcompress.quant.coded import Coded
from kvcompress.quant.formats import parse_codec
from kvcompress.quant.per_channel import PerChannel
from kvcompress.quant.uniform import Uniform

DIM = 16
POISON = 8
CODECS: dict[str, Codec | torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": parse_codec("int8"),
    "int4": Uniform(bits=4, group=8),
    "int3": Uniform(bits=3),
    "int2 rotated": Uniform(bits=2, rotate=True),
    "fp8 rotated": parse_codec({"codec": "float8", "rotate": True}),
    "channel": PerChannel(bits=4, tokens=4),
    "channel of six": PerChannel(bits=2, tokens=6),
}
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "offset": lambda x: 5.5 + x.tanh() / 2,
    "outlier": lambda x: torch.cat([x[..., :1] * 50, x[..., 1:]], dim=-1),
    "constant": lambda x: torch.full_like(x, -1.5),
}


def pool(vectors: Tensor, codec: Codec | torch.dtype, channels: int | None = None) -> Tensor | Coded:
    """Vectors (rows, kv_heads, N, dim) as the front of a larger pool, the rest of which is full of NaN."""
    count = vectors.shape[2]
    if isinstance(codec, torch.dtype):
        return torch.cat([vectors, vectors.new_full((*vectors.shape[:2], POISON, vectors.shape[3]), torch.nan)], dim=2)[
            :, :, :count
        ].to(codec)
    parts = {}
    for name, part in codec.encode(vectors, torch.float32).items():
        fill = torch.nan if part.is_floating_point() else 255
        poison = part.new_full((*part.shape[:2], POISON, part.shape[3]), fill)
        parts[name] = torch.cat([part, poison], dim=2)[:, :, : part.shape[2]]
    return Coded(codec, parts, vectors.shape[3], channels)


def plain(states: Tensor | Coded) -> Tensor:
    """What a pool stands for, in float64, by the codec alone."""
    if isinstance(states, Tensor):
        return states.double()
    return states.codec.reconstruct(states.parts, states.dim)[..., : states.channels].double()


@dataclass
class Case:
    queries: Tensor
    segments: list[Segment]
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, list[Segment], float, float | None, Tensor | None]:
        return self.queries, self.segments, self.scaling, self.softcap, self.sinks

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """All keys, values, and whether (rows, Q, N) a query may look."""
        shape = (self.queries.shape[0], 1, self.queries.shape[2])
        masks = [
            torch.ones(*shape, s.tokens, dtype=torch.bool) if s.mask is None else s.mask.expand(*shape, -1)
            for s in self.segments
        ]
        keys, values = (torch.cat([plain(s[part]) for s in self.segments], dim=2) for part in (0, 1))
        return keys, values, torch.cat(masks, dim=-1)[:, 0]


def naive(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output (rows, heads, Q, value_dim) and mass (rows, kv_heads, N), one query at a time."""
    keys, values, mask = (tensor.numpy() for tensor in case.joined())
    queries = case.queries.double().numpy()
    rows, heads, length, _ = queries.shape
    group = heads // keys.shape[1]
    out, mass = np.zeros((rows, heads, length, values.shape[3])), np.zeros(keys.shape[:3])
    for row, head, step in np.ndindex(rows, heads, length):
        visible = np.flatnonzero(mask[row, step])
        if not len(visible):
            continue
        logits = keys[row, head // group, visible] @ queries[row, head, step] * case.scaling
        if case.softcap is not None:
            logits = case.softcap * np.tanh(logits / case.softcap)
        every = logits if case.sinks is None else np.append(logits, float(case.sinks[head]))
        exponentials = np.exp(logits - every.max())
        weights = exponentials / np.exp(every - every.max()).sum()
        out[row, head, step] = weights @ values[row, head // group, visible]
        mass[row, head // group, visible] += weights / group
    return out, mass


@contextmanager
def small(block: int, slice_elements: int | None = None) -> Iterator[None]:
    """Blocks of so many tokens, and queries in slices of so many logits."""
    with patch.object(module, "BLOCK", block), patch.object(module, "_SLICE_ELEMENTS", slice_elements or 1 << 24):
        yield


def assert_right(case: Case) -> None:
    """Both functions against both references."""
    expected, expected_mass = naive(case)
    keys, values, mask = case.joined()
    tolerance = 1e-5 * (1 + float(values.abs().max())) * (1 + float(keys.abs().max()))
    out = segment_attention(*case.arguments)
    assert out.dtype == case.queries.dtype
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=tolerance)
    reference, _ = attention_reference(
        case.queries, keys.float(), values.float(), mask[:, None], case.scaling, case.softcap, case.sinks
    )
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=tolerance)
    masses = segment_mass(*case.arguments)
    assert [mass.shape[-1] for mass in masses] == [segment.tokens for segment in case.segments]
    np.testing.assert_allclose(torch.cat(masses, dim=-1).numpy(), expected_mass, rtol=1e-3, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, kv_heads, group, length = (draw(st.integers(1, top)) for top in (3, 2, 3, 4))
    value_dim = draw(st.sampled_from([8, 16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    data = DATA[draw(st.sampled_from(sorted(DATA)))]
    segments = []
    names = draw(st.lists(st.tuples(*[st.sampled_from(sorted(CODECS))] * 2), min_size=1, max_size=4))
    for index, pair in enumerate(names):
        codecs = [CODECS[name] for name in pair]
        unit = lcm(*(codec.block_tokens for codec in codecs if isinstance(codec, Codec)))
        count = unit * draw(st.integers(0 if index else 1, 24 // unit))
        vectors = [data(torch.randn(rows, kv_heads, count, dim, generator=generator)) for dim in (DIM, value_dim)]
        states = [pool(*each) for each in zip(vectors, codecs, strict=True)]
        shape = draw(st.sampled_from([None, (rows, 1, 1, count), (1, 1, length, count), (rows, 1, length, count)]))
        mask = None if shape is None else torch.rand(shape, generator=generator) < draw(st.sampled_from([0, 0.5, 0.9]))
        segments.append(Segment(states[0], states[1], mask))
    sinks = torch.randn(kv_heads * group, generator=generator) if draw(st.booleans()) else None
    queries = torch.randn(rows, kv_heads * group, length, DIM, generator=generator)
    return Case(queries, segments, 0.25, draw(st.sampled_from([None, 2.0])), sinks)


@settings(max_examples=80)
@given(case=cases(), block=st.sampled_from([1, 4, 7, 12, 1024]), slice_elements=st.sampled_from([1, 40, 1 << 24]))
def test_any_segments_masks_and_blocks(case: Case, block: int, slice_elements: int) -> None:
    with small(block, slice_elements):
        assert_right(case)


def case_of(
    codec: Codec | torch.dtype, count: int = 40, length: int = 3, mask: Tensor | None = None, seed: int = 0
) -> Case:
    """One pool of 40 tokens and eight plain ones; two rows, two KV heads, four heads."""
    generator = torch.Generator().manual_seed(seed)
    coded, own = ([torch.randn(2, 2, n, DIM, generator=generator) for _ in range(2)] for n in (count, 8))
    segments = [Segment(pool(coded[0], codec), pool(coded[1], codec), mask), Segment(own[0], own[1], None)]
    return Case(torch.randn(2, 4, length, DIM, generator=generator), segments, DIM**-0.5)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("length", [1, 5])
def test_block_boundaries(count: int, length: int) -> None:
    with small(16):
        assert_right(case_of(CODECS["int4"], count, length))


@pytest.mark.parametrize(("tokens", "block"), [(6, 16), (6, 6), (10, 16), (16, 6)])
def test_blocks_that_do_not_divide_a_codec_s_own(tokens: int, block: int) -> None:
    """Tokens that share metadata are decoded together, be it that they are more than a block."""
    with small(block):
        assert_right(case_of(PerChannel(bits=4, tokens=tokens), 4 * tokens))


@pytest.mark.parametrize(("key_tokens", "value_tokens"), [(4, 6), (6, 4), (1, 6), (6, 1)])
def test_keys_and_values_in_blocks_of_different_size(key_tokens: int, value_tokens: int) -> None:
    keys, values = torch.randn(2, 2, 2, 24, DIM, generator=torch.Generator().manual_seed(1))
    codecs = [PerChannel(bits=8, tokens=n) if n > 1 else Uniform(bits=8) for n in (key_tokens, value_tokens)]
    case = case_of(torch.float32)
    case.segments[0] = Segment(pool(keys, codecs[0]), pool(values, codecs[1]), None)
    for block in (1, 4, 6, 10, 12, 1024):
        with small(block):
            assert_right(case)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("softcap", [None, 1.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_codec_with_softcap_and_sinks(name: str, softcap: float | None, sinks: bool) -> None:
    codec = CODECS[name]
    case = case_of(codec, count=36)
    case.softcap, case.sinks = softcap, torch.tensor([-2.0, 0.0, 1.0, 8.0]) if sinks else None
    with small(16, 64):
        assert_right(case)


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_a_query_that_may_look_nowhere_gets_zeros(sinks: Tensor | None) -> None:
    mask = torch.ones(2, 1, 3, 40, dtype=torch.bool)
    mask[0, :, 1] = mask[1] = False
    case = case_of(CODECS["int4"], mask=mask)
    own = torch.ones(2, 1, 3, 8, dtype=torch.bool)
    own[0, :, 1] = own[1, :, 2] = False
    case.segments[1] = case.segments[1]._replace(mask=own)
    case.sinks = sinks
    with small(16):
        assert_right(case)
        out, masses = segment_attention(*case.arguments), segment_mass(*case.arguments)
    assert (out[0, :, 1] == 0).all()
    assert (out[1, :, 2] == 0).all()
    assert (out[1, :, 0] != 0).any()
    if sinks is None:
        # Two queries of either row have seen something, all of it.
        torch.testing.assert_close(torch.cat(masses, dim=-1).sum(dim=-1), torch.full((2, 2), 2.0))


@pytest.mark.parametrize("high", [90, 1000, 120000])
@pytest.mark.parametrize("low", [-120000, -1000, -90, 0])
def test_extreme_logits(low: int, high: int) -> None:
    """Whole numbers, so that logits are exact: the largest of them met first, last, or in between.

    A log-sum-exp is off by a unit in its last place, which is a factor on the weights.
    """
    tolerance = float(np.spacing(np.float32(high)))
    for place in (0, 20, 39, 40, 47):
        case = case_of(torch.float32)
        keys = torch.zeros(2, 2, 48, DIM)
        keys[..., 0] = low
        keys[:, :, place, 0], keys[:, :, (place + 9) % 48, 0] = high, high - 1
        case.queries = torch.zeros(2, 4, 3, DIM)
        case.queries[..., 0] = 1.0
        case.scaling = 1.0
        for index, part in enumerate((slice(0, 40), slice(40, 48))):
            case.segments[index] = case.segments[index]._replace(keys=keys[:, :, part])
        with small(16):
            out, mass = segment_attention(*case.arguments), torch.cat(segment_mass(*case.arguments), dim=-1)
        expected, expected_mass = naive(case)
        assert expected_mass.max() == pytest.approx(3 / (1 + np.exp(-1)))
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=4 * tolerance)
        np.testing.assert_allclose(mass.numpy(), expected_mass, rtol=1e-5 + tolerance, atol=1e-6)


def test_nothing_is_hidden() -> None:
    """A NaN among the keys that a query may look at must show, and only there."""
    case = case_of(torch.float32)
    keys = case.segments[0].keys
    assert isinstance(keys, Tensor)
    keys[1, 0, 17] = torch.nan
    with small(16):
        out = segment_attention(*case.arguments)
    assert out[1, :2].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 2:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries_are_computed_in_float32(dtype: torch.dtype) -> None:
    """As exact as the rounding of the output allows."""
    case = case_of(CODECS["int8"])
    case.queries = case.queries.to(dtype)
    out = segment_attention(*case.arguments)
    assert out.dtype == dtype
    expected = torch.from_numpy(naive(case)[0])
    assert ((out.double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("codec", [CODECS["int4"], CODECS["int2 rotated"], CODECS["channel"]])
@pytest.mark.parametrize("channels", [8, 12, 16])
def test_values_that_are_channels_of_keys(codec: Codec, channels: int) -> None:
    """Latents, rotated as a whole: the values are a part of what comes out of the rotation."""
    case = case_of(codec, seed=2)
    coded = case.segments[0].keys
    assert isinstance(coded, Coded)
    own = case.segments[1]
    case.segments = [
        Segment(coded, Coded(codec, coded.parts, DIM, channels), None),
        Segment(own.keys, own.values[..., :channels], None),  # type: ignore[index]
    ]
    with small(8):
        assert_right(case)
    vectors = Coded(codec, coded.parts, DIM, channels).vectors()
    torch.testing.assert_close(vectors, codec.reconstruct(coded.parts, DIM)[..., :channels])


@pytest.mark.parametrize("count", [8, 16, 40, 128])
@pytest.mark.parametrize("slices", [1, 3])
def test_no_more_than_a_block_is_decoded_at_once(monkeypatch, count: int, slices: int) -> None:
    """Counted: keys and values once per block and slice of queries; for mass keys twice, values never."""
    sizes: list[int] = []
    original = Uniform.decode

    def decode(self, parts, dim):
        sizes.append(parts["codes"].shape[-2])
        return original(self, parts, dim)

    monkeypatch.setattr(Uniform, "decode", decode)
    case = case_of(CODECS["int4"], count)
    with small(16, 1 << 24 if slices == 1 else 1):
        segment_attention(*case.arguments)
        attended = list(sizes)
        sizes.clear()
        segment_mass(*case.arguments)
    blocks = ceil(count / 16)
    assert max(attended) <= 16
    assert max(sizes) <= 16
    assert len(attended) == len(sizes) == 2 * blocks * slices
    assert sum(attended) == sum(sizes) == 2 * count * slices


def test_the_order_of_segments_and_of_slots_does_not_matter() -> None:
    case = case_of(CODECS["int4"])
    expected = segment_attention(*case.arguments)
    coded, own = case.segments
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = [
        Coded(states.codec, {n: p[:, :, order] for n, p in states.parts.items()}, DIM)  # type: ignore[union-attr]
        for states in (coded.keys, coded.values)
    ]
    case.segments = [own, Segment(shuffled[0], shuffled[1], None)]
    with small(16):
        torch.testing.assert_close(segment_attention(*case.arguments), expected, rtol=1e-5, atol=1e-6)
