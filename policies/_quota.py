"""How many tokens a protect stage reserves: a number of tokens, or a share of the budget."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator


class Quota(BaseModel):
    """Mixin with the two spellings of a reserve, of which exactly one is given."""

    tokens: int | None = Field(None, ge=1, description="reserved tokens per head")
    share: float | None = Field(None, gt=0, le=1, description="reserved tokens as a share of the budget K")

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        if (self.tokens is None) == (self.share is None):
            raise ValueError(f"give exactly one of tokens and share, got tokens={self.tokens}, share={self.share}")
        return self

    def reserved(self, budget: int) -> int:
        """Tokens reserved under ``budget``: ``tokens``, or ``share`` of it rounded down.

        Raises:
            ValueError: if the share is less than one token.
        """
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        # Decimal shares are not exact in binary: 0.29 * 100 = 28.999... must reserve 29.
        reserved = int(self.share * budget + 1e-9)
        if reserved < 1:
            raise ValueError(f"share: {self.share} of budget {budget} is less than one token; use at least 1/{budget}")
        return reserved
