"""Select the best scores."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import SelectStage


class TopK(SelectStage):
    """Keep the protected candidates and those of highest score, M in all."""

    stage: Literal["top_k"] = "top_k"

    def rank(self, scores: Tensor, tokens: TokenStatistics) -> Tensor:
        return scores
