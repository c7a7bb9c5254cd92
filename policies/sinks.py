"""Protect the attention sinks (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import Protected, ProtectStage


class Sinks(ProtectStage):
    """Keep the first tokens of the sequence, on which attention rests when it has nowhere else to go:

        P = { i : position(i) < tokens }

    By position, never by slot: a slot may hold anything after the first event.
    """

    stage: Literal["sinks"] = "sinks"
    tokens: int = Field(4, ge=1, description="how many first tokens stay")

    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        return before._replace(prefix=max(before.prefix, self.tokens))

    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        return protected | (tokens.positions < self.tokens)
