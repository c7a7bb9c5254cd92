"""Score by position: the most recent tokens stay (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class Recency(ScoreStage):
    """score[i] = position(i)"""

    stage: Literal["recency"] = "recency"
    nonnegative: ClassVar[bool] = True

    def score(self, tokens: TokenStatistics) -> Tensor:
        return tokens.positions.float()
