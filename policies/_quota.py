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
        """Tokens reserved under ``budget``: ``tokens``, or ``share`` of it rounded down."""
        return self.tokens if self.tokens is not None else int(self.share * budget)  # type: ignore[operator]
