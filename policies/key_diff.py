"""Score by how far a key points away from the mean direction (KeyDiff, arXiv 2504.15364)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class KeyDiff(ScoreStage):
    """a = 1/N sum_j k[j] / |k[j]|,   score[i] = - cos(k[i], a)"""

    stage: Literal["key_diff"] = "key_diff"
    nonnegative: ClassVar[bool] = False

    def score(self, tokens: TokenStatistics) -> Tensor:
        keys = tokens.keys.float()
        anchor = F.normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
        return -F.cosine_similarity(keys, anchor, dim=-1)
