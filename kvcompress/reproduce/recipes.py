"""The recipes that the claims name, and the cache sizes at which they are run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.config import CompressionConfig, load_config, recipe_names
from kvcompress.errors import KVCompressError
from kvcompress.eval.request import NO_BUDGET, Setting
from kvcompress.reproduce.claims import FULL, WHOLE, Claim, Comparison, Measurement

BYTES = "bytes:"
# B of all that compresses: compressions must be many in answers of a few hundred tokens.
BUFFER = 16
_SLOTS = re.compile(r"(.+), (\d+) value slots")


@dataclass(frozen=True)
class Arm:
    """A recipe at one size of the cache: what is evaluated, once, for all claims.

    Attributes:
        recipe: its name here. size: ``0.5`` of the context, ``bytes:0.25`` of the full cache's bytes, ``-`` for all.
    """

    recipe: str
    size: str

    @property
    def slug(self) -> str:
        """A name for folders."""
        size = "" if self.size == WHOLE else f"-at-{self.size.replace(':', '-')}"
        return slug(self.recipe) + size

    def setting(self, seed: int = 0) -> Setting:
        """As :mod:`kvcompress.eval` wants it."""
        config = config_of(self.recipe, seed)
        if self.size == WHOLE:
            return Setting(self.recipe, NO_BUDGET, config)
        if self.size.startswith(BYTES):
            label = self.size.removeprefix(BYTES)
            return Setting(self.recipe, label, config, float(label))
        return Setting(self.recipe, self.size, load_config(config, budget=float(self.size)))


def slug(recipe: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")


def config_of(name: str, seed: int = 0) -> CompressionConfig:
    """The recipe of a name: a packaged one, or ``BASE, 16 value slots``, or ``BASE, l2`` (statistic of protection).

    Raises:
        KVCompressError: if there is no such recipe.
    """
    base = name
    fields: dict[str, Any] = {}
    if match := _SLOTS.fullmatch(name):
        base, fields = match[1], {"value_range.tokens": int(match[2])}
    elif ", " in name:
        base, statistic = name.split(", ", 1)
        fields = {"value_range.statistic": statistic}
    if base not in recipe_names():
        raise KVCompressError(f"recipe: {name!r} is none of the reproduction's: {base!r} is not a packaged recipe")
    overrides: dict[str, Any] = {**fields, "name": name, "seed": seed}
    if load_config(base).stages:
        overrides["buffer"] = BUFFER
    return load_config(base, overrides)


def arms_of(comparison: Comparison) -> list[tuple[Arm, Arm]]:
    """(better, worse) at every size; what keeps everything is the same at all of them."""

    def arm(recipe: str, size: str) -> Arm:
        return Arm(recipe, WHOLE if recipe == FULL else size)

    return [(arm(comparison.better, size), arm(comparison.worse, size)) for size in comparison.sizes]


def arms_for(claims: Iterable[Claim]) -> list[Arm]:
    """What has to be evaluated for these claims, each arm once, the full cache first."""
    found: list[Arm] = [Arm(FULL, WHOLE)]  # the ceiling of every figure, and what the values of claim e come from
    for claim in claims:
        for statement in claim.statements:
            for comparison in statement.comparisons:
                if not isinstance(comparison, Measurement):
                    found += [arm for pair in arms_of(comparison) for arm in pair]
    return list(dict.fromkeys(found))


def write_recipes(arms: Sequence[Arm], folder: Path, seed: int = 0) -> list[Path]:
    """One YAML file per recipe; its budget is the packaged one, ``kvcompress eval --budget`` sets that of a size."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for recipe in dict.fromkeys(arm.recipe for arm in arms):
        paths.append(folder / f"{slug(recipe)}.yaml")
        paths[-1].write_text(config_of(recipe, seed).to_yaml(), encoding="utf-8")
    return paths
