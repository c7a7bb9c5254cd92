"""Score by the attention of a window of recent queries (SnapKV, arXiv 2404.14469; VASE-AttnV, arXiv 2606.03928)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class Attention(ScoreStage):
    """Smoothed mean attention that the last W queries of the group pay to each candidate (VASE section 3):

        a[j, w, i] = softmax_i( q[j, w] . k[i] / (temperature sqrt(d)) )      over the candidates only
        m[j, i]    = 1/W sum_w a[j, w, i]
        s[j, i]    = 1/n sum_{|delta| <= n // 2} m[j, i + delta]              n = smoothing, zero outside
        score[i]   = 1/g sum_j s[j, i]

    Neighbours i + delta are neighbours in *position* among the candidates, so the order of slots doesn't matter.
    """

    stage: Literal["attention"] = "attention"
    nonnegative: ClassVar[bool] = True

    window: int | None = Field(None, ge=1, description="queries W; the buffer if left out, at most the buffer")
    smoothing: int = Field(5, ge=1, description="width n of the smoothing, odd; 1 is none")
    pooling: Literal["mean", "max"] = Field("mean", description="how the smoothing joins neighbours")
    edges: Literal["zero", "shrink"] = Field(
        "zero", description="at the ends, mean over n with zeros outside (as published) or over what is there"
    )
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="divides the logits")
    group: Literal["mean", "max"] = Field("mean", description="how the query heads of a group join")

    @field_validator("smoothing")
    @classmethod
    def _smoothing_odd(cls, smoothing: int) -> int:
        if smoothing % 2 == 0:
            raise ValueError("must be odd, so that each token is the middle of its neighbours")
        return smoothing

    def queries_needed(self, buffer: int) -> int:
        return self.window if self.window is not None else buffer

    def score(self, tokens: TokenStatistics) -> Tensor:
        attention = tokens.window_scores(self.window, self.temperature)
        smooth = self.smooth(attention)
        return smooth.mean(dim=2) if self.group == "mean" else smooth.amax(dim=2)

    def smooth(self, scores: Tensor) -> Tensor:
        """Pool (..., N) along its last axis; same shape."""
        if self.smoothing == 1:
            return scores
        flat = scores.reshape(-1, 1, scores.shape[-1])
        half = self.smoothing // 2
        if self.pooling == "max":
            pooled = F.max_pool1d(flat, self.smoothing, stride=1, padding=half)
        else:
            pooled = F.avg_pool1d(flat, self.smoothing, stride=1, padding=half, count_include_pad=self.edges == "zero")
        return pooled.reshape(scores.shape)
