"""Protect recent tokens beyond the buffer (the local half of H2O's cache, arXiv 2306.14048)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvcompress.policies._quota import Quota
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import Protected, ProtectStage


class Recent(Quota, ProtectStage):
    """Keep the most recent R tokens; the buffer, which always stays, is counted in:

        P = the R - B candidates of highest position

    Where R is no more than B, the buffer does it and nothing is added.
    """

    stage: Literal["recent"] = "recent"

    def _candidates(self, budget: int, buffer: int) -> int:
        return max(0, self.reserved(budget) - buffer)

    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        return before._replace(others=before.others + self._candidates(budget, buffer))

    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        protected = protected.clone()
        count = self._candidates(tokens.budget, tokens.buffer)
        protected[..., max(0, protected.shape[-1] - count) :] = True
        return protected
