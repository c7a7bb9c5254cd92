"""Score by approximate leverage of keys and values (CurDKV; VASE-DKV, arXiv 2606.03928)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from kvcompress.kernels.leverage_scores import leverage_scores
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class Leverage(ScoreStage):
    """Product of the squared norms of key and value under one random projection (VASE section 4):

        G ~ N(0, 1/r), one d x r matrix per layer and sequence, shared by heads, keys and values
        score[i] = |k[i] G|^2 |v[i] G|^2 / sum_j |k[j] G|^2 |v[j] G|^2

    ``resample: true`` draws a new G at every event (VASE-DKV), ``false`` keeps the first (CurDKV). Without
    ``rank`` there is no projection, which is the limit of r to infinity.
    """

    stage: Literal["leverage"] = "leverage"
    nonnegative: ClassVar[bool] = True

    rank: int | None = Field(20, ge=1, description="columns r of G; null for no projection")
    resample: bool = Field(True, description="draw G anew at every event")

    def score(self, tokens: TokenStatistics) -> Tensor:
        projection = None
        if self.rank is not None:
            height = max(tokens.dims)
            projection = tokens.normal_matrix(self.stage, height, self.rank, self.resample) / math.sqrt(self.rank)
        return tokens.per_token(lambda keys, values: leverage_scores(keys, values, projection))
