"""Protect tokens at random: the control for value-range protection (VASE ablation "attn_random")."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvcompress.policies._quota import Quota
from kvcompress.scoring import TokenStatistics, largest
from kvcompress.stages import Protected, ProtectStage


class RandomTokens(Quota, ProtectStage):
    """Keep N_v candidates drawn uniformly anew at each event, tokens protected earlier counted in:

        P = the N_v candidates of largest u_i,  u_i ~ U(0, 1), and u_i := +inf where i is protected already

    The draws of a token are independent of those of all other stages.
    """

    stage: Literal["random_tokens"] = "random_tokens"

    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        return before._replace(others=max(before.others, self.reserved(budget) - before.prefix))

    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        draw = tokens.uniform(self.stage).masked_fill(protected, 2.0)
        count = min(self.reserved(tokens.budget), draw.shape[-1])
        return protected.scatter(-1, largest(draw, count), True)
