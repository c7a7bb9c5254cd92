"""What the samples of a run say: means per recipe, budget and task, and how far they can be trusted.

Standard errors come from a bootstrap over problems: the problems of a task are drawn again, with replacement, and with
them all their samples, since answers to one problem resemble each other. All cells with as many problems use the same
resamples. A difference between two recipes is paired: the bootstrap is over the differences of each problem's pass
rates, so what makes a problem hard for both cancels out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvcompress.compare import Estimate
from kvcompress.errors import KVCompressError
from kvcompress.eval.request import NO_BUDGET

RESAMPLES = 4000
REFERENCE = "full"
DEFINITIONS = {
    "pass_at_1": "mean over problems of the share of a problem's samples that are correct",
    "standard_error": f"standard deviation of the mean over {RESAMPLES} bootstrap resamples of problems",
    "versus": "paired difference of pass_at_1 to another recipe at the same budget, or at its only one, over the "
    "problems that both have",
    "loops": "share of answers that end in at least 3 repetitions of at most 200 tokens",
    "unfinished": "share of answers that were cut off at max_new_tokens",
    "output_tokens": "mean length of answers, the end token counted",
    "kv_bytes": "mean bytes of all that the cache holds for a sequence at the end of its answer",
    "tokens_kept": "mean tokens held per layer and KV head at the end",
    "tokens_per_second": "tokens of all answers / seconds of all batches, prompts read within them",
}
_Cell = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One recipe at one budget on one task; figures as in ``DEFINITIONS``, shares between 0 and 1.

    Attributes:
        problems: of which there are samples. samples: how many in all.
        versus: paired differences by the name of the other recipe; those without common problems are left out.
        tokens_per_second: None without timings.
    """

    recipe: str
    budget: str
    task: str
    problems: int
    samples: int
    pass_at_1: Estimate
    versus: dict[str, Estimate]
    loops: float
    unfinished: float
    output_tokens: float
    kv_bytes: float
    tokens_kept: float
    tokens_per_second: float | None

    def document(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    samples: Iterable[Mapping[str, Any]],
    timings: Iterable[Mapping[str, Any]] = (),
    *,
    against: Sequence[str] = (),
    seed: int = 0,
) -> list[Row]:
    """Rows in the order in which their first samples stand, be the run complete or not.

    Args:
        samples, timings: lines of a run. against: recipes that the others are compared with, besides ``full``.
        seed: of the bootstrap.

    Raises:
        KVCompressError: if ``against`` names a recipe without samples.
    """
    cells: dict[_Cell, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        cells[sample["recipe"], sample["budget"], sample["task"]].append(sample)
    recipes = list(dict.fromkeys(recipe for recipe, _, _ in cells))
    for name in against:
        if cells and name not in recipes:
            raise KVCompressError(f"against: {name!r} is none of the recipes {', '.join(recipes)}")
    others = list(dict.fromkeys([REFERENCE, *against]))
    rates = {cell: _pass_rates(entries) for cell, entries in cells.items()}
    speeds = _speeds(timings)
    rows = []
    for cell, entries in cells.items():
        recipe, budget, task = cell
        versus = {}
        for other in others:
            rival = _rival(other, budget, task, rates)
            if other != recipe and rival is not None and (common := [p for p in rates[cell] if p in rates[rival]]):
                versus[other] = estimate([rates[cell][p] - rates[rival][p] for p in common], seed)
        rows.append(
            Row(
                recipe=recipe,
                budget=budget,
                task=task,
                problems=len(rates[cell]),
                samples=len(entries),
                pass_at_1=estimate(list(rates[cell].values()), seed),
                versus=versus,
                loops=_mean(entry["loop"] for entry in entries),
                unfinished=_mean(not entry["finished"] for entry in entries),
                output_tokens=_mean(entry["output_tokens"] for entry in entries),
                kv_bytes=_mean(entry["kv_bytes"] for entry in entries),
                tokens_kept=_mean(entry["tokens_kept"] for entry in entries),
                tokens_per_second=speeds.get(cell),
            )
        )
    return rows


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of one value per problem, and its standard error by a bootstrap over problems.

    The error of values that are all equal is 0, which says that this sample shows no spread, not that there is none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    means = _resamples(len(numbers), seed) @ numbers / len(numbers)
    return Estimate(float(numbers.mean()), float(means.std()))


@lru_cache(maxsize=8)
def _resamples(count: int, seed: int) -> np.ndarray:
    """(resamples, problems): how often each problem is drawn in each resample, float32."""
    rng = np.random.default_rng(seed)
    draws = [np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(RESAMPLES)]
    return np.array(draws, dtype=np.float32)


def _pass_rates(entries: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Share of correct samples of each problem."""
    grades: dict[int, list[bool]] = defaultdict(list)
    for entry in entries:
        grades[entry["problem"]].append(entry["correct"])
    return {problem: _mean(grades[problem]) for problem in sorted(grades)}


def _rival(other: str, budget: str, task: str, cells: Mapping[_Cell, Any]) -> _Cell | None:
    """The cell of another recipe to compare with: at the same budget, or at its only one."""
    for candidate in (budget, NO_BUDGET):
        if (other, candidate, task) in cells:
            return other, candidate, task
    return None


def _speeds(timings: Iterable[Mapping[str, Any]]) -> dict[_Cell, float]:
    tokens: dict[_Cell, int] = defaultdict(int)
    seconds: dict[_Cell, float] = defaultdict(float)
    for timing in timings:
        cell = timing["recipe"], timing["budget"], timing["task"]
        tokens[cell] += timing["tokens"]
        seconds[cell] += timing["seconds"]
    return {cell: tokens[cell] / seconds[cell] for cell in tokens if seconds[cell]}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([float(value) for value in values]))
