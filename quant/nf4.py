"""NormalFloat4 of QLoRA (arXiv 2305.14314), by bitsandbytes: 16 levels at quantiles of the normal distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvcompress.errors import ConfigError
from kvcompress.quant.codec import Codec, Part

# What the 4-bit kernels of bitsandbytes are compiled for; 32 since version 0.49.2.
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class NF4(Codec):
    """x ~ absmax of the group * level, with the nearest of 16 levels from -1 to 1.

    Error model: an element falls anywhere in the cell of its level, bounded by the midpoints to the neighbours, so it
    costs absmax**2 times the mean squared distance of the cell from the level; one at absmax is exact. Mean over
    elements.
    """

    codec: Literal["nf4"] = "nf4"
    group: int = Field(64, description="channels that share an absmax: a block size of bitsandbytes")
    rotate: bool = Field(False, description="Hadamard rotation before quantizing, which spreads outlier channels")

    @property
    def label(self) -> str:
        return "nf4"

    def check(self, dim: int, name: str) -> None:
        # bitsandbytes flattens what it gets: only blocks that divide the head size never cross tokens.
        legal = [size for size in _BLOCK_SIZES if dim % size == 0]
        if self.group not in legal:
            raise ConfigError(
                f"{name}.group: {self.group} is no block size of nf4 that divides head size {dim}; legal groups: "
                f"{', '.join(map(str, legal)) or 'none'}"
            )
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{name}: nf4 needs bitsandbytes: pip install 'kvcompress[quant]'") from error

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        """Codes and absmax; the absmax is float32 whatever the metadata, so that it is exact and cannot overflow."""
        return {"codes": Part((dim // 2,), torch.uint8), "absmax": Part((dim // self.group,), torch.float32)}

    def _scaled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """(..., groups, size) float32 from -1 to 1, and absmax (..., groups)."""
        groups = vectors.unflatten(-1, (-1, self.group))
        absmax = groups.abs().amax(dim=-1)
        # Not left to bitsandbytes, whose reciprocals are wrong for subnormal numbers and zero.
        return groups / torch.where(absmax > 0, absmax, 1.0).unsqueeze(-1), absmax

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scaled, absmax = self._scaled(vectors)
        codes = torch.empty((*vectors.shape[:-1], vectors.shape[-1] // 2), dtype=torch.uint8, device=vectors.device)
        if codes.numel():  # CUDA kernels cannot be launched for nothing
            from bitsandbytes.functional import quantize_4bit

            packed, _ = quantize_4bit(scaled.contiguous(), blocksize=self.group, quant_type="nf4")
            codes = packed.view(codes.shape)
        return {"codes": codes, "absmax": absmax}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        codes, absmax = parts["codes"], parts["absmax"]
        shape = (*codes.shape[:-1], dim)
        if not codes.numel():
            return absmax.new_empty(shape)
        from bitsandbytes.functional import QuantState, dequantize_4bit

        # bitsandbytes reads both through bare pointers, so a view with strides would be read wrongly.
        state = QuantState(
            absmax=absmax.flatten().contiguous(),
            shape=torch.Size(shape),
            dtype=torch.float32,
            blocksize=self.group,
            quant_type="nf4",
        )
        return dequantize_4bit(codes.reshape(-1, 1).contiguous(), state)

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import get_4bit_type

        levels = get_4bit_type("nf4", device=vectors.device)
        borders = (levels[1:] + levels[:-1]) / 2
        start, end = torch.cat([levels[:1], borders]) - levels, torch.cat([borders, levels[-1:]]) - levels
        rms = ((end**3 - start**3) / (3 * (end - start))).sqrt()
        scaled, absmax = self._scaled(vectors)
        errors = torch.where(scaled.abs() < 1, rms[torch.bucketize(scaled, borders)], 0.0)
        return (errors * absmax.unsqueeze(-1)).square().flatten(-2).mean(dim=-1)
