"""Score at random: every unprotected candidate is equally likely to stay."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class Random(ScoreStage):
    """score[i] ~ U(0, 1), drawn anew for each token at each event."""

    stage: Literal["random"] = "random"
    nonnegative: ClassVar[bool] = True

    def score(self, tokens: TokenStatistics) -> Tensor:
        return tokens.uniform(self.stage).float()
