"""Every kernel against its reference: in Triton's interpreter on the CPU, natively where there is a GPU."""

import pytest
import torch

from kvcompress.kernels.checks import CASES, Case, check
from kvcompress.kernels.launch import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")


@pytest.mark.parametrize("case", [case for case in CASES if not (case.heavy and is_interpreted())], ids=str)
def test_kernel(case: Case) -> None:
    for outcome in check(case, DEVICE):
        assert outcome.passed, f"{case}: {outcome}"


def test_names_are_distinct() -> None:
    names = [str(case) for case in CASES]
    assert len(names) == len(set(names))
