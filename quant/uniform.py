"""Per-token asymmetric uniform quantization, in groups along the head dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kvcompress.kernels.affine import affine_error, affine_grid
from kvcompress.kernels.dequantize_tokens import dequantize_tokens
from kvcompress.kernels.packing import packed_bytes
from kvcompress.kernels.quantize_tokens import quantize_tokens
from kvcompress.quant.codec import Codec, Part
from kvcompress.quant.groups import check_group, check_groups, check_packing, group_size

Bits = Literal[8, 4, 3, 2]


class Uniform(Codec):
    """b-bit codes with one scale and one offset per group of channels of one token (:mod:`kvcompress.kernels.affine`).

    Error model: mean over groups of scale**2 / 12 * (group - 2) / group, the minimum and the maximum being exact.
    """

    codec: Literal["uniform"] = "uniform"
    bits: Bits = Field(description="bits per code: 8, 4, 3 or 2")
    group: int | None = Field(
        None, ge=8, description="channels that share scale and offset; the whole head if left out"
    )
    groups: int | None = Field(
        None, ge=1, description="instead of group, into how many groups a head is divided, whatever its size"
    )
    rotate: bool = Field(False, description="Hadamard rotation before quantizing, which spreads outlier channels")

    @model_validator(mode="after")
    def _one_spelling(self) -> Self:
        if self.group is not None and self.groups is not None:
            raise ValueError(f"give group or groups, not both (got {self.group} and {self.groups})")
        return self

    def group_size(self, dim: int) -> int:
        """Channels that share scale and offset."""
        return dim // self.groups if self.groups else group_size(dim, self.group)

    @property
    def label(self) -> str:
        return f"int{self.bits}"

    def check(self, dim: int, name: str) -> None:
        check_packing(dim, self.bits, name)
        check_group(dim, self.group, name)
        check_groups(dim, self.groups, name)

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        groups = dim // self.group_size(dim)
        return {
            "codes": Part((packed_bytes(dim, self.bits),), torch.uint8),
            "scale": Part((groups,), dtype),
            "offset": Part((groups,), dtype),
        }

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        codes, scale, offset = quantize_tokens(vectors, self.bits, self.group_size(vectors.shape[-1]), dtype)
        return {"codes": codes, "scale": scale, "offset": offset}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        size = self.group_size(dim)
        return dequantize_tokens(parts["codes"], parts["scale"], parts["offset"], self.bits, size)

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        size = self.group_size(vectors.shape[-1])
        low, high = torch.aminmax(vectors.unflatten(-1, (-1, size)), dim=-1)
        scale, _ = affine_grid(low, high, self.bits, dtype)
        return affine_error(scale, size).mean(dim=-1)
