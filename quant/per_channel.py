"""Uniform quantization per channel, in groups along the tokens: the keys of KIVI (arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from kvcompress.kernels.affine import affine_codes, affine_error, affine_grid, affine_values
from kvcompress.kernels.packing import pack, packed_bytes, unpack
from kvcompress.quant.codec import Codec, Part
from kvcompress.quant.groups import check_packing
from kvcompress.quant.uniform import Bits


class PerChannel(Codec):
    """b-bit codes with one scale and one offset per channel of a block of tokens (:mod:`kvcompress.kernels.affine`).

    A channel of keys that is far larger than the others then costs the others nothing. A block is encoded as a whole,
    so nothing can be written over one of its tokens alone.

    Error model: mean over channels of scale**2 / 12 * (tokens - 2) / tokens, the same for all tokens of a block.
    """

    codec: Literal["per_channel"] = "per_channel"
    bits: Bits = Field(description="bits per code: 8, 4, 3 or 2")
    tokens: int = Field(32, ge=2, description="consecutive tokens that share the scale and offset of a channel")

    @field_validator("rotate")
    @classmethod
    def _keep_channels_apart(cls, rotate: bool) -> bool:
        if rotate:
            raise ValueError(
                "true, but a rotation mixes the channels that per-channel scales keep apart; use false, or the codec "
                "uniform"
            )
        return rotate

    @property
    def block_tokens(self) -> int:
        return self.tokens

    @property
    def label(self) -> str:
        return f"int{self.bits}-channel"

    def check(self, dim: int, name: str) -> None:
        check_packing(dim, self.bits, name)

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        return {
            "codes": Part((packed_bytes(dim, self.bits),), torch.uint8),
            "scale": Part((dim,), dtype, tokens=self.tokens),
            "offset": Part((dim,), dtype, tokens=self.tokens),
        }

    def _grid(self, vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Groups (..., blocks, dim, tokens), scale and offset (..., blocks, dim)."""
        assert vectors.shape[-2] % self.tokens == 0, f"{vectors.shape[-2]} tokens, no multiple of {self.tokens}"
        groups = vectors.unflatten(-2, (-1, self.tokens)).transpose(-1, -2)
        low, high = torch.aminmax(groups, dim=-1)
        return groups, *affine_grid(low, high, self.bits, dtype)

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        groups, scale, offset = self._grid(vectors, dtype)
        codes = affine_codes(groups, scale, offset, self.bits).transpose(-1, -2).flatten(-3, -2)
        return {"codes": pack(codes, self.bits), "scale": scale, "offset": offset}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        codes = unpack(parts["codes"], self.bits).unflatten(-2, (-1, self.tokens)).transpose(-1, -2)
        return affine_values(codes, parts["scale"], parts["offset"]).transpose(-1, -2).flatten(-3, -2)

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        _, scale, _ = self._grid(vectors, dtype)
        return affine_error(scale, self.tokens).mean(dim=-1).repeat_interleave(self.tokens, dim=-1)
