"""Settings shared by all tests."""

import copy
import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Before anything imports Triton: its interpreter runs kernels on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny import tiny
from transformers import PreTrainedModel

# One thread: the tests compare small tensors, and results must not depend on how many cores the machine has.
torch.set_num_threads(1)

# Derandomized, so that a failure in CI can be repeated; no deadline, since shared machines stall.
settings.register_profile("kvcompress", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kvcompress")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(llama: PreTrainedModel) -> PreTrainedModel:
    """The same model, never compressed."""
    return copy.deepcopy(llama)
