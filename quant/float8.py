"""Per-token 8-bit floating point with one scale, in groups along the head dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvcompress.kernels.affine import rounded_up
from kvcompress.kernels.precision import widened
from kvcompress.quant.codec import Codec, Part
from kvcompress.quant.groups import check_group, group_size

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float8(Codec):
    """x ~ scale * code, with codes in one of the two 8-bit floating-point formats (OCP FP8, arXiv 2209.05433).

        scale = absmax of the group / largest number of the format, rounded up to its storage type
        code  = x / scale, rounded to the nearest number of the format

    A number is rounded relative to its own size, so an outlier costs the other channels little, and a rotation, which
    spreads it, makes the error larger.

    Error model: rounding to numbers that are ``ulp`` apart costs ulp**2 / 12 on average, so an element costs
    (ulp(|x| / scale) * scale)**2 / 12; the one at absmax is exact. Mean over elements.
    """

    codec: Literal["float8"] = "float8"
    format: Literal["e4m3", "e5m2"] = Field(
        "e4m3", description="bits of exponent and mantissa: e4m3 is finer, e5m2 has more range"
    )
    group: int | None = Field(None, ge=8, description="channels that share a scale; the whole head if left out")
    rotate: bool = Field(False, description="Hadamard rotation before quantizing, which spreads outlier channels")

    @property
    def label(self) -> str:
        return "fp8" if self.format == "e4m3" else f"fp8-{self.format}"

    def check(self, dim: int, name: str) -> None:
        check_group(dim, self.group, name)

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        groups = dim // group_size(dim, self.group)
        return {"codes": Part((dim,), torch.uint8), "scale": Part((groups,), dtype)}

    def _scaled(self, vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(..., groups, size) float32 within the range of the format, and scales (..., groups)."""
        groups = vectors.unflatten(-1, (-1, group_size(vectors.shape[-1], self.group)))
        largest = torch.finfo(_DTYPES[self.format]).max
        scale = rounded_up(groups.abs().amax(dim=-1).double() / largest, dtype)
        steps = scale.float().unsqueeze(-1)
        # Only zeros have scale 0, and only what the storage type of the scale cannot describe has to be clamped.
        return torch.where(steps > 0, groups / steps, 0.0).clamp(-largest, largest), scale

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scaled, scale = self._scaled(vectors, dtype)
        return {"codes": scaled.to(_DTYPES[self.format]).view(torch.uint8).flatten(-2), "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        codes, scale = parts["codes"].view(_DTYPES[self.format]), parts["scale"]
        limit = torch.finfo(scale.dtype).max
        scale = widened(scale)
        groups = codes.to(scale.dtype).unflatten(-1, (-1, group_size(dim, self.group)))
        # The scale was rounded up: the largest code can lie a hair beyond what the pools' type can hold.
        return (groups * scale.unsqueeze(-1)).clamp(-limit, limit).flatten(-2)

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        scaled, scale = self._scaled(vectors, dtype)
        info = torch.finfo(_DTYPES[self.format])
        magnitude = scaled.abs()
        exponent = torch.frexp(magnitude.clamp_min(info.smallest_normal)).exponent
        # frexp counts from [0.5, 1); eps is the spacing in [1, 2).
        ulp = torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)
        ulp = torch.where(magnitude < magnitude.amax(dim=-1, keepdim=True), ulp, 0.0)
        return (ulp * scale.float().unsqueeze(-1)).square().flatten(-2).mean(dim=-1) / 12
