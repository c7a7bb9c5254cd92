"""Codecs on data chosen to hurt: offsets, constants, outliers, the ends of what a float can hold; and refusals."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.errors import ConfigError
from kvcompress.quant.float8 import Float8
from kvcompress.quant.nf4 import NF4
from kvcompress.quant.per_channel import PerChannel
from kvcompress.quant.uniform import Uniform

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BITS = (8, 4, 3, 2)
AFFINE = [
    *(Uniform(bits=bits, group=group) for bits in BITS for group in (None, 16)),
    *(PerChannel(bits=bits, tokens=tokens) for bits in BITS for tokens in (2, 32)),
]
FLOATS = [Float8(), Float8(group=16), Float8(format="e5m2"), NF4(group=32), NF4()]
ROTATED = [*(Uniform(bits=bits, rotate=True) for bits in BITS), Float8(rotate=True), NF4(rotate=True)]
KINDS = ["normal", "wide", "five_to_six", "far_offset", "zero", "some_zero", "subnormal", "smallest", "tiny"]
KINDS += ["one_outlier", "minus_outlier", "both_outliers", "largest", "largest_constant"]


def parametrized(codecs):
    params = []
    for codec in codecs:
        share = codec.tokens if isinstance(codec, PerChannel) else codec.group or "all"
        missing = isinstance(codec, NF4) and find_spec("bitsandbytes") is None
        marks = pytest.mark.skip("needs bitsandbytes") if missing else ()
        params.append(pytest.param(codec, marks=marks, id=f"{codec.label}-{share}{'-rotated' * codec.rotate}"))
    return pytest.mark.parametrize("codec", params)


dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def double(tensor):
    return tensor.double().numpy()


def data(kind, dtype, dim=64, tokens=32):
    """(tokens, dim), finite in ``dtype``."""
    generator, info = torch.Generator().manual_seed(dim), torch.finfo(dtype)
    normal = torch.randn(tokens, dim, generator=generator)
    huge, sign = 6e4 if dtype == torch.float16 else 3e38, normal.sign()
    if kind == "wide":
        normal *= 10.0 ** torch.randint(-4, 4, (tokens, 1), generator=generator)
    if kind == "some_zero":
        normal[::2] = 0
        normal[:, ::2] = 0
    if kind in ("one_outlier", "both_outliers"):
        normal[:, 3] = huge
    if kind in ("minus_outlier", "both_outliers"):
        normal[:, 5] = -huge
    others = {
        "five_to_six": 5 + torch.rand(tokens, dim, generator=generator),
        "far_offset": 1000 + normal,
        "zero": torch.zeros(tokens, dim),
        "subnormal": normal * info.smallest_normal / 8,
        "smallest": sign * info.smallest_normal * info.eps,
        "tiny": normal * info.smallest_normal * 16,
        "largest": sign * info.max,
        "largest_constant": torch.full((tokens, dim), -info.max),
    }
    vectors = others.get(kind, normal).to(dtype)
    assert vectors.isfinite().all()
    return vectors


def finite_parts(codec, vectors, dtype):
    parts = codec.encode(vectors, dtype)
    assert all(part.isfinite().all() for part in parts.values())
    if isinstance(codec, Float8):
        floats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[codec.format]
        assert parts["codes"].view(floats).float().isfinite().all()
    return parts


def round_trip(codec, vectors):
    """Parts, and the error of every element, where nothing may be infinite."""
    dtype = vectors.dtype
    parts = finite_parts(codec, vectors, dtype)
    back = codec.reconstruct(parts, vectors.shape[-1])
    assert back.isfinite().all()
    assert codec.rotate or back.to(dtype).isfinite().all()
    assert not codec.expected_error(vectors, dtype).isnan().any()
    return parts, abs(double(back) - double(vectors))


def largest_error(codec, parts, vectors):
    """What rounding to the nearest may cost each element of (N, dim) vectors."""
    exact, info = double(vectors), torch.finfo(vectors.dtype)
    axis, size = (0, codec.tokens) if isinstance(codec, PerChannel) else (1, codec.group or exact.shape[1])
    starts = range(0, exact.shape[axis], size)
    step = np.repeat(double(parts["absmax" if isinstance(codec, NF4) else "scale"]), size, axis)
    if isinstance(codec, NF4):
        bound = step * (1 - 0.6961928) / 2  # the widest gap: between the levels -1 and -0.6962
    elif isinstance(codec, Float8):
        mantissa_bits, smallest = {"e4m3": (3, 2**-9), "e5m2": (2, 2**-16)}[codec.format]
        bound = np.maximum(abs(exact) * 2.0 ** -(mantissa_bits + 1), step * smallest / 2)
    else:
        width = np.maximum.reduceat(exact, starts, axis) - np.minimum.reduceat(exact, starts, axis)
        width = np.repeat(width, size, axis)
        # No wider than the range asks for, but for the rounding of the scale.
        assert (step <= width / (2**codec.bits - 1) * (1 + info.eps) + info.smallest_normal * info.eps).all()
        bound = step / 2
    # The float32 numbers in between round too, and near zero to multiples of 1e-45, which codes multiply.
    return bound + 2e-7 * abs(exact).max() + 1e-42


@parametrized([*AFFINE, *FLOATS])
@dtypes
def test_error_is_at_most_half_a_step(codec, dtype):
    for kind in KINDS:
        vectors = data(kind, dtype)
        parts, error = round_trip(codec, vectors)
        assert (error <= largest_error(codec, parts, vectors)).all(), kind


@settings(max_examples=200)
@given(st.data())
def test_error_is_at_most_half_a_step_of_anything(data):
    codec = data.draw(st.sampled_from([*AFFINE, *FLOATS[: 3 if find_spec("bitsandbytes") is None else None]]))
    dtype = data.draw(st.sampled_from([*DTYPES.values()]))
    width = 16 if dtype == torch.float16 else 32
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False)
    # A handful of distinct numbers: shrinks well, and makes groups of equal numbers likely.
    pool = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=9)))
    picks = torch.randint(len(pool), (32, 64), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    vectors = pool[picks].to(dtype).nan_to_num(posinf=torch.finfo(dtype).max, neginf=-torch.finfo(dtype).max)
    parts, error = round_trip(codec, vectors)
    assert (error <= largest_error(codec, parts, vectors)).all()


@parametrized([*AFFINE, *FLOATS])
@pytest.mark.parametrize("largest", [7e4, 1e6, 1e12])
def test_saturates_beyond_its_metadata(codec, largest):
    """float32 vectors that float16 metadata cannot describe stay finite and keep their sign."""
    vectors = data("normal", torch.float32)
    vectors *= largest / vectors.abs().max()
    parts = finite_parts(codec, vectors, torch.float16)
    assert codec.expected_error(vectors, torch.float16).isfinite().all()
    back = codec.decode(parts, 64)
    assert back.isfinite().all()
    assert (back * vectors >= 0)[vectors.abs() > largest / 2].all()


def test_no_zero_needed_in_the_range():
    """A grid with an integer zero point, clamped to its codes, is off by 5 here (VASE section 6.3)."""
    _, error = round_trip(Uniform(bits=4), torch.linspace(5, 6, 64).half()[None])
    assert error.max() < 0.034


@parametrized(AFFINE)
@dtypes
def test_offset_at_every_head_size(codec, dtype):
    for dim in (20, 48, 64, 80, 96, 112, 128, 192, 256, 576):
        if dim % {8: 1, 4: 2, 3: 8, 2: 4}[codec.bits] == 0 and dim % (getattr(codec, "group", None) or 1) == 0:
            vectors = data("five_to_six", dtype, dim)
            _, error = round_trip(codec, vectors)
            width = float(vectors.double().max() - vectors.double().min())
            assert error.max() <= width / (2 * (2**codec.bits - 1)) * 1.01 + 2e-6


@parametrized([*AFFINE, *FLOATS])
@dtypes
def test_constants_are_exact(codec, dtype):
    for constant in (0.0, -0.0, 100.0, 1e-6, -100.0, -1e-6):
        vectors = torch.full((32, 64), constant).to(dtype)
        _, error = round_trip(codec, vectors)
        # Not with a scale that is a rounded fraction of the constant.
        assert error.max() <= (2**-4 * abs(constant) if isinstance(codec, Float8) else 0), constant


@parametrized([*AFFINE, *FLOATS])
@dtypes
def test_groups_of_zeros_are_exact(codec, dtype):
    _, error = round_trip(codec, data("some_zero", dtype))
    assert (error[:, ::2] if isinstance(codec, PerChannel) else error[::2]).max() == 0
    assert error.max() > 0


@parametrized([Uniform(bits=8), Uniform(bits=4, group=16), PerChannel(bits=4), Float8(), NF4()])
def test_extremes_of_a_group_are_exact(codec):
    """As far as their types can say it, which is what the error models count on."""
    vectors = data("normal", torch.float32)
    _, error = round_trip(codec, vectors)
    axis = 0 if isinstance(codec, PerChannel) else 2
    groups = double(vectors) if axis == 0 else double(vectors).reshape(32, -1, getattr(codec, "group", None) or 64)
    absmax = abs(groups) == abs(groups).max(axis, keepdims=True)
    assert (error.reshape(groups.shape)[absmax] < 1e-6).all()


@parametrized(ROTATED)
@dtypes
def test_rotated_extremes(codec, dtype):
    dim, block = 192, 64
    for kind in ("one_outlier", "both_outliers", "constant", "alternating", "zero", "subnormal"):
        vectors = data(kind, torch.float16, dim).to(dtype)
        if kind in ("constant", "alternating"):
            # float16 could not hold the sum of a block.
            vectors = torch.full_like(vectors, 6e4)
            vectors[:, ::2] *= 1 if kind == "constant" else -1
        parts, error = round_trip(codec, vectors)
        largest = max(float(part.max()) for name, part in parts.items() if name in ("scale", "absmax"))
        half_step = largest * {"uniform": 0.5, "float8": 448 / 2**4, "nf4": 0.152}[codec.codec]
        slack = 1e-6 * float(vectors.double().abs().max())
        assert error.max() <= block * half_step + slack, kind
        # Errors of both signs add up to far less.
        assert error.mean() <= 2 * block**0.5 * half_step + slack, kind


@parametrized([*AFFINE, *FLOATS, *ROTATED])
def test_the_same_codes_every_time(codec):
    vectors = data("wide", torch.float16)
    first = codec.encode(vectors, torch.float16)
    for _ in range(50):
        again = codec.encode(vectors, torch.float16)
        assert all(torch.equal(again[name], first[name]) for name in first)


@parametrized([*AFFINE, *FLOATS, *ROTATED])
def test_codes_of_a_token_depend_on_its_block_alone(codec):
    size = codec.block_tokens
    vectors = torch.cat([data(kind, torch.bfloat16, tokens=size) for kind in ("wide", "some_zero", "subnormal")])
    together = codec.encode(vectors.expand(2, 1, -1, -1), torch.bfloat16)
    for block in range(3):
        alone = codec.encode(vectors[block * size : (block + 1) * size], torch.bfloat16)
        for name, part in alone.items():
            rows = len(part)
            for lead in (0, 1):
                assert torch.equal(together[name][lead, 0, block * rows : (block + 1) * rows], part)


@parametrized([*AFFINE, *FLOATS, *ROTATED])
def test_views_with_strides(codec):
    vectors = data("normal", torch.float16)
    parts = codec.encode(vectors, torch.float16)
    spread = torch.stack([vectors, torch.full_like(vectors, torch.nan)], dim=-1)[..., 0]
    turned = vectors.T.contiguous().T
    for view in (spread, turned):
        assert all(torch.equal(part, parts[name]) for name, part in codec.encode(view, torch.float16).items())
    views = {name: torch.stack([part, part.flip(0).flip(1)], dim=-1)[..., 0] for name, part in parts.items()}
    assert torch.equal(codec.decode(views, 64), codec.decode(parts, 64))


@parametrized([*AFFINE, *FLOATS])
@dtypes
def test_reconstruction_survives_another_round(codec, dtype):
    for kind in ("normal", "five_to_six", "wide"):
        vectors = data(kind, dtype)
        once = codec.reconstruct(codec.encode(vectors, dtype), 64)
        twice = codec.reconstruct(codec.encode(once, dtype), 64)
        if dtype == torch.float32:
            torch.testing.assert_close(once, twice, rtol=0, atol=1e-6 * float(vectors.abs().max()))
        # With 16 bits only if the same grid is found again: both of its ends used, and all of it exact in float32.
        elif (codec.label[:4], dtype) != ("int8", torch.bfloat16) and codec.block_tokens != 2 and kind != "wide":
            assert torch.equal(once, twice), kind


@pytest.mark.parametrize(
    ("codec", "dim", "message"),
    [
        (Uniform(bits=4, group=48), 64, "keys.group: 48 does not divide head size 64; legal groups: 64, 32, 16, 8 "),
        (Uniform(bits=4, group=128), 80, "keys.group: 128 does not divide head size 80; legal groups: 80, 40, 20, 16,"),
        (Uniform(bits=8, groups=3), 64, r"keys.groups: head size 64 cannot be divided into 3 .* legal: 1, 2, 4, 8$"),
        (Uniform(bits=8, groups=4), 20, r"keys.groups: head size 20 cannot be divided into 4 .* legal: 1, 2$"),
        (Float8(group=16), 20, "keys.group: 16 does not divide head size 20; legal groups: 20, 10 "),
        (Uniform(bits=3), 20, "keys.bits: 3-bit codes .* multiple of 8, and it is 20; legal bits: 2, 4, 8$"),
        (Uniform(bits=2), 6, "keys.bits: 2-bit codes .* multiple of 4, and it is 6; legal bits: 4, 8$"),
        (Uniform(bits=4), 5, "keys.bits: 4-bit codes .* multiple of 2, and it is 5; legal bits: 8$"),
        (PerChannel(bits=3), 20, "keys.bits: 3-bit codes .* legal bits: 2, 4, 8$"),
        (NF4(), 96, "keys.group: 64 is no block size of nf4 that divides head size 96; legal groups: 32$"),
        (NF4(group=48), 96, "keys.group: 48 is no block size of nf4 that divides head size 96; legal groups: 32$"),
        (NF4(group=16), 576, "keys.group: 16 is no block size .* head size 576; legal groups: 32, 64$"),
        (NF4(group=32), 80, "keys.group: 32 is no block size .* head size 80; legal groups: none$"),
    ],
)
def test_refusals(codec, dim, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        codec.check(dim, "keys")


def test_refused_settings(monkeypatch):
    for wrong in ({"bits": 5}, {"bits": 4, "group": 4}, {"bits": 4, "groups": 0}, {"bits": 4, "size": 8}):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            Uniform(**wrong)
    with pytest.raises(ValueError, match="rotation mixes the channels"):
        PerChannel(bits=4, rotate=True)
    with pytest.raises(ValueError, match="tokens"):
        PerChannel(bits=4, tokens=1)
    with pytest.raises(AssertionError, match="33 tokens"):
        PerChannel(bits=4).encode(torch.zeros(33, 8), torch.float16)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"^values: nf4 needs bitsandbytes: pip install 'kvcompress\[quant\]'$"):
        NF4().check(64, "values")


def test_a_rotation_of_the_largest_numbers_stays_finite():
    """Rotated sums of 64 numbers near 3e38 overflow float32 unless they are scaled first."""
    vectors = torch.full((1, 3, 64), 3e38).to(torch.bfloat16)
    vectors[:, 1, ::2] *= -1
    codec = Uniform(bits=8, rotate=True)
    parts = codec.encode(vectors, torch.bfloat16)
    assert all(torch.isfinite(part.float()).all() for part in parts.values())
    decoded = codec.decode(parts, 64)
    assert torch.isfinite(decoded).all()
    assert torch.isfinite(codec.expected_error(vectors, torch.bfloat16)).all()
