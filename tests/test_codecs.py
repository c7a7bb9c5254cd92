"""Codecs against naive numpy: sizes, formats, error model, rotation and packing."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from kvcompress.errors import ConfigError
from kvcompress.kernels.hadamard import hadamard
from kvcompress.kernels.packing import channel_multiple, pack, packed_bytes, unpack
from kvcompress.quant.float8 import Float8
from kvcompress.quant.nf4 import NF4
from kvcompress.quant.per_channel import PerChannel
from kvcompress.quant.rotation import rotation_block
from kvcompress.quant.uniform import Uniform

DIMS = [20, 48, 64, 80, 96, 112, 128, 192, 256, 576]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# bits -> planes, lowest bits of the code first
PLANES = {8: [8], 4: [4], 3: [2, 1], 2: [2]}
LARGEST = {"e4m3": 448, "e5m2": 57344}

CODECS = [
    *(Uniform(bits=b, group=g, rotate=r) for b in PLANES for g in (None, 16, 32, 64) for r in (False, True)),
    *(Float8(format=f, group=g, rotate=r) for f in LARGEST for g in (None, 32) for r in (False, True)),
    *(NF4(group=g, rotate=r) for g in (32, 64) for r in (False, True)),
    *(PerChannel(bits=b, tokens=t) for b in PLANES for t in (8, 32)),
]
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def named(codec):
    share = f"t{codec.tokens}" if isinstance(codec, PerChannel) else f"g{codec.group or 'all'}"
    marks = needs_bitsandbytes if isinstance(codec, NF4) else ()
    return pytest.param(codec, marks=marks, id="-".join([codec.label, share, *["rotated"] * codec.rotate]))


codecs = pytest.mark.parametrize("codec", [*map(named, CODECS)])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def double(tensor):
    return tensor.double().numpy()


def fits(codec, dim):
    whole_bytes = dim % {8: 1, 4: 2, 3: 8, 2: 4}[getattr(codec, "bits", 8)] == 0
    return whole_bytes and dim % (getattr(codec, "group", None) or 1) == 0


def expected_parts(codec, dim, dtype):
    """Name -> tokens per entry, numbers per entry, dtype."""
    if isinstance(codec, NF4):
        return {"codes": (1, dim // 2, torch.uint8), "absmax": (1, dim // codec.group, torch.float32)}
    if isinstance(codec, Float8):
        return {"codes": (1, dim, torch.uint8), "scale": (1, dim // (codec.group or dim), dtype)}
    shared = (codec.tokens, dim, dtype) if isinstance(codec, PerChannel) else (1, dim // (codec.group or dim), dtype)
    return {"codes": (1, dim * codec.bits // 8, torch.uint8), "scale": shared, "offset": shared}


@codecs
def test_sizes(codec):
    for dim in DIMS:
        if not fits(codec, dim):
            with pytest.raises(ConfigError, match=rf"^quantize\.keys\.(bits|group): .*{dim}.*; legal "):
                codec.check(dim, "quantize.keys")
            continue
        codec.check(dim, "quantize.keys")
        some = normal(2, 3, 2 * codec.block_tokens, dim)
        for dtype in DTYPES:
            expected = expected_parts(codec, dim, dtype)
            declared = codec.parts(dim, dtype)
            assert {name: (part.tokens, *part.shape, part.dtype) for name, part in declared.items()} == expected
            for vectors in (some.to(dtype), some[..., :0, :].to(dtype)):
                tokens, encoded = vectors.shape[-2], codec.encode(vectors, dtype)
                assert encoded.keys() == expected.keys()
                for name, (shared_by, size, part_dtype) in expected.items():
                    assert encoded[name].shape == (2, 3, tokens // shared_by, size)
                    assert encoded[name].dtype == part_dtype
                assert sum(part.nbytes for part in encoded.values()) == codec.bytes_per_token(dim, dtype) * 6 * tokens
                back, error = codec.reconstruct(encoded, dim), codec.expected_error(vectors, dtype)
                assert (back.shape, back.dtype) == (vectors.shape, torch.float32)
                assert (error.shape, error.dtype) == (vectors.shape[:-1], torch.float32)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Uniform(bits=8), 128 + 4),
        (Uniform(bits=4, group=64), 64 + 8),
        (Uniform(bits=3, group=32), 48 + 16),
        (Uniform(bits=2, group=32), 32 + 16),
        (Float8(), 128 + 2),
        (NF4(), 64 + 8),
        (PerChannel(bits=2, tokens=32), 32 + 16),
    ],
)
def test_bytes_worked_by_hand(codec, expected):
    assert codec.bytes_per_token(128, torch.float16) == expected


def unpack_by_hand(packed, bits, dim):
    codes, start, shift = [0] * dim, 0, 0
    for plane in PLANES[bits]:
        run = dim * plane // 8  # channels that lie at one place of their bytes
        for channel in range(dim):
            byte = packed[start + channel % run]
            codes[channel] += (byte >> (channel // run * plane)) % 2**plane << shift
        start, shift = start + run, shift + plane
    return codes


def float8_number(byte, layout):
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[layout]
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), (byte & 127) >> mantissa_bits, byte % 2**mantissa_bits
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def nf4_levels():
    """As QLoRA makes them: evenly spaced quantiles, eight above zero and seven below."""
    above, below = (norm.ppf(np.linspace(0.9677083, 0.5, count)[:-1]) for count in (9, 8))
    return np.sort([*-below, 0, *above]) / max(above)


def levels_of(codec):
    if isinstance(codec, NF4):
        return nf4_levels()
    if isinstance(codec, Float8):
        levels = np.array([float8_number(byte, codec.format) for byte in range(256)])
        return levels[abs(levels) <= LARGEST[codec.format]]
    return np.arange(2**codec.bits)


def numbers_by_hand(codec, row, dim):
    """What the codes of one token stand for, before scale and offset."""
    if isinstance(codec, NF4):
        return [nf4_levels()[code] for byte in row for code in (byte >> 4, byte % 16)]
    if isinstance(codec, Float8):
        return [float8_number(byte, codec.format) for byte in row]
    return unpack_by_hand(row, codec.bits, dim)


def grouped(codec, array):
    """(N, dim) -> one row for each scale, along the last axis."""
    if isinstance(codec, PerChannel):
        return array.reshape(-1, codec.tokens, array.shape[1]).swapaxes(1, 2)
    return array.reshape(len(array), -1, codec.group or array.shape[1])


def sylvester(dim):
    """Hadamard matrices of the largest power of two that divides dim along a diagonal, and their size."""
    matrix = np.ones((1, 1))
    while dim % (2 * len(matrix)) == 0:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return np.kron(np.eye(dim // len(matrix)), matrix), len(matrix)


def check_rounded_up(stored, exact, dtype):
    """``stored`` is the smallest number of ``dtype`` that isn't below ``exact``, which is known to float32 rounding."""
    slack = 1e-6 * abs(exact).max()
    above = exact + slack
    if dtype != torch.float32:
        every = double(torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype))
        every = np.unique(every[np.isfinite(every)])
        above = every[np.searchsorted(every, above)]
    assert (stored >= exact - slack).all()
    assert (stored <= above).all()


@codecs
@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16", "float32"])
def test_format(codec, dtype):
    for dim in [dim for dim in (64, 80, 96) if fits(codec, dim)]:
        vectors = (normal(max(codec.block_tokens, 3), dim, seed=dim) + 0.5).to(dtype)
        matrix, block = sylvester(dim) if codec.rotate else (np.eye(dim), 1)
        exact = grouped(codec, double(vectors) @ matrix / block)
        parts = codec.encode(vectors, dtype)
        metadata = {name: double(part)[..., None] for name, part in parts.items()}
        scale, offset = metadata["absmax" if isinstance(codec, NF4) else "scale"], metadata.get("offset", 0)
        numbers = grouped(codec, np.array([numbers_by_hand(codec, row, dim) for row in parts["codes"].tolist()]))

        decoded = double(codec.decode(parts, dim))
        np.testing.assert_allclose(grouped(codec, decoded), numbers * scale + offset, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(double(codec.reconstruct(parts, dim)), decoded @ matrix, rtol=1e-5, atol=1e-5)

        absmax = abs(exact).max(-1, keepdims=True)
        if isinstance(codec, NF4):
            np.testing.assert_allclose(scale, absmax, rtol=1e-6)
        elif isinstance(codec, Float8):
            check_rounded_up(scale, absmax / LARGEST[codec.format], dtype)
        else:
            check_rounded_up(-offset, -exact.min(-1, keepdims=True), dtype)
            check_rounded_up(scale, (exact.max(-1, keepdims=True) - offset) / (2**codec.bits - 1), dtype)

        # Every code is the nearest that there is.
        wanted = (exact - offset) / scale
        nearest = abs(wanted[..., None] - levels_of(codec)).min(-1)
        assert (abs(wanted - numbers) <= nearest + 1e-5 * abs(wanted).max()).all()


def draw(kind, codec, dim, dtype):
    """256 tokens; what shares a scale is lognormal together."""
    rng = np.random.default_rng(7)
    vectors = rng.standard_t(3, (256, dim)) if kind == "student" else rng.standard_normal((256, dim))
    if kind.startswith("lognormal"):
        size = (1, dim) if isinstance(codec, PerChannel) else (256, 1)
        vectors *= rng.lognormal(0, float(kind.removeprefix("lognormal")), size)
    return torch.tensor(vectors).to(dtype)


@codecs
@pytest.mark.parametrize("kind", ["normal", "lognormal0.25", "lognormal0.5", "lognormal1", "student"])
def test_error_model(codec, kind):
    for dim in [dim for dim in (80, 192) if fits(codec, dim)]:
        for dtype in DTYPES if kind == "normal" else DTYPES[:1]:
            vectors = draw(kind, codec, dim, dtype)
            error = codec.reconstruct(codec.encode(vectors, dtype), dim) - vectors.float()
            ratio = float(error.square().mean() / codec.expected_error(vectors, dtype).mean())
            # The ends of a range aren't on an 8-bit grid that bfloat16 describes: a small group notices.
            share = codec.tokens if isinstance(codec, PerChannel) else codec.group or dim
            coarse = getattr(codec, "bits", 4) == 8 and dtype == torch.bfloat16 and share < 32
            assert 0.9 < ratio < (1.2 if coarse else 1.1)


def test_error_model_tells_tokens_apart():
    vectors = torch.cat([size * normal(4, 64) for size in (1, 10, 100)])
    for codec in (Uniform(bits=4), Uniform(bits=2, group=16, rotate=True), Float8(), PerChannel(bits=4, tokens=4)):
        first, second, third = codec.expected_error(vectors, torch.float32).split(4)
        torch.testing.assert_close(second, 100 * first, rtol=1e-3, atol=0)
        torch.testing.assert_close(third, 100 * second, rtol=1e-3, atol=0)
        # Only a block that is described together has one error.
        assert (len(set(first.tolist())) == 1) == isinstance(codec, PerChannel)


def test_error_model_worked_by_hand():
    def expected(codec, *numbers):
        vectors = torch.tensor([*numbers] + [0.0] * (64 - len(numbers)))
        return float(codec.expected_error(vectors[None], torch.float32))

    # Steps of 1, whose ends are exact. A rotation takes 3, -3, 3, ... to one 3 among zeros; back, errors grow by 64.
    assert expected(Uniform(bits=2), 3, 1, 2) == pytest.approx(62 / 64 / 12)
    assert expected(Uniform(bits=2, rotate=True), *[3 * (-1) ** i for i in range(64)]) == pytest.approx(
        64 * 62 / 64 / 12
    )
    # 61 zeros and one number lie 2**-9 apart, the others 2 and 32; then 2**-16, 4 and 8192, where 57344 is exact.
    assert expected(Float8(), 448, 17, -300, 0.001) == pytest.approx((61 * 4**-9 + 2**2 + 32**2) / 64 / 12)
    small = expected(Float8(format="e5m2"), 57344, 1e-5)
    assert small == pytest.approx(63 * 4**-16 / 64 / 12)


@needs_bitsandbytes
def test_error_model_of_nf4():
    levels = nf4_levels()
    for level in range(16):
        borders = [(levels[i] + levels[i + 1]) / 2 for i in (level - 1, level) if 0 <= i < 15]
        cell = np.linspace(*(borders if len(borders) == 2 else sorted([levels[level], *borders])), 10001)
        inside = float(cell[5000])
        vectors = torch.full((1, 32), 3 * inside)
        vectors[0, 5] = -3
        cost = 9 * np.mean((cell - levels[level]) ** 2)
        assert float(NF4(group=32).expected_error(vectors, torch.float16)) == pytest.approx(cost * 31 / 32, rel=1e-3)


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard(dim):
    matrix, block = sylvester(dim)
    assert rotation_block(dim) == block == max(2**i for i in range(10) if dim % 2**i == 0)
    vectors = normal(2, 3, dim)
    np.testing.assert_allclose(double(hadamard(vectors, block)), double(vectors) @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(vectors, block), block) / block, vectors)
    queries, keys = normal(4, dim, seed=1), normal(7, dim, seed=2)
    rotated = Uniform(bits=8, rotate=True)
    logits = rotated.into_basis(queries) @ rotated.into_basis(keys).T / block
    np.testing.assert_allclose(double(logits), double(queries) @ double(keys).T, rtol=1e-4, atol=1e-4)


@codecs
def test_attention_in_the_basis_of_the_codec(codec):
    queries, vectors = normal(5, 64, seed=1), normal(64, 64)
    parts = codec.encode(vectors, torch.float16)
    decoded, back = double(codec.decode(parts, 64)), double(codec.reconstruct(parts, 64))
    weights = np.abs(double(normal(5, 64, seed=2)))
    np.testing.assert_allclose(double(codec.into_basis(queries)) @ decoded.T, double(queries) @ back.T, atol=1e-4)
    output = codec.out_of_basis(torch.tensor(weights @ decoded))
    np.testing.assert_allclose(double(output), weights @ back, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("codec", [*map(named, [*(Uniform(bits=bits) for bits in PLANES), NF4()])])
def test_rotation_spreads_an_outlier_channel(codec):
    for dim in [dim for dim in (64, 80) if fits(codec, dim)]:
        vectors, errors = normal(50, dim), []
        vectors[:, 17] = 20
        for rotate in (False, True):
            either = codec.model_copy(update={"rotate": rotate})
            error = either.reconstruct(either.encode(vectors, torch.float16), dim) - vectors
            errors.append(float(error.square().mean()))
        assert errors[1] < errors[0] / 2


def test_packed_layout():
    codes = torch.tensor([1, 2, 3, 0, 3, 1, 2, 0], dtype=torch.uint8)
    # Byte 0 holds channels 0, 2, 4 and 6 from its lowest bits up.
    assert pack(codes, 2).tolist() == [0b10_11_11_01, 0b00_01_00_10]
    codes = torch.tensor([1, 15, 7, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [0x71, 0x4F]
    codes = torch.tensor([0b101, 0b010, 0b111, 0b000, 0b011, 0b100, 0b110, 0b001], dtype=torch.uint8)
    assert pack(codes, 3).tolist() == [0b10_11_11_01, 0b01_00_00_10, 0b0_1_1_0_0_1_0_1]


@pytest.mark.parametrize("bits", PLANES)
def test_every_code_at_every_place(bits):
    assert channel_multiple(bits) == {8: 1, 4: 2, 3: 8, 2: 4}[bits]
    for dim in [dim for dim in (1, 2, 4, 6, 8, 16, 20, 24, 48, 80) if dim % channel_multiple(bits) == 0]:
        codes = torch.zeros(dim, 2**bits, dim, dtype=torch.uint8)
        for channel, code in np.ndindex(dim, 2**bits):
            codes[channel, code, channel] = code
        for these in (codes, 2**bits - 1 - codes):
            packed = pack(these, bits)
            assert (packed.shape[-1], packed.dtype) == (dim * bits // 8, torch.uint8)
            assert packed.shape[-1] == packed_bytes(dim, bits)
            assert torch.equal(unpack(packed, bits), these)


@given(st.data())
def test_packing_by_hand(data):
    bits = data.draw(st.sampled_from([*PLANES]))
    dim = channel_multiple(bits) * data.draw(st.integers(1, 80))
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=dim, max_size=dim))
    packed = pack(torch.tensor([codes, codes[::-1]], dtype=torch.uint8), bits)
    assert unpack_by_hand(packed[0].tolist(), bits, dim) == codes
    assert unpack(packed, bits).tolist() == [codes, codes[::-1]]


def test_groups_by_number_or_by_size():
    """Two groups of a head of 80 are groups of 40, and only one of the spellings can be given."""
    vectors = torch.randn(3, 5, 80, generator=torch.Generator().manual_seed(0))
    by_number, by_size = Uniform(bits=4, groups=2, rotate=True), Uniform(bits=4, group=40, rotate=True)
    parts, expected = (codec.encode(vectors, torch.float16) for codec in (by_number, by_size))
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    assert torch.equal(by_number.reconstruct(parts, 80), by_size.reconstruct(parts, 80))
    assert by_number.bytes_per_token(80, torch.float16) == by_size.bytes_per_token(80, torch.float16) == 48
    with pytest.raises(ValueError, match=r"give group or groups, not both \(got 32 and 2\)"):
        Uniform(bits=4, group=32, groups=2)
