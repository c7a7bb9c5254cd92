"""Per-token asymmetric uniform quantization, in groups along the head dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvcompress.quant.affine import affine_codes, affine_error, affine_grid, affine_values
from kvcompress.quant.codec import Codec, Part
from kvcompress.quant.groups import check_group, check_packing, group_size
from kvcompress.quant.packing import pack, packed_bytes, unpack

Bits = Literal[8, 4, 3, 2]


class Uniform(Codec):
    """b-bit codes with one scale and one offset per group of channels of one token (:mod:`kvcompress.quant.affine`).

    Error model: mean over groups of scale**2 / 12 * (group - 2) / group, the minimum and the maximum being exact.
    """

    codec: Literal["uniform"] = "uniform"
    bits: Bits = Field(description="bits per code: 8, 4, 3 or 2")
    group: int | None = Field(
        None, ge=8, description="channels that share scale and offset; the whole head if left out"
    )
    rotate: bool = Field(False, description="Hadamard rotation before quantizing, which spreads outlier channels")

    @property
    def label(self) -> str:
        return f"int{self.bits}"

    def check(self, dim: int, name: str) -> None:
        check_packing(dim, self.bits, name)
        check_group(dim, self.group, name)

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        groups = dim // group_size(dim, self.group)
        return {
            "codes": Part((packed_bytes(dim, self.bits),), torch.uint8),
            "scale": Part((groups,), dtype),
            "offset": Part((groups,), dtype),
        }

    def _grid(self, vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        groups = vectors.unflatten(-1, (-1, group_size(vectors.shape[-1], self.group)))
        low, high = torch.aminmax(groups, dim=-1)
        return groups, *affine_grid(low, high, self.bits, dtype)

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        groups, scale, offset = self._grid(vectors, dtype)
        codes = affine_codes(groups, scale, offset, self.bits).flatten(-2)
        return {"codes": pack(codes, self.bits), "scale": scale, "offset": offset}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        codes = unpack(parts["codes"], self.bits).unflatten(-1, (-1, group_size(dim, self.group)))
        return affine_values(codes, parts["scale"], parts["offset"]).flatten(-2)

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        groups, scale, _ = self._grid(vectors, dtype)
        return affine_error(scale, groups.shape[-1]).mean(dim=-1)
