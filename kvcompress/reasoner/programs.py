"""Families ``program`` and ``interleaved``: straight-line programs over single letters, modulo 10.

A statement is ``Aa=7`` or ``Cc=a+b``; an operand is a variable or a digit, an operator one of + - *. The statements
stand in the prompt in any order, the labels say in which they run, and the query ``c:AC`` means: tell c, having run A
to C. The chain runs them one by one, copies each and writes the value of every variable next to its name:
``Cc=a7+b2=c9;``.

Operands are mostly the oldest values that haven't been used yet, so that values wait for long until they are needed,
and nearly all of them decide the answer.
"""

from __future__ import annotations

from random import Random

from kvcompress.reasoner.text import LABELS, NAMES, Draft, label_range, step

_OPERATORS = "+-*"
_INITIAL_SHARE = 0.4  # of the statements set a constant
_OLDEST_SHARE = 0.7  # of the operands are the oldest unused variable
_DIGIT_SHARE = 0.15  # of second operands are a digit


def program(rng: Random, difficulty: int, redundancy: int) -> Draft:
    """One program, shuffled."""
    labels = label_range(rng, program_size(difficulty))
    statements, chain, answer = _run(rng, labels, redundancy)
    rng.shuffle(statements)
    return Draft(tuple(statements), f"{answer[0]}:{labels[0]}{labels[-1]}", chain, answer)


def interleaved(rng: Random, difficulty: int, redundancy: int) -> Draft:
    """Two programs that use the same names, shuffled into each other; the query names the labels of one of them."""
    count = interleaved_size(difficulty)
    first = rng.randint(0, len(LABELS) - 2 * count)
    ranges = [LABELS[first : first + count], LABELS[first + count : first + 2 * count]]
    rng.shuffle(ranges)
    statements, chain, answer = _run(rng, ranges[0], redundancy)
    statements += _run(rng, ranges[1], redundancy)[0]
    rng.shuffle(statements)
    return Draft(tuple(statements), f"{answer[0]}:{ranges[0][0]}{ranges[0][-1]}", chain, answer)


def program_size(difficulty: int) -> int:
    """Statements: 2 to 18."""
    return round(0.4 + 1.76 * difficulty)


def interleaved_size(difficulty: int) -> int:
    """Statements of each of the two programs: 2 to 13, which is all that 26 labels allow."""
    return round(1 + 1.2 * difficulty)


def _run(rng: Random, labels: str, redundancy: int) -> tuple[list[str], str, str]:
    """A program with these labels: its statements in order, the chain that runs it, and its last name and value."""
    names = rng.sample(NAMES, len(labels))
    initial = max(1, round(_INITIAL_SHARE * len(labels)))
    values: dict[str, int] = {}
    unused: list[str] = []
    statements, chain = [], []
    for index, (label, name) in enumerate(zip(labels, names, strict=True)):
        # All constants first would make look-ups predictable: later ones are spread over the first half.
        is_initial = index < 2 or (index < len(labels) - 1 and initial > 2 and rng.random() < 0.3)
        if len(labels) == 2 and index == 1:
            is_initial = False
        if is_initial:
            initial -= 1
            value = rng.randint(0, 9)
            statement, worked, tail = str(value), str(value), str(value)
        else:
            left = _pick(rng, values, unused)
            right = str(rng.randint(0, 9)) if rng.random() < _DIGIT_SHARE else _pick(rng, values, unused)
            operator = rng.choice(_OPERATORS)
            numbers = [int(side) if side.isdigit() else values[side] for side in (left, right)]
            value = _apply(operator, *numbers)
            statement = f"{left}{operator}{right}"
            worked = operator.join(
                side if side.isdigit() else f"{side}{number}"
                for side, number in zip((left, right), numbers, strict=True)
            )
            tail = worked
        values[name] = value
        unused.append(name)
        statements.append(f"{label}{name}={statement}")
        result = f"{name}{value}"
        chain.append(step(f"{label}{name}={worked}={result}", (f"{tail}{result}", f"{result}={tail}"), redundancy))
    last = names[-1]
    return statements, "".join(chain), f"{last}{values[last]}"


def _pick(rng: Random, values: dict[str, int], unused: list[str]) -> str:
    """A variable that has a value: mostly the oldest that hasn't been used."""
    if unused and rng.random() < _OLDEST_SHARE:
        return unused.pop(0)
    name = rng.choice(list(values))
    if name in unused:
        unused.remove(name)
    return name


def _apply(operator: str, left: int, right: int) -> int:
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result % 10
