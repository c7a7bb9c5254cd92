"""Score by how little a token's key repeats the others (R-KV, arXiv 2505.24133)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvcompress.kernels.redundancy import mean_similarity
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class Redundancy(ScoreStage):
    """Minus the softmax of the mean cosine similarity to the other candidates:

        khat[i] = k[i] / (|k[i]| + 1e-8),   c[i] = 1/N sum_{j != i} khat[i] . khat[j]
        score   = - softmax_i(c)

    R-KV is lambda * attention + (1 - lambda) * redundancy: give the two stages those weights.
    """

    stage: Literal["redundancy"] = "redundancy"
    nonnegative: ClassVar[bool] = False

    def score(self, tokens: TokenStatistics) -> Tensor:
        return -torch.softmax(tokens.per_token(lambda keys, _: mean_similarity(keys)), dim=-1)
