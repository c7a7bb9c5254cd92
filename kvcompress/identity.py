"""Who the sequences of a batch are: what keys their random numbers, and which tokens they have seen."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompress.errors import CacheError

# Odd, so that multiplying by it loses nothing in 64-bit arithmetic.
_HISTORY_BASE = 0x9E3779B97F4A7C15 - 2**64


class Identities:
    """Random-number keys and history of the rows of a batch.

    A sequence is keyed by a hash of its prompt's token ids without padding and its occurrence number among equal
    prompts of the batch, so that it draws the same numbers in any batch, and several samples of one prompt draw
    different ones. Given ids override that; where token ids are unknown the row index serves.
    """

    def __init__(self, given: Sequence[int] | None = None) -> None:
        self._given = None if given is None else [int(i) for i in given]
        self.reset()

    def reset(self) -> None:
        self.keys: list[int] | None = None
        self.prompt_lengths: list[int] | None = None
        self._prompts: list[tuple[bytes, int]] | None = None
        self._history: Tensor | None = None
        self._history_known = True

    def declare(self, input_ids: Tensor, attention_mask: Tensor | None, whole: bool) -> None:
        """Take note of the prompts before their first tokens are read, unless the whole prompts are known already.

        Args:
            input_ids: (prompts, columns). attention_mask: same shape, 0 for padding, or None.
            whole: these are the whole prompts, though they may come in chunks; their lengths count.
        """
        if self.prompt_lengths is not None:
            return
        # A first call that was refused may have left prompts and keys of another batch.
        self.keys = None
        prompts = _unpadded(input_ids, attention_mask)
        self._prompts = _numbered([hashlib.blake2b(str(p).encode(), digest_size=8).digest() for p in prompts])
        if whole:
            self.prompt_lengths = [len(prompt) for prompt in prompts]

    def settle(self, rows: int) -> None:
        """Fix the keys, once the size of the batch is known; declared prompts may be repeated evenly (samples, beams).

        Raises:
            CacheError: if the number of prompts or given ids doesn't fit the batch.
        """
        if self.keys is not None:
            return
        if self._given is not None and len(self._given) != rows:
            raise CacheError(f"sequence_ids: {len(self._given)} given for a batch of {rows} sequences")
        if self._prompts is not None:
            repeats, rest = divmod(rows, len(self._prompts))
            if rest or not repeats:
                raise CacheError(f"batch: {len(self._prompts)} prompts were declared for a batch of {rows} sequences")
            self._prompts = _numbered([digest for digest, _ in self._prompts for _ in range(repeats)])
            if self.prompt_lengths is not None:
                self.prompt_lengths = [length for length in self.prompt_lengths for _ in range(repeats)]
        self.keys = self._current_keys(rows)

    def _current_keys(self, rows: int) -> list[int]:
        if self._given is not None:
            return list(self._given)
        if self._prompts is None:
            return list(range(rows))
        return [_sequence_key(digest, occurrence) for digest, occurrence in self._prompts]

    def map_rows(self, picked: Sequence[int]) -> None:
        """Replace the batch by the picked rows."""
        for name in ("keys", "prompt_lengths", "_prompts", "_given"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, [values[i] for i in picked])
        if self._history is not None:
            self._history = self._history[torch.tensor(list(picked), device=self._history.device)]

    def renumber(self) -> None:
        """Give copies of a row random numbers of their own."""
        if self._prompts is not None and self._given is None:
            self._prompts = _numbered([digest for digest, _ in self._prompts])
            self.keys = self._current_keys(len(self._prompts))

    def see(self, input_ids: Tensor | None) -> None:
        """Add the columns of a call, (rows, columns), to the history; None where token ids are unknown."""
        if input_ids is None:
            self._history_known = False
        elif self._history_known:
            self._history = extend_history(self._history, input_ids)

    def forget_history(self) -> None:
        """After a rollback the history can no longer be told."""
        self._history_known = False

    def matches(self, input_ids: Tensor, columns: int) -> bool:
        """Whether the first columns of input_ids are what has been seen; True where that is unknown."""
        if not self._history_known or self._history is None or not columns:
            return True
        prefix = extend_history(None, input_ids[:, :columns].to(self._history.device))
        return prefix.shape == self._history.shape and bool((prefix == self._history).all())

    def to(self, device: torch.device) -> None:
        if self._history is not None:
            self._history = self._history.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and one tensor; the inverse is :meth:`load_state_dict`."""
        prompts = None if self._prompts is None else [[digest.hex(), number] for digest, number in self._prompts]
        return {
            "given": self._given,
            "keys": self.keys,
            "prompt_lengths": self.prompt_lengths,
            "prompts": prompts,
            "history": self._history,
            "history_known": self._history_known,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._given, self.keys = state["given"], state["keys"]
        self.prompt_lengths = state["prompt_lengths"]
        prompts = state["prompts"]
        self._prompts = None if prompts is None else [(bytes.fromhex(digest), number) for digest, number in prompts]
        self._history, self._history_known = state["history"], state["history_known"]


def extend_history(history: Tensor | None, input_ids: Tensor) -> Tensor:
    """Rolling hash of all token ids of each row, in wrapping 64-bit arithmetic: h <- h * A + (id + 1) per column.

    Constant memory, and it never leaves the device until somebody asks whether a history matches.

    Args:
        history: (rows,) int64, or None for no tokens yet. input_ids: (rows, columns).
    """
    columns = input_ids.shape[1]
    if columns == 1 and history is not None:
        return history * _HISTORY_BASE + input_ids[:, 0] + 1
    base = torch.full((columns,), _HISTORY_BASE, dtype=torch.int64, device=input_ids.device)
    powers = torch.cumprod(base, dim=0)
    weights = torch.cat([torch.ones_like(powers[:1]), powers[:-1]]).flip(0)
    added = ((input_ids.to(torch.int64) + 1) * weights).sum(dim=1)
    return added if history is None or not columns else history * powers[-1] + added


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    pairs = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    return [[int(token) for token, real in zip(row, flags, strict=True) if real] for row, flags in pairs]


def _numbered(digests: list[bytes]) -> list[tuple[bytes, int]]:
    """Each digest with its occurrence number among equal ones."""
    seen: Counter[bytes] = Counter()
    numbered = []
    for digest in digests:
        numbered.append((digest, seen[digest]))
        seen[digest] += 1
    return numbered


def _sequence_key(digest: bytes, occurrence: int) -> int:
    key = hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(key, "little", signed=True)
