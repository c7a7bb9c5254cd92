"""Rounding for ranks, against numpy's float16 and at the ends of float32."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.kernels.precision import coarse

NORMAL_HALF = st.floats(2.0**-14, 65504, width=32)  # what float16 holds with 11 significant bits


@given(st.lists(NORMAL_HALF, min_size=1, max_size=20), st.integers(-100, 100), st.sampled_from([1.0, -1.0]))
def test_as_float16_rounds_at_any_scale(numbers, power, sign):
    numbers = torch.tensor(numbers) * sign
    expected = torch.from_numpy(numbers.numpy().astype(np.float16).astype(np.float32))
    assert torch.equal(coarse(numbers), expected)
    assert torch.equal(coarse(numbers * 2.0**power), expected * 2.0**power)
    assert torch.equal(coarse(coarse(numbers)), coarse(numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_finite_stays_finite(dtype):
    info = torch.finfo(dtype)
    ends = torch.tensor([info.max, -info.max, 0.0, info.tiny], dtype=dtype)
    assert torch.equal(coarse(ends), ends)
    assert coarse(ends).dtype == dtype


def test_last_bits_make_no_difference():
    """Sums of the same numbers in another order: different, and equal once rounded."""
    numbers = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).square()
    there, back = numbers.sum(dim=-1), numbers.flip(-1).cumsum(dim=-1)[:, -1]
    assert (there != back).any()
    assert (coarse(there) == coarse(back)).float().mean() > 0.99
