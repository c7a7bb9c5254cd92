"""Score by the norm of the key: small ones attract attention (Devoto et al., arXiv 2406.11430)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvcompress.kernels.precision import coarse
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class KeyNorm(ScoreStage):
    """score[i] = - |k[i]|_2"""

    stage: Literal["key_norm"] = "key_norm"
    nonnegative: ClassVar[bool] = False

    def score(self, tokens: TokenStatistics) -> Tensor:
        return -tokens.per_token(lambda keys, _: coarse(keys.float().norm(dim=-1)))
