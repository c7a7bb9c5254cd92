"""Several precisions: the tokens that matter most keep most bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from kvcompress.kernels.value_statistics import Statistic
from kvcompress.quant.allocation import allocate, apportion, lognormal_sensitivities, rung_error
from kvcompress.quant.uniform import Bits, Uniform
from kvcompress.scoring import TokenStatistics
from kvcompress.stages import Rung, StoreStage

_SHARES_TOLERANCE = 1e-6
# Tokens that the profile of sensitivities is sampled at.
_PROFILE = 1000


class Ladder(StoreStage):
    """Rungs of 16 bits (the model's own precision), then ``bits``; below the last one tokens are evicted.

    Who climbs how high is decided once, when a token leaves the buffer, by the value range or, with ``by: error``, by

        p_i Range(v_i)            p_i the score that the score stages give, as an attention weight

    whose square is the token's share in the error of attention (:mod:`kvcompress.quant.allocation`). How many tokens
    there are on each rung is given by ``shares``, or chosen for ``mean_bits`` bits per stored number, metadata
    included, so that the predicted error is least for sensitivities whose logarithm is normal with deviation
    ``spread`` (2.9 on SmolLM2, mean over layers).
    """

    stage: Literal["ladder"] = "ladder"
    bits: tuple[Bits, ...] = Field((8, 4, 2), min_length=1, description="bits of the rungs below 16, descending")
    shares: tuple[float, ...] | None = Field(None, description="shares of the tokens: at 16 bits, then on each rung")
    mean_bits: float | None = Field(None, gt=0, lt=16, description="bits per number, from which shares are chosen")
    spread: float = Field(3.0, gt=0, le=20, description="standard deviation of the logarithm of the sensitivity")
    by: Literal["range", "error"] = Field("range", description="what tokens are ranked by")
    key_bits: Bits = Field(4, description="keys never have fewer bits than this")
    group: int | None = Field(
        None, ge=8, description="channels that share scale and offset; the whole head if left out"
    )
    rotate: bool = Field(False, description="Hadamard rotation before quantizing")

    @field_validator("bits")
    @classmethod
    def _descending(cls, bits: tuple[int, ...]) -> tuple[int, ...]:
        if list(bits) != sorted(set(bits), reverse=True):
            raise ValueError(f"must descend, each once, such as 8, 4, 2 (got {', '.join(map(str, bits))})")
        return bits

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        if (self.shares is None) == (self.mean_bits is None):
            raise ValueError(f"give exactly one of shares and mean_bits, got {self.shares} and {self.mean_bits}")
        if self.shares is not None:
            if len(self.shares) != len(self.bits) + 1:
                raise ValueError(
                    f"shares: {len(self.shares)} given for {len(self.bits) + 1} rungs (16, "
                    f"{', '.join(map(str, self.bits))} bits)"
                )
            if min(self.shares) < 0 or abs(sum(self.shares) - 1) > _SHARES_TOLERANCE:
                raise ValueError(f"shares: must not be negative and add up to 1, got {self.shares}")
        elif self.mean_bits is not None and self.mean_bits < self._costs()[-1]:
            raise ValueError(
                f"mean_bits: {self.mean_bits} is less than the lowest rung takes with its scales and offsets, "
                f"{self._costs()[-1]:g}"
            )
        return self

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return tuple(
            Rung(
                Uniform(bits=max(bits, self.key_bits), group=self.group, rotate=self.rotate),
                Uniform(bits=bits, group=self.group, rotate=self.rotate),
            )
            for bits in self.bits
        )

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return ("range",)

    @property
    def ranks_by_score(self) -> bool:
        return self.by == "error"

    def _costs(self) -> list[float]:
        """Bits per number on each rung; a group of the whole head counts as one of 64."""
        metadata = 32 / (self.group or 64)
        return [16.0, *((max(bits, self.key_bits) + bits) / 2 + metadata for bits in self.bits)]

    @property
    def resolved_shares(self) -> tuple[float, ...]:
        """Shares of the rungs, 16 bits first, given or chosen."""
        if self.shares is not None:
            return self.shares
        assert self.mean_bits is not None
        return _chosen_shares(self.bits, tuple(self._costs()), self.mean_bits, self.spread)

    def divide(self, old: int, budget: int | None) -> tuple[int, ...]:
        return apportion(self.resolved_shares, old)

    def rank(self, tokens: TokenStatistics, scores: Tensor | None) -> Tensor:
        ranks = tokens.value_statistic("range")
        if self.by == "error":
            assert scores is not None
            ranks = ranks * scores
        return ranks


@lru_cache(maxsize=64)
def _chosen_shares(
    bits: tuple[int, ...], costs: tuple[float, ...], mean_bits: float, spread: float
) -> tuple[float, ...]:
    sensitivities = lognormal_sensitivities(_PROFILE, spread)
    errors = [rung_error(16), *(rung_error(b) for b in bits)]
    counts = allocate(sensitivities, errors, costs, mean_bits * _PROFILE)
    return tuple(count / _PROFILE for count in counts)
