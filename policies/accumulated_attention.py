"""Score by all attention received so far (heavy hitters, H2O, arXiv 2306.14048)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class AccumulatedAttention(ScoreStage):
    """Attention received from every query since the token was cached, averaged over the query group:

        score[i] = 1/g sum_j sum_{t >= i} a[j, t, i]      a[j, t, .] = attention of query t over what was cached then

    Inside a model the wrapper accumulates it at every step, which costs one more query-key product. Without a
    history (``select_tokens`` on bare tensors) the sum runs over the given queries.
    """

    stage: Literal["accumulated_attention"] = "accumulated_attention"
    nonnegative: ClassVar[bool] = True

    @property
    def needs_mass(self) -> bool:
        return True

    def score(self, tokens: TokenStatistics) -> Tensor:
        if tokens.mass is not None:
            return tokens.mass
        return tokens.window_scores().mean(dim=2) * tokens.queries.shape[2]
