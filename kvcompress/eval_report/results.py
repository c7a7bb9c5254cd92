"""What the runs of a report say together: one panel of points per task, and one of means over tasks.

Runs are joined sample by sample and then summarized as one run (:func:`kvcompress.eval.summarize`), so recipes of
different folders are compared in pairs as well. What would make that unfair is refused: other weights, other problems,
other sampling, other limits. A sample that several runs have counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from kvcompress.compare import Estimate
from kvcompress.config import load_config
from kvcompress.errors import KVCompressError
from kvcompress.eval import Row, read_samples, read_timings, summarize
from kvcompress.eval.records import RUN, key_of, read_run
from kvcompress.eval.request import NO_BUDGET
from kvcompress.eval.summary import ALL_TASKS, REFERENCE

EVICTION, QUANTIZATION, HYBRID, NONE = "eviction", "quantization", "eviction + quantization", "full cache"
# What marks a budget that was a number of bytes, where another run has budgets that are numbers of tokens.
BYTES_MARK = "bytes:"
# Recipes and budgets that a note names at most.
_NAMED = 12


@dataclass(frozen=True)
class Run:
    """One folder: what ``run.json`` says, and the samples and timings that are there so far."""

    folder: Path
    about: dict[str, Any]
    samples: list[dict[str, Any]]
    timings: list[dict[str, Any]]

    @property
    def expected(self) -> int:
        """Samples of the whole run."""
        request = self.about["request"]
        return len(self.about["cells"]) * int(request["problems"]) * int(request["samples"])

    @property
    def by_bytes(self) -> bool:
        return any(setting["target"] is not None for setting in self.about["request"]["settings"])


@dataclass(frozen=True)
class Point:
    """A recipe at a budget in one panel; figures as in :class:`kvcompress.eval.Row`.

    Attributes:
        family: whether it evicts, quantizes, does both or neither.
        versus: paired difference to the reference recipe; None for itself, and where no problem is common.
    """

    recipe: str
    budget: str
    family: str
    problems: int
    samples: int
    accuracy: Estimate
    versus: Estimate | None
    loops: Estimate
    unfinished: Estimate
    output_tokens: float
    kv_bytes: float
    tokens_kept: float

    @property
    def name(self) -> str:
        return self.recipe if self.budget == NO_BUDGET else f"{self.recipe} {self.budget}"


@dataclass(frozen=True)
class Panel:
    """One task, or the mean over all, under the name ``ALL_TASKS``."""

    name: str
    points: list[Point]


@dataclass(frozen=True)
class Results:
    """All that the figures show.

    Attributes:
        panels: the mean over tasks first, if there is more than one task.
        reference: recipe that the others are compared with, or None if there is none.
        at: budget of the ablation. budgets: all of them, as they come. notes: what readers should know.
    """

    runs: list[Run]
    panels: list[Panel]
    reference: str | None
    at: str
    budgets: list[str]
    notes: list[str]

    @property
    def at_budget(self) -> str:
        """The budget of the ablation in words."""
        by_bytes = all(run.by_bytes for run in self.runs) or self.at.startswith(BYTES_MARK)
        return f"{'equal bytes' if by_bytes else 'budget'} {self.at.removeprefix(BYTES_MARK)}"


def load_results(folders: Sequence[Path], *, against: str | None = None, at: str | None = None) -> Results:
    """Read the folders of some runs and join them.

    Args:
        against: recipe that the others are compared with; ``full`` by default, if it is there.
        at: budget of the ablation; by default the one that most recipes share, the middle one of several.

    Raises:
        KVCompressError: naming the folder that is missing, foreign, empty or of another evaluation, or the recipe or
            budget that isn't there, and what is.
    """
    runs = [_read(folder) for folder in folders]
    for first, other in combinations(runs, 2):
        _check_comparable(first, other)
    runs = _marked(runs)
    samples = _joined(runs)
    recipes = list(dict.fromkeys(sample["recipe"] for sample in samples))
    if against is not None and against not in recipes:
        raise KVCompressError(f"against: {against!r} is none of the recipes {', '.join(recipes)}")
    reference = against or (REFERENCE if REFERENCE in recipes else None)
    timings = [timing for run in runs for timing in run.timings]
    rows = summarize(samples, timings, against=[] if reference is None else [reference])
    families = _families(samples)
    budgets = _ordered(dict.fromkeys(row.budget for row in rows))
    panels = [
        Panel(task, [_point(row, families[row.recipe, row.budget], reference) for row in rows if row.task == task])
        for task in dict.fromkeys(row.task for row in rows)
    ]
    # The mean over tasks first.
    panels.sort(key=lambda panel: panel.name != ALL_TASKS)
    notes = [note for run in runs for note in _progress(run)]
    notes += [note for run in runs for note in run.about.get("notes", [])]
    if panels[0].name == ALL_TASKS:
        whole = {point.name for point in panels[0].points}
        lacking = dict.fromkeys(p.name for panel in panels for p in panel.points if p.name not in whole)
        if lacking:
            named = ", ".join(list(lacking)[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
            notes.append(f"not in the mean over tasks, since it lacks a task: {named}")
    return Results(runs, panels, reference, _budget_of(rows, budgets, at), budgets, notes)


def _point(row: Row, family: str, reference: str | None) -> Point:
    return Point(
        recipe=row.recipe,
        budget=row.budget,
        family=family,
        problems=row.problems,
        samples=row.samples,
        accuracy=row.pass_at_1,
        versus=None if reference is None else row.versus.get(reference),
        loops=row.loops,
        unfinished=row.unfinished,
        output_tokens=row.output_tokens,
        kv_bytes=row.kv_bytes,
        tokens_kept=row.tokens_kept,
    )


# -- reading and joining -----------------------------------------------------------------------------------------------


def _read(folder: Path) -> Run:
    if not folder.is_dir():
        raise KVCompressError(f"run folder: no folder {folder}; give one that kvcompress eval has written")
    about = read_run(folder)
    if about is None:
        raise KVCompressError(f"run folder: {folder} has no {RUN}, so it is no run of kvcompress eval")
    lacking = [name for name in ("cells", "model", "versions") if name not in about]
    if lacking:
        raise KVCompressError(f"run folder: {folder / RUN} has no {', '.join(lacking)}, so it is no whole {RUN}")
    samples = read_samples(folder)
    if not samples:
        raise KVCompressError(f"run folder: {folder} has no finished samples yet; let kvcompress eval go on")
    return Run(folder, about, samples, read_timings(folder))


def _check_comparable(first: Run, other: Run) -> None:
    """Refuse to put runs of other weights, problems or sampling side by side."""
    pairs: list[tuple[str, Any, Any]] = [
        (f"model {name}", first.about["model"].get(name), other.about["model"].get(name))
        for name in ("fingerprint", "dtype")
    ]
    asked, also = first.about["request"], other.about["request"]
    pairs += [(name, asked[name], also[name]) for name in ("temperature", "top_p", "seed", "chat")]
    tasks = {task["name"]: task for task in asked["tasks"]}
    pairs += [(f"task {t['name']}", tasks[t["name"]], t) for t in also["tasks"] if t["name"] in tasks]
    limits = {cell["task"]: cell["max_new_tokens"] for cell in first.about["cells"]}
    others = {cell["task"]: cell["max_new_tokens"] for cell in other.about["cells"]}
    pairs += [(f"max_new_tokens of {task}", limits[task], others[task]) for task in others if task in limits]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise KVCompressError(
                f"{name}: {first.folder} has {mine}, {other.folder} has {theirs}, so they can't be compared; "
                "report them apart"
            )


def _marked(runs: list[Run]) -> list[Run]:
    """The runs, with budgets in bytes marked as such where others are in tokens."""
    if len({run.by_bytes for run in runs}) == 1:
        return runs

    def mark(record: Mapping[str, Any]) -> dict[str, Any]:
        budget = record["budget"]
        return {**record, "budget": budget if budget == NO_BUDGET else BYTES_MARK + budget}

    return [
        Run(
            run.folder,
            {**run.about, "cells": [mark(cell) for cell in run.about["cells"]]},
            [mark(sample) for sample in run.samples],
            [mark(timing) for timing in run.timings],
        )
        if run.by_bytes
        else run
        for run in runs
    ]


def _joined(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All samples; what several runs have must have been made alike, and counts once."""
    found: dict[Any, dict[str, Any]] = {}
    configs: dict[tuple[str, str, str], tuple[Any, Path]] = {}
    for run in runs:
        for sample in run.samples:
            cell = sample["recipe"], sample["budget"], sample["task"]
            config, folder = configs.setdefault(cell, (sample["config"], run.folder))
            if sample["config"] != config:
                raise KVCompressError(
                    f"recipe {cell[0]}: has other fields in {run.folder} than in {folder} at budget {cell[1]} on "
                    f"{cell[2]}; report them apart, or name one of the recipes differently"
                )
            found.setdefault(key_of(sample), sample)
    return list(found.values())


def _families(samples: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    configs = {(sample["recipe"], sample["budget"]): sample["config"] for sample in samples}
    return {key: family_of(config) for key, config in configs.items()}


def family_of(config: Mapping[str, Any]) -> str:
    """Whether a recipe evicts, quantizes, does both or neither."""
    loaded = load_config(config)
    if loaded.evicts:
        return HYBRID if loaded.quantizes else EVICTION
    return QUANTIZATION if loaded.quantizes else NONE


def _progress(run: Run) -> list[str]:
    """What a run that isn't finished still lacks."""
    if len(run.samples) >= run.expected:
        return []
    each = run.expected // len(run.about["cells"])
    done = Counter((sample["recipe"], sample["budget"], sample["task"]) for sample in run.samples)
    parts, missing = [], Counter[str]()
    for cell in run.about["cells"]:
        count = done[cell["recipe"], cell["budget"], cell["task"]]
        name = f"{cell['recipe']} {cell['budget']} on {cell['task']}"
        if 0 < count < each:
            parts.append(f"{name} has {count:,} of {each:,} samples")
        elif not count:
            missing[cell["task"]] += 1
    told = [f"{len(run.samples):,} of {run.expected:,} samples so far", *parts]
    told += [f"{count} recipes and budgets not begun on {task}" for task, count in missing.items()]
    return [f"{run.folder} goes on: {'; '.join(told)}"]


def _ordered(budgets: Sequence[str] | Mapping[str, None]) -> list[str]:
    """By size where all are numbers; as they come otherwise."""
    try:
        return sorted(budgets, key=lambda budget: -1.0 if budget == NO_BUDGET else float(budget))
    except ValueError:
        return list(budgets)


def _budget_of(rows: Sequence[Row], budgets: Sequence[str], at: str | None) -> str:
    if at is not None:
        for label in (at, BYTES_MARK + at):
            if label in budgets:
                return label
        raise KVCompressError(f"at: {at!r} is none of the budgets {', '.join(budgets)}")
    shared = Counter(budget for _, budget in {(row.recipe, row.budget) for row in rows} if budget != NO_BUDGET)
    common = [budget for budget in budgets if shared[budget] == max(shared.values())] if shared else [NO_BUDGET]
    return common[(len(common) - 1) // 2]
