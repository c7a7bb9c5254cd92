"""Score by the size or spread of the value vector."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvcompress.kernels.value_statistics import Statistic
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class ValueNorm(ScoreStage):
    """The chosen statistic of v[i]; its L2 norm unless set otherwise.

    With ``statistic: range`` and ``weight: -1`` it is the "evict large V" ablation of VASE (arXiv 2606.03928).
    """

    stage: Literal["value_norm"] = "value_norm"
    nonnegative: ClassVar[bool] = True

    statistic: Statistic = Field("l2", description="which statistic of the value vector")

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self.statistic,)

    def score(self, tokens: TokenStatistics) -> Tensor:
        return tokens.value_statistic(self.statistic)
