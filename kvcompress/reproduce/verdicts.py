"""What results say about claims: differences with intervals, and one rule for all verdicts.

The unit is a problem. Problems of all tasks are pooled, and a problem that was answered at several cache sizes counts
with the mean over them, so that its answers, which resemble each other, aren't taken for independent. The standard
error is that of :mod:`kvcompress.eval.summary`, by a bootstrap over these units; the interval is 1.96 of it to each
side of the mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from kvcompress.compare import Estimate
from kvcompress.eval.summary import estimate
from kvcompress.reproduce.claims import Comparison
from kvcompress.reproduce.recipes import Arm, arms_of

# Standard errors on both sides that hold 95 % of a normal distribution.
REACH = 1.96
# Whether a problem was answered rightly, by (task, number).
Grades = Mapping[tuple[str, int], float]


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNMEASURED = "not measured"


CRITERIA = {
    Verdict.HOLDS: "the 95 % interval lies above what is claimed (0; for 'no worse' minus the margin)",
    Verdict.FAILS: "the 95 % interval lies below it",
    Verdict.UNDECIDED: "the interval straddles it",
    Verdict.UNMEASURED: "nothing to compare",
    "statement": "holds if all its comparisons do; does not hold if one of them doesn't; undecided otherwise",
}


@dataclass(frozen=True)
class Finding:
    """One comparison and how it came out.

    Attributes:
        label: what was compared. unit: of the numbers, ``share`` of problems (shown in points) or another one.
        value: the mean over units and its standard error. count: of units (problems or sequences).
        bar: what the value is compared with. verdict: by :func:`judge`.
        better, worse: accuracies of the two, over the same units. details: the same difference by size and by task.
    """

    label: str
    unit: str
    value: Estimate | None
    count: int
    bar: float
    verdict: Verdict
    better: Estimate | None = None
    worse: Estimate | None = None
    details: dict[str, Estimate] = field(default_factory=dict)

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.value is None else interval(self.value)

    def document(self) -> dict[str, Any]:
        def plain(value: Estimate | None) -> dict[str, float] | None:
            return None if value is None else {"mean": value.mean, "standard_error": value.standard_error}

        return {
            "compared": self.label,
            "unit": self.unit,
            "difference" if self.better else "value": plain(self.value),
            "interval": None if self.interval is None else list(self.interval),
            "bar": self.bar,
            "count": self.count,
            "verdict": str(self.verdict),
            "better": plain(self.better),
            "worse": plain(self.worse),
            "details": {name: plain(value) for name, value in self.details.items()},
        }


def shown(finding: Finding) -> tuple[str, str]:
    """Value with its error, and interval, as text: shares in points, correlations as they are."""
    if finding.value is None or finding.interval is None:
        return "-", "-"
    low, high = finding.interval
    if finding.unit == "correlation":
        return with_error(finding.value, 1, ".3f"), f"{low:.3f} to {high:.3f}"
    return with_error(finding.value, 100, "+.1f"), f"{100 * low:+.1f} to {100 * high:+.1f}"


def with_error(value: Estimate, factor: float, form: str) -> str:
    """``+1.2 ± 0.3``: both times ``factor``, the error without a sign."""
    return f"{factor * value.mean:{form}} ± {factor * value.standard_error:{form.lstrip('+')}}"


def interval(value: Estimate) -> tuple[float, float]:
    """95 %."""
    return value.mean - REACH * value.standard_error, value.mean + REACH * value.standard_error


def judge(value: Estimate | None, bar: float = 0.0) -> Verdict:
    """Whether a value that should be above ``bar`` is, as far as its interval tells."""
    if value is None:
        return Verdict.UNMEASURED
    low, high = interval(value)
    return Verdict.HOLDS if low > bar else Verdict.FAILS if high < bar else Verdict.UNDECIDED


def conclude(findings: Sequence[Finding]) -> Verdict:
    """Of a statement that says all of these."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAILS in verdicts:
        return Verdict.FAILS
    if verdicts == {Verdict.HOLDS}:
        return Verdict.HOLDS
    return Verdict.UNMEASURED if verdicts <= {Verdict.UNMEASURED} else Verdict.UNDECIDED


def compare(comparison: Comparison, grades: Mapping[Arm, Grades]) -> Finding:
    """The paired difference of two recipes, over the problems and sizes that both have."""
    pairs: dict[tuple[str, int], list[tuple[str, float, float]]] = defaultdict(list)
    for size, (better, worse) in zip(comparison.sizes, arms_of(comparison), strict=True):
        ours, theirs = grades.get(better, {}), grades.get(worse, {})
        for problem in ours:
            if problem in theirs:
                pairs[problem].append((size, ours[problem], theirs[problem]))
    if not pairs:
        return Finding(comparison.label, "share", None, 0, comparison.bar, Verdict.UNMEASURED)
    means = np.array([np.mean([(b, w) for _, b, w in entries], axis=0) for entries in pairs.values()])
    value = estimate(list(means[:, 0] - means[:, 1]))
    details = {}
    for size in comparison.sizes:
        at = [b - w for entries in pairs.values() for s, b, w in entries if s == size]
        if at:
            details[f"size {size}"] = estimate(at)
    for task in dict.fromkeys(task for task, _ in pairs):
        rows = [index for index, (name, _) in enumerate(pairs) if name == task]
        details[f"task {task}"] = estimate(list(means[rows, 0] - means[rows, 1]))
    return Finding(
        comparison.label,
        "share",
        value,
        len(pairs),
        comparison.bar,
        judge(value, comparison.bar),
        estimate(list(means[:, 0])),
        estimate(list(means[:, 1])),
        details,
    )
