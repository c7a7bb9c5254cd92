"""What a cache holds, in bytes and tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds.

    Attributes:
        bytes_held: bytes of all tensors held: slots in use or not, codes, scales, positions, statistics, query window,
            layers left as they are.
        bytes_full: bytes that a full cache would hold for the tokens seen (padding not counted), in the type of the
            slots.
        events: compressions of each sequence (each covers all layers).
        tokens_seen: tokens of each sequence.
        tokens_kept: slots in use of each sequence, per compressed layer and KV head.
        precisions: how many of those are in which precision, by the name of the type or codec.
        backend: what computed attention over the slots in decode steps: triton, flash_attn or torch; none before the
            first one.
        kernels: by which of them each operation ran last, by its name in :mod:`kvcompress.kernels`; ``prefill`` by the
            model's own attention function (``model``) or by flash-attn.
    """

    bytes_held: int
    bytes_full: int
    events: list[int]
    tokens_seen: list[int]
    tokens_kept: list[int]
    precisions: dict[str, list[int]]
    # What ran says nothing about what is held.
    backend: str = field(default="none", compare=False)
    kernels: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def ratio(self) -> float:
        """How many times smaller than a full cache; below 1 while the slots are not used yet."""
        return self.bytes_full / self.bytes_held if self.bytes_held else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}
