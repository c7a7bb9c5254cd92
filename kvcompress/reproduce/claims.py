"""The claims, as data: what each says, what was published, what is compared, and from when on it holds.

Nothing here may be chosen after a look at results. A comparison says which recipe should be the more accurate one, at
which sizes of the cache, and by how much more at least (``bar``); :mod:`kvcompress.reproduce.verdicts` does the rest.

Published figures: T.-Y. Chang et al., VASE, arXiv 2606.03928 (ablations on GSM8K with Qwen3-4B and K = 512; main tables
on five tasks with Qwen3-4B and 14B), the numbers in the authors' code and logs where the paper shows a picture, and the
abstract of arXiv 2609.03430 for the recipe that keeps the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

FULL = "full"
WHOLE = "-"  # size of what keeps everything
# The cache sizes at which recipes that evict are judged, as ratios of the context: about 4x, 2.7x and 2x. At 4x most
# recipes are near the floor on the bundled reasoner (measured before), so claims about them are judged at the others.
BUDGETS = ("0.25", "0.375", "0.5")
JUDGED = ("0.375", "0.5")
# Where N_v is varied: K is 224 to 460 tokens, so that 128 value slots fit every task.
SLOTS_AT = ("0.5",)
# Equal bytes, as ratios of the full 16-bit cache. Four bits for everything don't fit below 0.4.
TIGHT, ROOMY = "bytes:0.25", "bytes:0.4"
SLOTS = (16, 32, 64, 128)
# By how much a recipe may be behind and still count as no worse.
MARGIN = 0.05
# Least rank correlation that is called a prediction.
STRONG = 0.5


@dataclass(frozen=True)
class Comparison:
    """Accuracy of ``better`` minus that of ``worse``, problem by problem, and of each problem's mean over ``sizes``.

    Attributes:
        better, worse: names of recipes, see :mod:`kvcompress.reproduce.recipes`.
        sizes: of the cache: ratios of the context (``0.5``), or of the full cache's bytes (``bytes:0.25``). A recipe
            that keeps everything has but one.
        bar: the difference that is claimed, as a share of problems: 0 for better, negative for no worse.
    """

    better: str
    worse: str
    sizes: tuple[str, ...]
    bar: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.better} - {self.worse}"


@dataclass(frozen=True)
class Measurement:
    """Something measured on the model's values, per layer, instead of accuracy.

    Attributes:
        what: ``spearman``, the rank correlation of a value vector's range and its squared error; or ``share``, the part
            of all squared error that the widest quarter of vectors has, minus the part of a random quarter.
        bits: of the quantizer. bar: as for :class:`Comparison`.
    """

    what: Literal["spearman", "share"]
    bits: int
    bar: float


@dataclass(frozen=True)
class Statement:
    """A part of a claim that can hold or not by itself: that all its comparisons come out as said.

    Attributes:
        published: what was found where the claim was made, or that nothing was.
    """

    text: str
    published: str
    comparisons: tuple[Comparison | Measurement, ...]


@dataclass(frozen=True)
class Claim:
    """Attributes: ``key``: what ``--claim`` calls it."""

    key: str
    title: str
    statements: tuple[Statement, ...]


def slots(base: str, count: int) -> str:
    """Name of a recipe with so many value slots; none of them is the recipe without protection."""
    if count == 0:
        return {"attn-value-top": "snapkv", "vase-attnv": "attn-sample"}[base]
    return f"{base}, {count} value slots"


def _ranked(first: str, others: tuple[str, ...], sizes: tuple[str, ...], bar: float = 0.0) -> tuple[Comparison, ...]:
    return tuple(Comparison(first, other, sizes, bar) for other in others)


def _slot_statements(base: str, rest: str, published: str) -> tuple[Statement, ...]:
    return (
        Statement(
            f"Protecting 16, 32, 64 or 128 widest values beats protecting none ({rest})",
            published,
            tuple(Comparison(slots(base, n), slots(base, 0), SLOTS_AT) for n in SLOTS),
        ),
        Statement(
            f"Every doubling of the value slots helps ({rest})",
            published,
            tuple(Comparison(slots(base, more), slots(base, fewer), SLOTS_AT) for fewer, more in pairwise(SLOTS)),
        ),
    )


_BASELINES = ("snapkv", "r-kv", "cur-dkv")
_STATISTICS = ("l2", "absmax", "var")
_HYBRIDS = ("snapkv", "vase-attnv", "vase-dkv")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "a",
        "Wide value vectors carry what matters",
        (
            Statement(
                "Evicting the values of largest range hurts more than evicting at random",
                "14.3 % against 53.2 %, full cache 88.0 %",
                (Comparison("evict-random", "evict-large-range", JUDGED),),
            ),
            Statement(
                "Protecting the values of largest range helps SnapKV",
                "80.5 % with 256 value slots of 512 against 64.3 %",
                (Comparison("attn-value-top", "snapkv", JUDGED),),
            ),
            Statement(
                "It is the large range that helps: as many random slots don't do it",
                "said, without figures that are known to us",
                (Comparison("attn-value-top", "attn-random-slots", JUDGED),),
            ),
            Statement(
                "Keeping the values of largest range and nothing else beats keeping random ones",
                "not in the paper; the converse of the first",
                (Comparison("value-range-only", "evict-random", JUDGED),),
            ),
        ),
    ),
    Claim(
        "b",
        "More value slots are better",
        (
            *_slot_statements(
                "attn-value-top",
                "the rest by best attention",
                "N_v = 0, 16, 32, 64, 256: 64.3, 73.3, 76.0, 79.0, 80.5 %",
            ),
            *_slot_statements("vase-attnv", "the rest sampled by attention", "N_v = 0, 256: 70.9, 85.2 %"),
        ),
    ),
    Claim(
        "c",
        "Sampling by attention beats taking the best",
        (
            Statement(
                "Sampling helps beside value slots",
                "85.2 % against 80.5 %",
                (Comparison("vase-attnv", "attn-value-top", JUDGED),),
            ),
            Statement(
                "Sampling helps without value slots",
                "70.9 % against 64.3 %",
                (Comparison("attn-sample", "snapkv", JUDGED),),
            ),
        ),
    ),
    Claim(
        "d",
        "A projection drawn anew at every compression beats a fixed one",
        (
            Statement(
                "VASE-DKV (G resampled) beats CurDKV (G fixed)",
                "87.6 % against 78.6 %; mean of five tasks 57.5 against 49.8 (4B), 64.9 against 55.7 (14B)",
                (Comparison("vase-dkv", "cur-dkv", BUDGETS),),
            ),
        ),
    ),
    Claim(
        "e",
        "Value range is the main source of error under per-token quantization",
        (
            Statement(
                f"Range predicts error: Spearman's correlation is above {STRONG} in every layer",
                "a figure of Pearson's correlations per layer; its numbers are not known to us",
                (Measurement("spearman", 4, STRONG), Measurement("spearman", 2, STRONG)),
            ),
            Statement(
                "The widest quarter of values has a larger part of the squared error than a random quarter",
                "said, without figures that are known to us",
                (Measurement("share", 4, 0.0), Measurement("share", 2, 0.0)),
            ),
        ),
    ),
    Claim(
        "f",
        "The VASE recipes come first at equal budget",
        (
            Statement(
                "VASE-AttnV beats SnapKV, R-KV and CurDKV",
                "mean of five tasks, 4B: 59.1 against 49.2, 54.7, 49.8; 14B: 65.8 against R-KV 60.9, CurDKV 55.7",
                _ranked("vase-attnv", _BASELINES, BUDGETS),
            ),
            Statement(
                "VASE-DKV beats SnapKV, R-KV and CurDKV",
                "mean of five tasks, 4B: 57.5 against 49.2, 54.7, 49.8; 14B: 64.9 against R-KV 60.9, CurDKV 55.7",
                _ranked("vase-dkv", _BASELINES, BUDGETS),
            ),
            Statement(
                "VASE-AttnV beats VASE-DKV",
                "mean of five tasks: 59.1 against 57.5 (4B), 65.8 against 64.9 (14B); not on every task",
                (Comparison("vase-attnv", "vase-dkv", BUDGETS),),
            ),
            Statement(
                "No recipe reaches the full cache",
                "mean of five tasks: full cache 65.0 (4B), 72.3 (14B), VASE-AttnV 6.0 and 6.5 below",
                _ranked(FULL, ("vase-attnv", "vase-dkv", *_BASELINES, "random-prompt"), BUDGETS),
            ),
            Statement(
                f"Keeping the prompt and evicting at random is no worse than others, to {MARGIN:.0%} of problems",
                "arXiv 2609.03430: matches strong evictors (its abstract)",
                _ranked("random-prompt", ("vase-attnv", "vase-dkv", *_BASELINES), BUDGETS, bar=-MARGIN),
            ),
        ),
    ),
    Claim(
        "g",
        "Eviction and quantization together beat either alone at equal bytes",
        (
            Statement(
                "Evicting less and storing the survivors in 4 bits beats evicting more",
                "not measured in the paper, which suggests mixed precision",
                tuple(Comparison(f"{name}-int4", name, (TIGHT, ROOMY)) for name in _HYBRIDS),
            ),
            Statement(
                "Eviction with 4 bits beats quantization alone",
                "not measured in the paper; quantization alone doesn't fit the smaller size",
                tuple(Comparison(f"{name}-int4", alone, (ROOMY,)) for name in _HYBRIDS for alone in ("int4", "int2")),
            ),
            Statement(
                "Quantization alone beats eviction alone",
                "not measured in the paper",
                tuple(Comparison(alone, name, (ROOMY,)) for alone in ("int4", "int2") for name in _HYBRIDS),
            ),
        ),
    ),
    Claim(
        "h",
        "Range is the statistic that protects best",
        (
            Statement(
                "VASE-AttnV that protects by range beats the same by L2 norm, largest absolute value and variance",
                "the method uses range; the authors' logs: range 84.45 %, L2 84.55, absolute 84.65, variance 84.00",
                tuple(Comparison("vase-attnv", f"vase-attnv, {name}", JUDGED) for name in _STATISTICS),
            ),
        ),
    ),
)
