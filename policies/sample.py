"""Select by weighted sampling without replacement (VASE-AttnV, arXiv 2606.03928)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import SelectStage


class Sample(SelectStage):
    """Draw the unprotected survivors one after the other, each with probability proportional to the weights left.

    Realized in one pass as Gumbel-top-k in log space (Yellott 1977; Kool et al., arXiv 1903.06059):

        rank[i] = log w[i] / temperature + gumbel[i],    survivors = the largest ranks

    ``weights: score`` takes w[i] = score[i], which must not be negative; ``weights: softmax`` takes
    w[i] = exp(score[i]). A weight of zero (also one that underflowed) is drawn only after all positive ones, the
    most recent token first. Nothing is ever drawn twice.
    """

    stage: Literal["sample"] = "sample"
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="> 1 flattens, < 1 sharpens the weights")
    weights: Literal["score", "softmax"] = Field("score", description="how scores become weights")

    @property
    def needs_nonnegative_scores(self) -> bool:
        return self.weights == "score"

    def rank(self, scores: Tensor, tokens: TokenStatistics) -> Tensor:
        return tokens.gumbel_scores(self.stage, scores, self.temperature, log=self.weights == "score")
