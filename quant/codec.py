"""What a codec is: how the vectors of tokens become codes, and back.

A codec turns vectors (..., N, dim) into *parts*, named tensors with one entry per token (or per block of tokens), and
back. It knows exactly which parts it makes, so that bytes are counted rather than estimated, and it predicts its own
error. Everything along the token axis can be gathered, scattered and moved like any other row of a slot.

A codec may work in a rotated basis (:mod:`kvcompress.quant.rotation`). ``decode`` stays in that basis, and attention
goes there with the queries instead, once per step rather than once per cached token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvcompress.kernels.hadamard import hadamard
from kvcompress.quant.rotation import rotation_block


class Part(NamedTuple):
    """One named tensor of encoded tokens.

    Attributes:
        shape: trailing shape of one entry. dtype: of the tensor.
        tokens: consecutive tokens that share an entry; 1 except for metadata that spans tokens.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tokens: int = 1


class Codec(BaseModel, ABC):
    """Base of all codecs; frozen, so that it can be part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: str
    rotate: bool = False

    @property
    def block_tokens(self) -> int:
        """Tokens that must be encoded together and lie in consecutive slots; 1 for a per-token codec."""
        return 1

    @property
    @abstractmethod
    def label(self) -> str:
        """Short name for tables, such as int4."""

    @abstractmethod
    def check(self, dim: int, name: str) -> None:
        """Refuse vectors that the codec cannot hold.

        Args:
            dim: their size. name: the setting to blame, such as ``quantize.keys``.

        Raises:
            ConfigError: naming the setting, the size and what is allowed.
        """

    @abstractmethod
    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        """The tensors that hold tokens of size ``dim``; metadata has the dtype of the pools (16 bits as a rule)."""

    @abstractmethod
    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """:meth:`encode`, of float32 vectors that are in the basis of the codec."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        """(..., N, dim) float32, still in the basis of the codec.

        Args:
            parts: as :meth:`encode` made them; any leading axes.
        """

    @abstractmethod
    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """:meth:`expected_error` of float32 vectors, and within, the basis of the codec."""

    def encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Parts of (..., N, dim) vectors: name -> (..., N // tokens, *shape).

        Args:
            vectors: finite, any float dtype. dtype: of the metadata.
        """
        # Divided first, so that the sums of a rotation cannot overflow.
        return self._encode(self.into_basis(vectors.float() / self._gain(vectors.shape[-1])), dtype)

    def reconstruct(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        """(..., N, dim) float32 in the basis that the vectors came in."""
        return self.out_of_basis(self.decode(parts, dim))

    def expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """Predicted mean squared error per element of each token: (..., N) float32."""
        gain = self._gain(vectors.shape[-1])
        # Leaving the basis multiplies squared lengths by the gain.
        error = self._expected_error(self.into_basis(vectors.float() / gain), dtype) * gain
        return error.clamp_max(torch.finfo(torch.float32).max)

    def into_basis(self, vectors: Tensor) -> Tensor:
        """H x, for queries that meet decoded keys: (H q) . decode(k) = q . k. Unchanged without rotation."""
        return hadamard(vectors, rotation_block(vectors.shape[-1])) if self.rotate else vectors

    def out_of_basis(self, vectors: Tensor) -> Tensor:
        """Vectors, or weighted sums of them, from the basis of :meth:`decode` back to the original one."""
        return self.into_basis(vectors)

    def _gain(self, dim: int) -> int:
        """H H = gain * identity. Dividing by it at encoding keeps every entry within the largest of the input."""
        return rotation_block(dim) if self.rotate else 1

    def bytes_per_token(self, dim: int, dtype: torch.dtype) -> Fraction:
        """Exact, everything counted."""
        parts = self.parts(dim, dtype).values()
        return sum((Fraction(math.prod(p.shape) * p.dtype.itemsize, p.tokens) for p in parts), Fraction(0))
