"""Quantize what is older than the buffer, and keep the tokens of widest value vectors in full precision."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvcompress.kernels.value_statistics import Statistic
from kvcompress.quant.formats import AnyCodec
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import Rung, StoreStage


class Quantize(StoreStage):
    """One rung below the model's own precision; its error is what the value range predicts:

        step(v) = Range(v) / (2**b - 1)        E[error**2] = step**2 / 12 per element

    so the ``share`` of tokens with the widest value vectors, which would lose most, is not quantized, nor are the
    ``sinks`` and the buffer. This is apart from what a protect stage keeps from eviction: VASE protects a quarter of
    the budget, and a quarter in full precision would cost more bytes than it saves error.
    """

    stage: Literal["quantize"] = "quantize"
    keys: AnyCodec = Field(description="codec of keys: a short name such as int4, or its settings")
    values: AnyCodec = Field(description="codec of values")
    share: float = Field(0.03, ge=0, lt=1, description="share of the budget (or of the cache) in full precision")
    sinks: int = Field(4, ge=0, description="how many first tokens are in full precision besides")
    by: Statistic | Literal["random"] = Field("range", description="which tokens make up the share")

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return (Rung(self.keys, self.values),)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return () if self.by == "random" or not self.share else (self.by,)

    def divide(self, old: int, budget: int | None) -> tuple[int, ...]:
        # Decimal shares are not exact in binary: 0.29 * 100 = 28.999... must give 29.
        share = int(self.share * (old if budget is None else budget) + 1e-9)
        high = min(old, self.sinks + share)
        return high, old - high

    def rank(self, tokens: TokenStatistics, scores: Tensor | None) -> Tensor:
        if self.by == "random":
            ranks = tokens.uniform("quantize").float()
        elif self.share:
            ranks = tokens.value_statistic(self.by)
        else:
            ranks = torch.zeros(tokens.shape, device=tokens.positions.device)
        return ranks.masked_fill(tokens.positions < self.sinks, torch.inf)

    def check_recipe(self, budget: int | None, buffer: int) -> None:
        super().check_recipe(budget, buffer)
        if budget is not None and buffer < budget and not self.divide(budget - buffer, budget)[1]:
            raise ValueError(
                f"{self.stage}: {self.sinks} sinks and a share of {self.share} of budget {budget} leave nothing to "
                f"quantize of the {budget - buffer} slots older than the buffer; lower share or sinks"
            )
