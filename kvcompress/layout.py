"""Where the tokens of a sequence lie in its slots, in plain integers of the host.

The slots of one (layer, sequence, KV head) that hold tokens in the pools' own type form three regions:

    |  half X (B)  |      old slots (M)      |  half Y (B)  |

Tokens fill the old slots, then Y upwards, then X *downwards*, so that the slots in use always form one contiguous
span that attention can read without a mask. An event frees the half that holds the older tokens of the ring; new
tokens fill it again, outwards from the old slots, so the span stays contiguous and the halves swap roles.

Under a store stage most old tokens lie in coded pools instead, and the middle region only holds the few that keep
their precision. Tokens then always enter through the ring, and how many old ones are in which pool is a function of
their number. Nothing here reads a device: lengths, events and spans are known on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Division = Callable[[int], tuple[int, ...]]


def undivided(old: int) -> tuple[int, ...]:
    """All old tokens keep their precision."""
    return (old,)


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
class Event:
    """What follows the attention of a call: tokens leave the buffer, and candidates may have to go.

    Attributes:
        leaving: tokens that become old; negative where a row so short compresses that recent ones lie in old slots.
        evicts: all but ``room`` candidates are evicted; otherwise all of them stay.
        rotates: exactly the older half of a full ring leaves, so that everything else stays in its slots.
        room: M, the candidates that an eviction leaves.
    """

    leaving: int
    evicts: bool
    rotates: bool
    room: int


@dataclass(frozen=True)
class Layout:
    """Room for ``old`` tokens, and for 2 * ``buffer`` recent ones in the two halves of the ring.

    Attributes:
        divide: how many of a number of old tokens keep their precision, and how many are in each coded pool; every
            entry grows with the number.
    """

    old: int
    buffer: int
    divide: Division = undivided

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.old + 2 * self.buffer

    @property
    def high(self) -> int:
        """Slots between the halves."""
        return self.divide(self.old)[0]

    @property
    def coded(self) -> tuple[int, ...]:
        """Slots of each coded pool."""
        return self.divide(self.old)[1:]

    @property
    def slots(self) -> int:
        """Slots that hold tokens in the pools' own type."""
        return self.high + 2 * self.buffer

    def ring_slot(self, index: int, flipped: bool) -> int:
        """Slot of the ring's token ``index``, 0 being the oldest."""
        half, depth = divmod(index, self.buffer)
        downwards = (half == 1) != flipped
        return self.buffer - 1 - depth if downwards else self.buffer + self.high + depth

    def ring_slots(self, row: RowState) -> list[int]:
        """Slots of the ring's tokens in order of time."""
        return [self.ring_slot(index, row.flipped) for index in range(row.ring)]

    def slots_in_use(self, row: RowState) -> list[int]:
        """Slots of all tokens outside the coded pools: the old ones in slot order, then the ring in order of time."""
        return [*range(self.buffer, self.buffer + self.divide(row.old)[0]), *self.ring_slots(row)]

    def next_slots(self, row: RowState, count: int) -> list[int]:
        """Slots that the next ``count`` tokens go to; there must be room for them."""
        used = self.divide(row.old)[0] + row.ring
        return self.slots_in_use(self.appended(row, count))[used:] if count else []

    def next_slot(self, row: RowState) -> int:
        """Slot that the next token goes to."""
        if not self.coded and row.ring == 0 and row.old < self.old:
            return self.buffer + row.old
        return self.ring_slot(row.ring, row.flipped)

    def appended(self, row: RowState, count: int) -> RowState:
        """The row after ``count`` more tokens have been written."""
        to_old = min(count, self.old - row.old) if row.ring == 0 and not self.coded else 0
        return replace(row, seen=row.seen + count, old=row.old + to_old, ring=row.ring + count - to_old)

    def cropped(self, row: RowState, count: int) -> RowState:
        """The row without its last ``count`` tokens; after an event only tokens of the ring can go."""
        from_ring = min(count, row.ring)
        return replace(row, seen=row.seen - count, ring=row.ring - from_ring, old=row.old - (count - from_ring))

    def left(self, row: RowState, event: Event) -> RowState:
        """The row after an event, once the new tokens have been written or counted in."""
        old, ring = row.old + event.leaving, row.ring - event.leaving
        if event.evicts:
            old = min(old, event.room)
        flipped = not row.flipped if event.rotates else False
        return replace(row, old=old, ring=ring, flipped=flipped, events=row.events + event.evicts)

    def span(self, row: RowState) -> tuple[int, int]:
        """(start, stop) of the smallest range of slots that holds all tokens outside the coded pools."""
        start, stop = self.buffer, self.buffer + self.divide(row.old)[0]
        upwards, downwards = min(row.ring, self.buffer), max(0, row.ring - self.buffer)
        if row.flipped:
            upwards, downwards = downwards, upwards
        if downwards:
            start = self.buffer - downwards
        if upwards:
            stop = self.buffer + self.high + upwards
        return start, stop

    def is_contiguous(self, row: RowState) -> bool:
        """Whether every slot of the span is in use."""
        start, stop = self.span(row)
        return stop - start == self.divide(row.old)[0] + row.ring

    def is_full(self, row: RowState) -> bool:
        """Whether there is no room for another token."""
        return row.held == self.capacity

    def refilled(self, row: RowState) -> RowState:
        """The same row in this layout, coming from one with another number of old slots."""
        if row.events or self.coded:
            return row
        fresh = replace(row, seen=row.seen - row.held, old=0, ring=0, flipped=False)
        return self.appended(fresh, row.held)


def hull(layout: Layout, rows: list[RowState]) -> tuple[int, int]:
    """Smallest range of slots that holds all tokens of all rows, those in coded pools left out."""
    spans = [layout.span(row) for row in rows if row.held]
    if not spans:
        return layout.buffer, layout.buffer
    return min(start for start, _ in spans), max(stop for _, stop in spans)
