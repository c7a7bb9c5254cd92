"""Counter-based random numbers: known answers, independence of the batch, and distributions."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvcompress.kernels.philox import (
    philox_4x32,
    random_words,
    sequence_key,
    stream_of,
    to_gumbel,
    to_normal,
    to_uniform,
)

_WORD = 0xFFFFFFFF
words32 = st.integers(0, _WORD)


def philox_by_hand(counter, key):
    """Philox-4x32-10 on Python integers, straight from the paper."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def philox_numpy(counter, key):
    """The same on numpy uint64 arrays, whose products cannot overflow."""
    low, shift = np.uint64(_WORD), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (right >> shift) ^ c1 ^ k0, right & low, (left >> shift) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def words_by_hand(seed, sequence, layer, head, event, position, stream):
    """The keying of the module docstring, for one draw."""
    sequence &= (1 << 64) - 1
    key = philox_by_hand((sequence & _WORD, sequence >> 32, 0, 0), (seed & _WORD, seed >> 32))[:2]
    return philox_by_hand((position, event, layer * 65536 + head, stream), key)


def tensors(*values):
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


def draw(seed=1, sequence=2, layer=3, head=4, event=5, position=6, stream=7):
    words = random_words(seed, *tensors(sequence, layer, head, event, position), stream)
    return tuple(int(word) for word in words)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((_WORD,) * 4, (_WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert tuple(int(word) for word in philox_4x32(tensors(*counter), tensors(*key))) == expected
    assert philox_by_hand(counter, key) == expected


@given(st.lists(st.tuples(*[words32] * 6), min_size=1, max_size=20))
def test_equals_numpy_bit_for_bit(rows):
    columns = np.array(rows, dtype=np.int64).T
    ours = philox_4x32(tuple(map(torch.from_numpy, columns[:4])), tuple(map(torch.from_numpy, columns[4:])))
    for mine, theirs in zip(ours, philox_numpy(columns[:4], columns[4:]), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.astype(np.int64))


@given(
    seed=st.integers(0, 2**64 - 1),
    sequence=st.integers(-(2**63), 2**63 - 1),
    layer=st.integers(0, 65535),
    head=st.integers(0, 65535),
    event=words32,
    position=words32,
    name=st.text(max_size=5),
)
def test_keying_is_as_documented(seed, sequence, layer, head, event, position, name):
    stream = zlib.crc32(name.encode())
    assert stream_of(name) == stream
    expected = words_by_hand(seed, sequence, layer, head, event, position, stream)
    assert draw(seed, sequence, layer, head, event, position, stream) == expected


def test_extreme_counters_do_not_overflow():
    """The largest words make products of nearly 2**64, which int64 holds only wrapped."""
    expected = words_by_hand(2**64 - 1, -1, 65535, 65535, _WORD, _WORD, _WORD)
    assert draw(2**64 - 1, -1, 65535, 65535, _WORD, _WORD, _WORD) == expected


@pytest.mark.parametrize("field", ["seed", "sequence", "layer", "head", "event", "position", "stream"])
@pytest.mark.parametrize("difference", [1, 256, 65535])
def test_every_coordinate_counts(field, difference):
    base = {"seed": 1, "sequence": 2, "layer": 3, "head": 4, "event": 5, "position": 6, "stream": 7}
    changed = draw(**{**base, field: base[field] + difference})
    assert all(a != b for a, b in zip(draw(**base), changed, strict=True))


def test_high_words_of_seed_and_sequence_count():
    assert draw(seed=1) != draw(seed=1 + 2**32)
    assert draw(sequence=1) != draw(sequence=1 + 2**32)


def test_layer_and_head_do_not_collide():
    """layer * 65536 + head: neighbours in one must not be neighbours in the other."""
    sites = {draw(layer=layer, head=head) for layer in range(8) for head in range(8)}
    assert len(sites) == 64


def test_a_draw_does_not_depend_on_the_rest_of_the_batch():
    sequences = torch.tensor([5, -9, 2**40])
    heads, positions = torch.arange(3), torch.tensor([0, 7, 123_456])

    def batch(order):
        shape = (len(order), 1, 1)
        row = torch.full(shape, 4)
        return random_words(9, sequences[order].reshape(shape), row, heads[None, :, None], row, positions, 1)[0]

    whole = batch([0, 1, 2])
    assert torch.equal(batch([2, 0, 1]), whole[[2, 0, 1]])
    assert torch.equal(batch([1]), whole[[1]])
    for row in range(3):
        for head in range(3):
            for column, position in enumerate(positions.tolist()):
                expected = words_by_hand(9, int(sequences[row]), 4, head, 4, position, 1)[0]
                assert int(whole[row, head, column]) == expected


def test_sequence_keys_of_neighbours_differ_in_both_words():
    first, second = sequence_key(0, torch.arange(1000))
    assert len(set(first.tolist())) == 1000
    assert len(set(second.tolist())) == 1000


@given(words32)
def test_uniform_lies_strictly_inside_the_unit_interval(word):
    uniform = to_uniform(torch.tensor(word))
    assert uniform.dtype == torch.float64
    assert float(uniform) == ((word >> 9) + 0.5) / 2**23
    assert 0 < float(uniform) < 1
    assert 0 < float(uniform.float()) < 1


@pytest.mark.parametrize("word", [0, 1, 511, 512, 2**31, _WORD - 1, _WORD])
def test_transforms_are_finite_at_the_ends(word):
    (tensor,) = tensors(word)
    uniform = ((word >> 9) + 0.5) / 2**23
    assert 0 < float(to_uniform(tensor).float()) < 1
    assert to_gumbel(tensor).dtype == torch.float32
    assert float(to_gumbel(tensor)) == pytest.approx(-np.log(-np.log(uniform)), rel=1e-6)
    for other in (0, 12345, _WORD):
        angle = 2 * np.pi * ((other >> 9) + 0.5) / 2**23
        normal = to_normal(tensor, tensors(other)[0])
        assert normal.dtype == torch.float32
        assert float(normal) == pytest.approx(np.sqrt(-2 * np.log(uniform)) * np.cos(angle), rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def sample_words():
    """50,000 consecutive positions of one head: exactly how a stage reads the generator."""
    position = torch.arange(50_000)
    return random_words(2026, *tensors(1, 2, 3, 4), position, stream_of("sample"))


@pytest.mark.parametrize("word", range(4))
def test_each_word_is_uniform(sample_words, word):
    uniform = to_uniform(sample_words[word]).numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 0.01
    bits = (sample_words[word][:, None] >> torch.arange(32)) & 1
    # Each bit is set in half the draws, within 5 standard deviations of a fair coin.
    assert (bits.double().mean(dim=0) - 0.5).abs().max() < 5 * 0.5 / np.sqrt(50_000)


def test_words_and_neighbours_are_uncorrelated(sample_words):
    columns = np.stack([to_uniform(word).numpy() for word in sample_words])
    limit = 5 / np.sqrt(columns.shape[1])
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < limit
    for column in columns:
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < limit


def test_gumbel_and_normal_have_the_right_distribution(sample_words):
    first, second, third, _ = sample_words
    gumbel, normal = to_gumbel(first).double().numpy(), to_normal(second, third).double().numpy()
    assert stats.kstest(gumbel, "gumbel_r").pvalue > 0.01
    assert stats.kstest(normal, "norm").pvalue > 0.01
    assert gumbel.mean() == pytest.approx(np.euler_gamma, abs=0.03)
    assert gumbel.var() == pytest.approx(np.pi**2 / 6, abs=0.06)
    assert normal.mean() == pytest.approx(0, abs=0.02)
    assert normal.var() == pytest.approx(1, abs=0.03)
    assert stats.kurtosis(normal) == pytest.approx(0, abs=0.12)
