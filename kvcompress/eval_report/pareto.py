"""The Pareto front: what no other point beats in both bytes and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (bytes, accuracy) that no other one dominates, by ascending bytes.

    A point dominates another if it takes no more bytes, is no less accurate, and is better in one of the two; so of
    equal points all are on the front.
    """
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    best = -math.inf
    for index in order:
        size, accuracy = points[index]
        if accuracy > best or (front and points[front[-1]] == (size, accuracy)):
            front.append(index)
            best = accuracy
    return front


def staircase(front: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    """Corners (x, y) of the accuracy that so many bytes buy, from the first point of a front to ``end`` bytes."""
    x: list[float] = []
    y: list[float] = []
    for size, accuracy in front:
        x += [size, size] if y else [size]
        y += [y[-1], accuracy] if y else [accuracy]
    if x:
        x.append(max(end, x[-1]))
        y.append(y[-1])
    return x, y
