"""Score by the attention of the last query alone (TOVA, arXiv 2401.06104)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import ScoreStage


class LastQuery(ScoreStage):
    """Attention of the most recent query, averaged over *all* query heads, so that all KV heads keep the same tokens:

        score[i] = 1/H sum_h softmax_i( q[h, last] . k[i] / sqrt(d) )

    That holds as long as no other stage tells the heads of a layer apart (top_k and sinks don't; sample does).
    """

    stage: Literal["last_query"] = "last_query"
    nonnegative: ClassVar[bool] = True

    def queries_needed(self, buffer: int) -> int:
        return 1

    def score(self, tokens: TokenStatistics) -> Tensor:
        return tokens.window_scores(window=1).mean(dim=(1, 2)).unsqueeze(1).expand(tokens.shape)
