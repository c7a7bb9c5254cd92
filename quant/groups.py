"""Which head sizes a grouped, packed code fits; refusals name the nearest legal settings."""

from __future__ import annotations

from kvcompress.errors import ConfigError
from kvcompress.kernels.packing import channel_multiple

_BITS = (2, 3, 4, 8)


def group_size(dim: int, group: int | None) -> int:
    """Channels per group: the given number, or the whole vector."""
    return dim if group is None else group


def legal_groups(dim: int) -> list[int]:
    """Group sizes that divide ``dim`` evenly, largest first; no smaller than 8, where metadata outweighs codes."""
    return [size for size in range(dim, 7, -1) if dim % size == 0]


def check_group(dim: int, group: int | None, name: str) -> None:
    """Refuse a group that doesn't divide the vector.

    Raises:
        ConfigError: naming the setting, the head size and the legal groups.
    """
    if group is not None and dim % group:
        legal = ", ".join(map(str, legal_groups(dim))) or "none"
        raise ConfigError(
            f"{name}.group: {group} does not divide head size {dim}; legal groups: {legal} (or leave it out for the "
            "whole head)"
        )


def check_groups(dim: int, groups: int | None, name: str) -> None:
    """Refuse a number of groups that the vector cannot be divided into.

    Raises:
        ConfigError: naming the setting, the head size and the legal numbers.
    """
    legal = [dim // size for size in legal_groups(dim)]
    if groups is not None and groups not in legal:
        raise ConfigError(
            f"{name}.groups: head size {dim} cannot be divided into {groups} equal groups of 8 channels or more; "
            f"legal: {', '.join(map(str, legal)) or 'none'}"
        )


def check_packing(dim: int, bits: int, name: str) -> None:
    """Refuse a number of bits that leaves a byte partly empty.

    Raises:
        ConfigError: naming the setting, the head size and the legal numbers of bits.
    """
    if dim % channel_multiple(bits):
        legal = ", ".join(str(b) for b in _BITS if dim % channel_multiple(b) == 0)
        raise ConfigError(
            f"{name}.bits: {bits}-bit codes fill whole bytes only if the head size is a multiple of "
            f"{channel_multiple(bits)}, and it is {dim}; legal bits: {legal}"
        )
