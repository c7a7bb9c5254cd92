"""Protect the whole prompt (arXiv 2609.03430: with the prompt kept, random eviction is a strong baseline)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvcompress.scoring import TokenStatistics
from kvcompress.stages import Protected, ProtectStage


class Prompt(ProtectStage):
    """Keep every token of the prompt, so that only generated tokens compete:

        P = { i : position(i) < prompt length }

    The prompt must fit into the old slots (budget - buffer); a longer one is refused before anything runs.
    """

    stage: Literal["prompt"] = "prompt"

    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        return before._replace(prefix=max(before.prefix, prompt_length))

    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        return protected | (tokens.positions < tokens.prompt_length[:, None, None])
