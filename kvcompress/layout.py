"""Where the tokens of a sequence lie in its slots, in plain integers of the host.

The slots of one (layer, sequence, KV head) form three regions:

    |  half X (B)  |      old slots (M)      |  half Y (B)  |

Tokens fill the old slots, then Y upwards, then X *downwards*, so that the slots in use always form one contiguous
span that attention can read without a mask. An event frees the half that holds the older tokens of the ring; new
tokens fill it again, outwards from the old slots, so the span stays contiguous and the halves swap roles. Nothing
here reads a device: lengths, events and spans are known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RowState:
    """One sequence of a batch.

    Attributes:
        seen: tokens seen so far, padding not counted.
        old: old slots in use.
        ring: tokens in the two halves.
        flipped: the older half is X rather than Y.
        events: compressions so far.
        prompt: tokens of the prompt.
    """

    seen: int = 0
    old: int = 0
    ring: int = 0
    flipped: bool = False
    events: int = 0
    prompt: int = 0

    @property
    def held(self) -> int:
        """Slots in use per layer and KV head."""
        return self.old + self.ring


@dataclass(frozen=True)
class Layout:
    """Sizes of the regions: ``old`` slots between two halves of ``buffer`` slots."""

    old: int
    buffer: int

    @property
    def slots(self) -> int:
        return self.old + 2 * self.buffer

    def ring_slot(self, index: int, flipped: bool) -> int:
        """Slot of the ring's token ``index``, 0 being the oldest."""
        half, depth = divmod(index, self.buffer)
        downwards = (half == 1) != flipped
        return self.buffer - 1 - depth if downwards else self.buffer + self.old + depth

    def slots_in_use(self, row: RowState) -> list[int]:
        """Slots of all tokens: the old ones in slot order, then the ring in order of time."""
        old = range(self.buffer, self.buffer + row.old)
        return [*old, *(self.ring_slot(index, row.flipped) for index in range(row.ring))]

    def next_slots(self, row: RowState, count: int) -> list[int]:
        """Slots that the next ``count`` tokens go to; there must be room for them."""
        return self.slots_in_use(self.appended(row, count))[row.held :] if count else []

    def next_slot(self, row: RowState) -> int:
        """Slot that the next token goes to."""
        if row.ring == 0 and row.old < self.old:
            return self.buffer + row.old
        return self.ring_slot(row.ring, row.flipped)

    def appended(self, row: RowState, count: int) -> RowState:
        """The row after ``count`` more tokens have been written."""
        to_old = min(count, self.old - row.old) if row.ring == 0 else 0
        return replace(row, seen=row.seen + count, old=row.old + to_old, ring=row.ring + count - to_old)

    def cropped(self, row: RowState, count: int) -> RowState:
        """The row without its last ``count`` tokens; after an event only tokens of the ring can go."""
        from_ring = min(count, row.ring)
        return replace(row, seen=row.seen - count, ring=row.ring - from_ring, old=row.old - (count - from_ring))

    def compressed(self, row: RowState, survivors: int) -> RowState:
        """The row after an event that rewrote all slots: survivors in the old slots, the recent ones in Y."""
        return replace(row, old=survivors, ring=self.buffer, flipped=False, events=row.events + 1)

    def rotated(self, row: RowState) -> RowState:
        """The row after a steady event: the older half is free, the other one is the older now."""
        return replace(row, ring=self.buffer, flipped=not row.flipped, events=row.events + 1)

    def span(self, row: RowState) -> tuple[int, int]:
        """(start, stop) of the smallest range of slots that holds all tokens of the row."""
        start, stop = self.buffer, self.buffer + row.old
        upwards, downwards = min(row.ring, self.buffer), max(0, row.ring - self.buffer)
        if row.flipped:
            upwards, downwards = downwards, upwards
        if downwards:
            start = self.buffer - downwards
        if upwards:
            stop = self.buffer + self.old + upwards
        return start, stop

    def is_contiguous(self, row: RowState) -> bool:
        """Whether every slot of the span is in use."""
        start, stop = self.span(row)
        return stop - start == row.held

    def is_full(self, row: RowState) -> bool:
        """Whether every slot is in use."""
        return row.held == self.slots

    def refilled(self, row: RowState) -> RowState:
        """The same row in this layout, coming from one with another number of old slots."""
        if row.events:
            return row
        fresh = replace(row, seen=row.seen - row.held, old=0, ring=0, flipped=False)
        return self.appended(fresh, row.held)


def hull(layout: Layout, rows: list[RowState]) -> tuple[int, int]:
    """Smallest range of slots that holds all tokens of all rows."""
    spans = [layout.span(row) for row in rows if row.held]
    if not spans:
        return layout.buffer, layout.buffer
    return min(start for start, _ in spans), max(stop for _, stop in spans)
