"""Quantities as people write them on the command line: 16K tokens, 4B parameters, 80GB or 24GiB."""

from __future__ import annotations

import re
from fractions import Fraction

from kvcompress.errors import KVCompressError

TOKENS = {"": 1, "k": 2**10, "m": 2**20}
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
BYTES = {**_DECIMAL, **{f"{unit}b": factor for unit, factor in _DECIMAL.items()}, **_BINARY}


def parse_quantity(
    option: str, text: str, units: dict[str, int], allowed: str, least: int = 1, most: int = 10**18
) -> int:
    """A whole number from a number and a unit.

    Args:
        option: to blame. units: factors by lower-case unit. allowed: how to write it.

    Raises:
        KVCompressError: if it is no such quantity, or out of range.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise KVCompressError(f"{option}: {text!r} is not a quantity; write {allowed}")
    value = int(Fraction(match[1]) * units[match[2].lower()])
    if not least <= value <= most:
        raise KVCompressError(f"{option}: {text!r} must be at least {least} and at most {most}")
    return value
