"""What the task families share: the alphabet, and the redundancy of prompts and chains.

Every statement of a prompt carries a label, a capital letter that is unique in it, and every step of a chain starts
with the label of the statement that it works on. "What comes next" is therefore always a look-up of one character, and
statements can stand in any order.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

NAMES = string.ascii_lowercase  # variables, keys and list items
LABELS = string.ascii_uppercase
SYMBOLS = "=+-*,;:?>.()#/!"
ALPHABET = NAMES + LABELS + string.digits + SYMBOLS

MAX_REDUNDANCY = 9
# The filler before a restatement is a function of its number, so that the chain of a problem is unique and a model can
# be asked for every character of it.
FILLERS = ("", "so", "ok", "hmm", "wait", "well", "check", "again", "indeed", "surely")
COMMENTS = ("so", "ok", "hmm", "wait", "well", "check")
COMMENT_SHARE = 0.25


@dataclass(frozen=True)
class Draft:
    """A problem before it is written out: what a family makes.

    Attributes:
        statements: labelled statements without their final semicolon, in the order of the prompt.
        query: what is asked, without the question mark and the final colon.
        chain: the chain of thought, up to and without the answer.
        answer: what the query asks for.
    """

    statements: tuple[str, ...]
    query: str
    chain: str
    answer: str


def step(core: str, restatements: Sequence[str], redundancy: int) -> str:
    """One step of a chain: ``core``, then ``redundancy`` restatements that count down, then a semicolon.

    ``step("Ac=a7+b2=c9", ["a7+b2c9", "c9=a7+b2"], 2)`` is ``Ac=a7+b2=c9,2ok(a7+b2c9),1so(c9=a7+b2);``. The countdown
    lets a model know how many are left without counting what it wrote.
    """
    blocks = [
        f",{left}{FILLERS[left]}({restatements[(redundancy - left) % len(restatements)]})"
        for left in range(redundancy, 0, -1)
    ]
    return core + "".join(blocks) + ";"


def prompt_text(tag: str, draft: Draft, redundancy: int, rng: Random) -> str:
    """The prompt: family and redundancy, the statements, with comments that mean nothing if redundant, and the query.

    For example ``p2:Bb=a+4;#wait;Aa=3;?b:AB:``.
    """
    parts = [f"{tag}{redundancy}:"]
    for statement in draft.statements:
        parts.append(f"{statement};")
        if redundancy and rng.random() < COMMENT_SHARE:
            parts.append(f"#{rng.choice(COMMENTS)};")
    parts.append(f"?{draft.query}:")
    return "".join(parts)


def label_range(rng: Random, count: int) -> str:
    """``count`` labels in a row, starting anywhere in the alphabet."""
    first = rng.randint(0, len(LABELS) - count)
    return LABELS[first : first + count]
