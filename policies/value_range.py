"""Protect tokens whose value vector spreads widely (VASE, arXiv 2606.03928, section on value-range protection)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvcompress.kernels.value_statistics import Statistic
from kvcompress.policies._quota import Quota
from kvcompress.scoring import TokenStatistics, largest
from kvcompress.stages import Protected, ProtectStage


class ValueRange(Quota, ProtectStage):
    """Keep the N_v candidates of largest range, chosen anew at each event:

        Range(v_i) = max_c v_i[c] - min_c v_i[c]
        R_i := Range(v_i), and R_i := +inf where i is protected already (the sinks)
        P = the N_v candidates of largest R

    As in the paper, N_v counts the tokens that earlier stages protect. Ties keep the more recent token. The
    statistics absmax, l2 and var stand in for the range in the paper's comparison.
    """

    stage: Literal["value_range"] = "value_range"
    statistic: Statistic = Field("range", description="which spread of the value vector ranks tokens")

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self.statistic,)

    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        return before._replace(others=max(before.others, self.reserved(budget) - before.prefix))

    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        spread = tokens.value_statistic(self.statistic).masked_fill(protected, torch.inf)
        count = min(self.reserved(tokens.budget), spread.shape[-1])
        return protected.scatter(-1, largest(spread, count), True)
