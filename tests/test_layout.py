"""Where tokens lie: the layout against a plain simulation of slots, for any history of appends, crops and events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layout import Event, Layout, RowState, hull

layouts = st.builds(Layout, old=st.integers(1, 12), buffer=st.integers(1, 6))
actions = st.lists(st.one_of(st.integers(1, 20), st.just("event"), st.just("crop")), max_size=40)


def play(layout: Layout, script) -> list[tuple[RowState, list[int | None]]]:
    """States after each action, with what a simulated row of slots holds (token numbers)."""
    row, slots, trace = RowState(), [None] * layout.slots, []
    for action in script:
        if action == "event":
            if not layout.is_full(row):
                continue
            older = layout.slots_in_use(row)[layout.old : layout.old + layout.buffer]
            for slot in older:
                slots[slot] = None
            row = layout.left(row, Event(layout.buffer, evicts=True, rotates=True, room=layout.old))
        elif action == "crop":
            if row.ring < 2:
                continue
            for slot in layout.slots_in_use(row)[-2:]:
                slots[slot] = None
            row = layout.cropped(row, 2)
        else:
            count = min(action, layout.slots - row.held)
            for number, slot in enumerate(layout.next_slots(row, count)):
                assert slots[slot] is None, "a new token would overwrite a live one"
                slots[slot] = row.seen + number
            row = layout.appended(row, count)
        trace.append((row, list(slots)))
    return trace


@given(layouts, actions)
def test_slots_in_use_are_those_that_hold_tokens(layout, script):
    for row, slots in play(layout, script):
        used = layout.slots_in_use(row)
        assert len(set(used)) == len(used) == row.held
        assert sorted(used) == [index for index, token in enumerate(slots) if token is not None]


@given(layouts, actions)
def test_the_span_is_contiguous_and_tight(layout, script):
    for row, slots in play(layout, script):
        start, stop = layout.span(row)
        assert layout.is_contiguous(row)
        assert all((start <= index < stop) == (token is not None) for index, token in enumerate(slots))


@given(layouts, actions)
def test_the_ring_is_listed_in_order_of_time(layout, script):
    for row, slots in play(layout, script):
        ring = [slots[slot] for slot in layout.slots_in_use(row)[row.old :]]
        assert ring == list(range(row.seen - row.ring, row.seen))


@given(layouts, actions)
def test_next_slot_is_the_first_of_the_next_slots(layout, script):
    for row, _ in play(layout, script):
        if row.held < layout.slots:
            assert layout.next_slot(row) == layout.next_slots(row, 1)[0]


@given(layouts, st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_hull_covers_every_row(layout, counts):
    rows = [layout.appended(RowState(), min(count, layout.slots)) for count in counts]
    start, stop = hull(layout, rows)
    for row in rows:
        assert all(start <= slot < stop for slot in layout.slots_in_use(row))


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 30), st.integers(0, 40))
def test_refilled_keeps_the_order_of_time(old, buffer, larger, count):
    """A row that was never compressed moves to a larger layout and back with its tokens in order."""
    small, large = Layout(old, buffer), Layout(old + larger, buffer)
    row = small.appended(RowState(prompt=3), min(count, small.slots))
    moved = large.refilled(row)
    assert (moved.held, moved.seen, moved.prompt) == (row.held, row.seen, 3)
    assert small.refilled(moved) == row
