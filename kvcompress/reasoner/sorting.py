"""Family ``sort``: a list of distinct letters is sorted by insertion.

A statement is ``Bk``: item k has label B. The query ``AF`` asks for items A to F in alphabetical order. The chain takes
the items in the order of their labels and writes the list so far anew each time, ``Ak:k;Bc:ck;Ct:ckt;``: what matters
is the newest list, close by, and an item of the prompt that hasn't been looked at yet; all older lists are stale.
"""

from __future__ import annotations

import bisect
from random import Random

from kvcompress.reasoner.text import NAMES, Draft, label_range, step


def sort(rng: Random, difficulty: int, redundancy: int) -> Draft:
    """Items in any order of labels."""
    labels = label_range(rng, sort_size(difficulty))
    items = rng.sample(NAMES, len(labels))
    so_far: list[str] = []
    chain = []
    for label, item in zip(labels, items, strict=True):
        bisect.insort(so_far, item)
        text = "".join(so_far)
        chain.append(step(f"{label}{item}:{text}", (text,), redundancy))
    statements = [label + item for label, item in zip(labels, items, strict=True)]
    rng.shuffle(statements)
    return Draft(tuple(statements), labels[0] + labels[-1], "".join(chain), "".join(so_far))


def sort_size(difficulty: int) -> int:
    """Items: the length of a chain grows with their square."""
    return (3, 5, 7, 9, 11, 12, 14, 15, 16, 17)[difficulty - 1]
