"""Cases that hold every kernel against its reference, one file per operation (see :mod:`.cases`)."""

from __future__ import annotations

from kvcompress.kernels.checks import (
    decode_attention,
    dequantize_tokens,
    gumbel_scores,
    hadamard,
    leverage_scores,
    normal_matrix,
    quantize_tokens,
    redundancy,
    replace_slots,
    value_statistics,
    window_scores,
)
from kvcompress.kernels.checks.cases import Case, Outcome, check

CASES: tuple[Case, ...] = (
    *decode_attention.cases(),
    *dequantize_tokens.cases(),
    *gumbel_scores.cases(),
    *hadamard.cases(),
    *leverage_scores.cases(),
    *normal_matrix.cases(),
    *quantize_tokens.cases(),
    *redundancy.cases(),
    *replace_slots.cases(),
    *value_statistics.cases(),
    *window_scores.cases(),
)

# What is compiled ahead of time: attention as dispatch chooses to run it, and the cases of the other operations.
COMPILED: tuple[Case, ...] = (
    *decode_attention.configurations(),
    *(case for case in CASES if case.operation != "decode_attention" and not case.heavy),
)

__all__ = ["CASES", "COMPILED", "Case", "Outcome", "check"]
