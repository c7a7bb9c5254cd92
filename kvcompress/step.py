"""The plan of one forward pass: which tokens go to which slots, and which sequences compress.

A plan is made once per forward from host integers and the padding of the new tokens, and serves all layers. It
changes nothing by itself: the cache commits ``after`` when the last layer has attended, so that a decode step that
fails half way can be repeated. After a longer call that fails half way the cache refuses to go on until it is reset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvcompress.config import CompressionConfig
from kvcompress.errors import CacheError
from kvcompress.layout import Event, Layout, RowState, hull


@dataclass(frozen=True)
class RowGroup:
    """Rows that one call can treat alike: equal slots in use, equally many new tokens.

    Attributes:
        rows: indices in the batch.
        before: their states before the new tokens.
        new: new tokens of each row, at the end of the chunk.
        event: what follows the attention of these tokens, or None.
    """

    rows: list[int]
    before: list[RowState]
    new: int
    event: Event | None


@dataclass
class StepPlan:
    """One forward pass of ``length`` columns.

    Attributes:
        decode: one real token for every row, written to its slot before attention.
        slots, times: slot and position of the new token of each row in a decode step; empty otherwise.
        groups: rows by what happens to them.
        span: slots that attention must read, (start, stop): all rows' tokens, in decode the new ones included.
        masked: not every slot of the span is in use in every row.
        coded: slots of each coded pool that attention must read, from 0.
        coded_masked: rows use different numbers of them.
        stored: some row holds tokens from earlier calls.
        after: state of every row once the forward is complete.
        in_use: (rows, 1, 1, slots) bool by device and pool, 0 being the span and 1, 2, ... the coded pools: which
            slots hold a token; the same in all layers of a decode step, so the first one that needs it leaves it here.
    """

    length: int
    decode: bool
    slots: list[int]
    times: list[int]
    groups: list[RowGroup]
    span: tuple[int, int]
    masked: bool
    coded: tuple[int, ...]
    coded_masked: bool
    stored: bool
    after: list[RowState]
    in_use: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)
    _indices: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def column(self) -> tuple[int, int] | None:
        """(slot, position) of the new token, where they are the same in all rows."""
        if len(set(self.slots)) == 1 and len(set(self.times)) == 1:
            return self.slots[0], self.times[0]
        return None

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, slots and times as (rows,) int64 tensors, made once per forward and device."""
        if device not in self._indices:
            host = (list(range(len(self.slots))), self.slots, self.times)
            rows, slots, times = (torch.tensor(values).to(device, non_blocking=True) for values in host)
            self._indices[device] = (rows, slots, times)
        return self._indices[device]


def new_tokens(valid: Sequence[Sequence[bool]] | None, rows: int, length: int) -> list[int]:
    """Real tokens of each row among the ``length`` new columns.

    Args:
        valid: per row and column, False for padding; None for no padding.

    Raises:
        CacheError: if padding follows a token; only left padding can be told from the end of a sequence.
    """
    if valid is None:
        return [length] * rows
    counts = []
    for row, flags in enumerate(valid):
        count = sum(flags)
        if not all(flags[length - count :]):
            raise CacheError(
                f"attention_mask: row {row} has padding after a token (columns {list(map(int, flags))[:16]}...); "
                "pad on the left (tokenizer.padding_side = 'left')"
            )
        counts.append(count)
    return counts


def plan_step(
    config: CompressionConfig,
    layout: Layout,
    rows: Sequence[RowState],
    counts: Sequence[int],
    length: int,
) -> StepPlan:
    """Decide what a forward pass does.

    Args:
        rows: states before it. counts: real new tokens of each row. length: columns of the call.
    """
    decode = length == 1 and all(counts) and all(row.seen for row in rows)
    members: dict[tuple[int, int, bool, bool, int, Event | None], list[int]] = defaultdict(list)
    before = list(rows)
    for i, row in enumerate(before):
        event = _event(config, layout, row, counts[i], decode)
        members[(row.old, row.ring, row.flipped, bool(row.events), counts[i], event)].append(i)
    groups = []
    after = list(before)
    for (_, _, _, _, new, event), indices in members.items():
        for i in indices:
            after[i] = _state_after(layout, before[i], new, event, decode)
        groups.append(RowGroup(indices, [before[i] for i in indices], new, event))
    attended = [layout.appended(row, 1) for row in before] if decode else before
    span = hull(layout, attended)
    divided = [layout.divide(row.old)[1:] for row in attended]
    full = all(layout.span(row) == span and layout.is_contiguous(row) for row in attended)
    return StepPlan(
        length=length,
        decode=decode,
        slots=[layout.next_slot(row) for row in before] if decode else [],
        times=[row.seen for row in before] if decode else [],
        groups=groups,
        span=span,
        masked=not full,
        coded=tuple(max(counts) for counts in zip(*divided, strict=True)),
        coded_masked=len(set(divided)) > 1,
        stored=any(row.held for row in before),
        after=after,
    )


def _compresses(config: CompressionConfig, row: RowState, new: int) -> bool:
    """Whether an event follows: the row holds K + B tokens, or more, once the new ones are in.

    Under ``prefill: defer`` never within the prompt, and for a prompt that outgrew K + B first at the next multiple
    of B past K, as published (VASE: L > K and L mod B = 0 for K a multiple of B).
    """
    if not config.evicts or not new:
        return False
    length, buffer = row.held + new, config.buffer
    if length < config.max_slots:
        return False
    if config.prefill == "defer" and row.events == 0:
        if row.seen < row.prompt:
            return False
        if row.held >= config.max_slots:
            return (length - config.max_slots) // buffer > (row.held - config.max_slots) // buffer
    return True


def _event(config: CompressionConfig, layout: Layout, row: RowState, new: int, decode: bool) -> Event | None:
    """What follows the attention of ``new`` more tokens of a row."""
    buffer, ring = config.buffer, _with_new(layout, row, new, decode).ring
    if _compresses(config, row, new):
        evicts, room, recent = True, config.old_slots, buffer
    elif layout.coded and ring >= 2 * buffer:
        # The ring is full. Without eviction, tokens leave it in whole blocks of B; with it, as many as there is room
        # for, so that the first compression comes when K + B tokens are held, with or without codes.
        evicts, room = False, layout.old
        leaving = min(ring - buffer, layout.old - row.old) if config.evicts else (ring - buffer) // buffer * buffer
        recent = ring - leaving
    else:
        return None
    leaving = ring - recent
    in_place = layout.coded or layout.old == room
    return Event(leaving, evicts, decode and in_place and ring == 2 * buffer and leaving == buffer, room)


def _with_new(layout: Layout, row: RowState, new: int, decode: bool) -> RowState:
    """The row that an event meets: a decoded token lies in its slot, a chunk comes behind the ring."""
    if decode:
        return layout.appended(row, new)
    return replace(row, seen=row.seen + new, ring=row.ring + new)


def _state_after(layout: Layout, row: RowState, new: int, event: Event | None, decode: bool) -> RowState:
    if event is None:
        # A long deferred prompt needs a larger layout; the cache provides it before anything is written.
        return layout.appended(row, new) if new else row
    return layout.left(_with_new(layout, row, new, decode), event)


def slots_needed(config: CompressionConfig, rows: Sequence[RowState], counts: Sequence[int]) -> int:
    """Tokens that there must be room for until the next event: K + B, or as many as a deferred prompt has then."""
    if not config.evicts:
        held = max(row.held + new for row, new in zip(rows, counts, strict=True))
        # A ring that is full moves a block of its tokens to the old slots, so with codes it must not be the last room.
        return held + 1 if config.quantizes else held
    needed = config.max_slots
    for row, new in zip(rows, counts, strict=True):
        length = row.held + new
        if length >= needed and not _compresses(config, row, new):
            buffers = (length - config.max_slots) // config.buffer + 1
            needed = config.max_slots + buffers * config.buffer
    return needed


def with_prompts(rows: Sequence[RowState], counts: Sequence[int], declared: Sequence[int] | None) -> list[RowState]:
    """Note the prompt length of rows that begin: the declared one, or what the first call brings."""
    lengths = counts if declared is None else declared
    return [replace(row, prompt=lengths[i]) if row.seen == 0 else row for i, row in enumerate(rows)]


def chunk_mask(mask: Tensor | None, valid: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Which new token may look at which new token, as bool (rows or 1, 1, length, length).

    Args:
        mask: what transformers prepared for the new columns: bool or additive, 4-D; or None for plain causal.
        valid: (rows, length) bool, used where ``mask`` is not 4-D.
    """
    if mask is not None and mask.dim() == 4:
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    else:
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        if valid is not None:
            allowed = allowed & valid[:, None, None, :]
    # A padding query that may look nowhere would yield NaN, which a weight of zero doesn't remove; let it see itself.
    return allowed | torch.eye(length, dtype=torch.bool, device=device)
