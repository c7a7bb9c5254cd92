"""Tokens in codes: what attention and scoring read instead of a tensor of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvcompress.quant.codec import Codec


@dataclass(frozen=True)
class Coded:
    """Encoded vectors (..., N, dim).

    Attributes:
        codec: what made them. parts: as it makes them. dim: size of the vectors.
        channels: only the first so many channels of each vector are meant, once it is out of the basis of the codec;
            None for all.
    """

    codec: Codec
    parts: Mapping[str, Tensor]
    dim: int
    channels: int | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return self.parts["codes"].shape[-2]

    def block(self, start: int, stop: int) -> Tensor:
        """(..., stop - start, channels) float32 in the basis of the codec; all channels if that is a rotated one.

        Args:
            start, stop: multiples of the codec's ``block_tokens``, or N.
        """
        tokens = self.tokens
        parts = {
            name: part[..., start * part.shape[-2] // tokens : stop * part.shape[-2] // tokens, :]
            for name, part in self.parts.items()
        }
        vectors = self.codec.decode(parts, self.dim)
        return vectors if self.codec.rotate else vectors[..., : self.channels]

    def into_basis(self, queries: Tensor) -> Tensor:
        """Queries that meet :meth:`block` of keys."""
        return self.codec.into_basis(queries)

    def out_of_basis(self, sums: Tensor) -> Tensor:
        """Weighted sums of :meth:`block` of values in the basis that the values came in."""
        return self.codec.out_of_basis(sums)[..., : self.channels] if self.codec.rotate else sums

    def vectors(self) -> Tensor:
        """(..., N, channels) float32, all of them in the basis that they came in."""
        return self.out_of_basis(self.block(0, self.tokens))
