"""What the samples of a run say: means per recipe, budget and task, and how far they can be trusted.

Standard errors come from a bootstrap over problems: the problems of a task are drawn again, with replacement, and with
them all their samples, since answers to one problem resemble each other. All cells with as many problems use the same
resamples. A difference between two recipes is paired: the bootstrap is over the differences of each problem's pass
rates, so what makes a problem hard for both cancels out.

Of several tasks there is a mean too, in which every task counts alike, for the recipes and budgets that all tasks have.
Its standard error comes from a stratified bootstrap: problems are drawn again within each task, independently of the
other tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kvcompress.compare import Estimate
from kvcompress.errors import KVCompressError
from kvcompress.eval.request import NO_BUDGET

RESAMPLES = 4000
REFERENCE = "full"
# The task under which the mean over tasks is listed.
ALL_TASKS = "all tasks"
DEFINITIONS = {
    "pass_at_1": "mean over problems of the share of a problem's samples that are correct",
    "standard_error": f"standard deviation of the mean over {RESAMPLES} bootstrap resamples of problems; of a mean "
    "over tasks, of the problems within each task",
    "versus": "paired difference of pass_at_1 to another recipe at the same budget, or at its only one, over the "
    "problems that both have",
    "loops": "mean over problems of the share of answers that end in at least 3 repetitions of at most 200 tokens",
    "unfinished": "mean over problems of the share of answers that were cut off at max_new_tokens",
    "output_tokens": "mean length of answers, the end token counted",
    "kv_bytes": "mean bytes of all that the cache holds for a sequence at the end of its answer",
    "tokens_kept": "mean tokens held per layer and KV head at the end",
    "tokens_per_second": "tokens of all answers / seconds of all batches, prompts read within them",
    "all_tasks": "mean over tasks of each figure, all counting alike, of recipes and budgets that every task has",
}
# (recipe, budget, task).
_Cell = tuple[str, str, str]
# By task, one number per problem.
_Strata = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Row:
    """One recipe at one budget on one task; figures as in ``DEFINITIONS``, shares between 0 and 1.

    Attributes:
        task: its name, or ``ALL_TASKS`` for the mean over tasks.
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
    loops: Estimate
    unfinished: Estimate
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
    """Rows in the order in which their first samples stand, be the run complete or not; means over tasks at the end.

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
    graded = _Graded(cells, _totals(timings), seed)
    rows = [graded.row(recipe, budget, task, [task], others) for recipe, budget, task in cells]
    tasks = list(dict.fromkeys(task for _, _, task in cells))
    # A file may be named like that; what its rows say must not be mixed up with a mean.
    if len(tasks) > 1 and ALL_TASKS not in tasks:
        pairs = dict.fromkeys((recipe, budget) for recipe, budget, _ in cells)
        whole = [(r, b) for r, b in pairs if all((r, b, task) in cells for task in tasks)]
        rows += [graded.row(recipe, budget, ALL_TASKS, tasks, others) for recipe, budget in whole]
    return rows


class _Graded:
    """The samples of all cells, and what they come to over one task or several."""

    def __init__(
        self,
        cells: Mapping[_Cell, Sequence[Mapping[str, Any]]],
        totals: Mapping[_Cell, tuple[int, float]],
        seed: int,
    ) -> None:
        self.cells, self.totals, self.seed = cells, totals, seed
        self.rates = {cell: _per_problem(entries, lambda e: e["correct"]) for cell, entries in cells.items()}

    def row(self, recipe: str, budget: str, name: str, tasks: Sequence[str], others: Sequence[str]) -> Row:
        """The row of a recipe and a budget that all of ``tasks`` have."""
        own = {task: self.cells[recipe, budget, task] for task in tasks}
        rates = {task: self.rates[recipe, budget, task] for task in tasks}
        versus = {}
        for other in others:
            differences = self._differences(recipe, budget, tasks, other)
            if other != recipe and all(differences.values()):
                versus[other] = self._estimate(differences)

        def mean(field: str) -> float:
            return _mean(_mean(entry[field] for entry in entries) for entries in own.values())

        def share(of: Callable[[Mapping[str, Any]], bool]) -> Estimate:
            return self._estimate({task: _per_problem(entries, of) for task, entries in own.items()})

        totals = [self.totals.get((recipe, budget, task), (0, 0.0)) for task in tasks]
        seconds = sum(seconds for _, seconds in totals)
        return Row(
            recipe=recipe,
            budget=budget,
            task=name,
            problems=sum(map(len, rates.values())),
            samples=sum(map(len, own.values())),
            pass_at_1=self._estimate(rates),
            versus=versus,
            loops=share(lambda entry: entry["loop"]),
            unfinished=share(lambda entry: not entry["finished"]),
            output_tokens=mean("output_tokens"),
            kv_bytes=mean("kv_bytes"),
            tokens_kept=mean("tokens_kept"),
            tokens_per_second=sum(tokens for tokens, _ in totals) / seconds if all(s for _, s in totals) else None,
        )

    def _differences(self, recipe: str, budget: str, tasks: Sequence[str], other: str) -> dict[str, dict[int, float]]:
        """By task, the differences of the problems that both recipes have; none where the other wasn't run."""
        found = {}
        for task in tasks:
            mine, rival = self.rates[recipe, budget, task], _rival(other, budget, task, self.rates)
            theirs = {} if rival is None else self.rates[rival]
            found[task] = {problem: mine[problem] - theirs[problem] for problem in mine if problem in theirs}
        return found

    def _estimate(self, strata: _Strata) -> Estimate:
        values = [list(of_task.values()) for of_task in strata.values()]
        return estimate(values[0], self.seed) if len(values) == 1 else stratified_estimate(values, self.seed)


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of one value per problem, and its standard error by a bootstrap over problems.

    The error of values that are all equal is 0, which says that this sample shows no spread, not that there is none.
    """
    numbers = np.asarray(values, dtype=np.float64)
    return Estimate(float(numbers.mean()), float(_resampled_means(numbers, seed).std()))


def stratified_estimate(strata: Sequence[Sequence[float]], seed: int = 0) -> Estimate:
    """Mean over tasks of their means, and its standard error by a bootstrap over the problems within each task.

    Args:
        strata: by task, one value per problem; tasks may have different numbers of problems.
    """
    numbers = [np.asarray(values, dtype=np.float64) for values in strata]
    # Every task has draws of its own: the same ones for all would make independent tasks move together.
    means = [_resampled_means(of_task, seed, index) for index, of_task in enumerate(numbers)]
    return Estimate(_mean(of_task.mean() for of_task in numbers), float(np.mean(means, axis=0).std()))


def _resampled_means(numbers: np.ndarray, *seed: int) -> np.ndarray:
    """(resamples,) means of ``numbers``."""
    means: np.ndarray = _resamples(len(numbers), seed) @ numbers / len(numbers)
    return means


@lru_cache(maxsize=32)
def _resamples(count: int, seed: tuple[int, ...]) -> np.ndarray:
    """(resamples, problems): how often each problem is drawn in each resample, float32."""
    rng = np.random.default_rng(seed[0] if len(seed) == 1 else seed)
    draws = [np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(RESAMPLES)]
    return np.array(draws, dtype=np.float32)


def _per_problem(entries: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], bool]) -> dict[int, float]:
    """Share of each problem's samples that something is true of."""
    found: dict[int, list[bool]] = defaultdict(list)
    for entry in entries:
        found[entry["problem"]].append(of(entry))
    return {problem: _mean(found[problem]) for problem in sorted(found)}


def _rival(other: str, budget: str, task: str, cells: Mapping[_Cell, Any]) -> _Cell | None:
    """The cell of another recipe to compare with: at the same budget, or at its only one."""
    for candidate in (budget, NO_BUDGET):
        if (other, candidate, task) in cells:
            return other, candidate, task
    return None


def _totals(timings: Iterable[Mapping[str, Any]]) -> dict[_Cell, tuple[int, float]]:
    """Tokens and seconds of each cell."""
    found: dict[_Cell, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for timing in timings:
        cell = timing["recipe"], timing["budget"], timing["task"]
        tokens, seconds = found[cell]
        found[cell] = tokens + timing["tokens"], seconds + timing["seconds"]
    return found


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([float(value) for value in values]))
